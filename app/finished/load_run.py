"""A finished run as a model to ask, loaded by transformers and peft alone; or to score."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from app.adapters.adapters import quiet_peft, read_adapter_config
from app.base.base_weights import LoadOptions
from app.base.load_base import drawing_by, open_folder, quiet_transformers, read_weights
from app.base.names import Names
from app.base.safetensors_files import adapter_weights, tensors_of_file
from app.base.source import (
    REMOTE_CODE,
    fetch_folder,
    ignored_index,
    library_errors,
    require_intact_base,
    require_weights,
    whole_numbers,
)
from app.base.structure import names_in, numbers_in_folder
from app.base.text_part import rename_adapter
from app.base.tokenizer import load_tokenizer, read_tokenizer
from app.config.adapters import ADAPTER, ADAPTER_WEIGHTS
from app.config.schema import ModelConfig, QuantizationConfig
from app.config.tasks import Task, task_of
from app.errors import CheckpointError, gist
from app.layers.attention import own_attention
from app.layers.experts import shown_to_peft, stack_layers, take_over
from app.layers.layer_norm import set_norms
from app.layers.quantization import quantization_after_training, quantizer_of
from app.model.build import DTYPES, ModelSections, build_base
from app.model.losses import Loss
from app.model.training_model import TrainingModel


def load_tuned(
    run: Path,
    model: ModelConfig,
    task: Task,
    *,
    adapter: bool,
    quantization: QuantizationConfig | None = None,
    seed: int = 0,
) -> Any:
    """The tuned model of a run folder; `adapter=False` leaves the adapter off. `seed` is that of the run.

    The base is quantised as it was in training where an adapter has learnt to make up for those very rounding errors.
    """
    final = run / "final"
    has_adapter = _is_adapter(final)
    if not has_adapter and not adapter:
        raise CheckpointError(f"adapter=false: {final} is a whole model, its base is not in it.")
    folder = _base_folder(run, final, model) if has_adapter else final
    if has_adapter:
        require_intact_base(folder)
    require_weights(folder, model.path if has_adapter else str(final))
    dtype = getattr(numbers_in_folder(model, task, folder), "dtype", None) or torch.float32
    quantizer = None if quantization is None else quantizer_of(quantization_after_training(quantization), dtype)
    with drawing_by(seed):
        lm = open_folder(model, task, folder, LoadOptions(dtype, _device(), "eager"), quantizer).whole()
    lm = _for_answers(lm)
    if not has_adapter or not adapter:
        return lm
    return _with_adapter(lm, final, names_in(model, task, folder, lm)).get_base_model()


def weights_of(run: Path, model: ModelConfig, *, tuned: bool) -> ModelConfig:
    """The section `model` with the place where the weights of a finished run, or of its base, are to be read.

    The base of a whole model that began with random weights is drawn again.
    """
    final = run / "final"
    if _is_adapter(final):
        return replace(model, path=str(_base_folder(run, final, model)), weights="pretrained")
    if tuned:
        return replace(model, path=str(final), weights="pretrained")
    if model.weights == "random":
        return model
    return replace(model, path=str(fetch_folder(model, model.path, with_weights=True)))


def reads_base(run: Path, *, tuned: bool) -> bool:
    """Whether the weights of the base are read: those of an adapter always are."""
    return not tuned or _is_adapter(run / "final")


def load_training_model(
    run: Path, sections: ModelSections, loss: Loss, device: torch.device, seed: int, *, tuned: bool
) -> TrainingModel:
    """A finished run, or its base, as training held it, to be scored; `sections.model` is that of `weights_of`."""
    final = run / "final"
    network: Any = build_base(sections, device, seed)
    if _is_adapter(final):
        network.requires_grad_(False)  # as attaching an adapter did in training
        names = names_in(sections.model, task_of(sections.task), Path(sections.model.path), network)
        network = _with_adapter(network, final, names) if tuned else network
    compute = DTYPES[sections.precision].compute
    set_norms(network, sections.model, compute)
    return TrainingModel(
        network.to(device), compute, task_of(sections.task), loss, sections.attention, sections.quantizer
    ).eval()


def load_any(model: ModelConfig, task: Task, say: Callable[[str], None]) -> tuple[Any, Any]:
    """A model of a folder or of the hub with its tokenizer, as it is."""
    folder = fetch_folder(model, model.path, with_weights=True)
    # the adapter of a classifier has a config.json too, with the names of the classes
    if _is_adapter(folder) and all(file.name == ADAPTER_WEIGHTS for file in folder.glob("*.safetensors")):
        raise CheckpointError(
            f"model={model.path}: this is an adapter without its base. Give run=DIR of the run that made it, or "
            "export it: python -m app.export run=DIR kind=merged to=DIR2."
        )
    require_weights(folder, model.path)
    require_intact_base(folder)
    for remark in ignored_index(folder):
        say(remark)
    numbers = whole_numbers(model, folder)  # before AutoTokenizer, which reads config.json too
    numbers._attn_implementation = None  # config.json may name a kernel of the hub, which transformers would fetch
    tokenizer = load_tokenizer(model, needs_template=False)
    options = {"config": numbers, "dtype": "auto", "device_map": {"": _device()}}
    return _for_answers(read_weights(model, task, folder, **options)), tokenizer


def load_tuned_tokenizer(final: Path, trust_remote_code: bool = False) -> Any:
    """The tokenizer that was saved with the weights, chat template included."""
    with library_errors(f"no tokenizer can be read from {final}", REMOTE_CODE, CheckpointError):
        return read_tokenizer(final, trust_remote_code)


def _is_adapter(final: Path) -> bool:
    return (final / ADAPTER).is_file()


def _base_folder(run: Path, final: Path, model: ModelConfig) -> Path:
    """The folder beside the adapter if the base was random (a moved run keeps it), else that of model.path."""
    if (run / "base").is_dir():
        return run / "base"
    if model.weights == "random":
        named = read_adapter_config(final).get("base_model_name_or_path")
        raise CheckpointError(f"run={run}: its base of random weights is not there any more (it was {named}).")
    return fetch_folder(model, model.path, with_weights=True)


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _for_answers(lm: Any) -> Any:
    """The model with an attention that knows a key-value cache."""
    quiet_transformers()
    lm.set_attn_implementation(own_attention(lm))
    return lm.eval()


def _with_adapter(lm: Any, final: Path, names: Names) -> Any:
    from safetensors import SafetensorError

    read_adapter_config(final)
    adapter_weights(final)  # refuses a damaged file
    try:
        with quiet_peft(), shown_to_peft(lm), TemporaryDirectory() as renamed:
            from peft import PeftModel

            warnings.filterwarnings("ignore", message="Found missing adapter keys")  # which are refused below
            folder = Path(renamed) if names.is_part else final
            if names.is_part:
                rename_adapter(final, folder, names.of_trained)
            network = PeftModel.from_pretrained(lm, str(folder)).eval()
            _require_loaded(network, folder)
            if stack_layers(lm):  # PEFT's own forward cannot add to packed stacks
                take_over(network)
            return network
    except (OSError, ValueError, RuntimeError, SafetensorError) as fault:
        raise CheckpointError(f"the adapter in {final} cannot be loaded ({gist(fault)}).") from fault


def _require_loaded(network: Any, folder: Path) -> None:
    """Refuse an adapter that lacks tensors, which PEFT draws, or has others."""
    from peft import get_peft_model_state_dict

    names = get_peft_model_state_dict(network, save_embedding_layers=False).keys()
    odd = sorted(names ^ tensors_of_file(folder / ADAPTER_WEIGHTS).keys())
    if odd:
        raise ValueError(f"{ADAPTER_WEIGHTS} and the layers in {ADAPTER} differ in {odd[0]}")
