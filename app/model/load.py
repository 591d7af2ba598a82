"""A finished run as a model to ask: by transformers and peft alone, as anybody else would load it."""

import json
from pathlib import Path
from typing import Any

import torch

from app.config.schema import ModelConfig, QuantizationConfig
from app.errors import CheckpointError
from app.model.adapter import quiet_peft
from app.model.attention import right_own
from app.model.quantize import packing_of
from app.model.source import fetch_folder, gist, require_weights
from app.model.tasks import Task
from app.model.weights import read_packed, read_weights, stored_dtype

_ADAPTER = "adapter_config.json"


def load_tuned(
    run: Path,
    model: ModelConfig,
    task: Task,
    *,
    adapter: bool,
    quantization: QuantizationConfig | None = None,
) -> Any:
    """The tuned model of a run folder; `adapter=False` leaves the adapter off.

    The base is quantised as it was in training: an adapter has learnt to make up for those very rounding errors.
    """
    final = run / "final"
    if not (final / _ADAPTER).is_file():
        if not adapter:
            raise CheckpointError(f"adapter=false: {final} is a whole model, its base is not in it.")
        return _load(final, str(final), model, task)
    lm = _load(_base_folder(run, final, model), model.path, model, task, quantization)
    return _with_adapter(lm, final) if adapter else lm


def load_tuned_tokenizer(final: Path) -> Any:
    """The tokenizer that was saved with the weights, chat template included."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(final), local_files_only=True)


def _base_folder(run: Path, final: Path, model: ModelConfig) -> Path:
    """Beside the adapter if it was random (a moved run keeps it), else where the run took it from."""
    if (run / "base").is_dir():
        return run / "base"
    if model.weights == "random":
        named = json.loads((final / _ADAPTER).read_text())["base_model_name_or_path"]
        raise CheckpointError(
            f"run={run}: its base of random weights is not there any more (it was {named})."
        )
    return fetch_folder(model, model.path, with_weights=True)


def _load(
    folder: Path, path: str, model: ModelConfig, task: Task, quantization: QuantizationConfig | None = None
) -> Any:
    from transformers import logging

    logging.disable_progress_bar()
    require_weights(folder, path)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if quantization is None or quantization.kind == "none":
        lm = read_weights(model, task, folder, dtype="auto", device_map={"": device})
    else:
        dtype = stored_dtype(model, folder)
        four_bit = packing_of(quantization, dtype)
        assert four_bit is not None
        lm = read_packed(model, task, folder, four_bit, dtype, device, "eager")
    lm.set_attn_implementation(right_own(lm))
    return lm.eval()


def _with_adapter(lm: Any, final: Path) -> Any:
    from peft import PeftModel
    from safetensors import SafetensorError

    try:
        with quiet_peft():
            return PeftModel.from_pretrained(lm, str(final)).eval().get_base_model()
    except (OSError, ValueError, RuntimeError, SafetensorError) as fault:
        raise CheckpointError(f"the adapter in {final} cannot be loaded ({gist(fault)}).") from fault
