"""PEFT adapters on the linear layers of a frozen base: the table of methods, and the adapted layers."""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from app.adapters.adapter_methods import AdapterMethod, Lora, PeftAdapter, is_norm
from app.base.weight_files import without_peft
from app.config.adapters import ADAPTER, ADAPTER_WEIGHTS, LAYER_NAME, MATCHING_FIELDS
from app.config.schema import AdapterConfig
from app.config.tasks import Task
from app.config.validate import did_you_mean
from app.errors import CheckpointError, ConfigError, TrainingError
from app.files import read_json
from app.layers.experts import expert_wrappers, other_stacks, shown_to_peft, stack_layers, stacks_of
from app.layers.head import head_modules, in_backbone
from app.layers.quantization import is_conv1d
from app.layers.recurrent import layers_read_past
from app.safe_text import listed

ALL_LINEAR = "all-linear"
CHECKED_STEPS = 2  # steps in which a gradient must reach every adapted layer
# keys that runs write into adapter_config.json besides PEFT's defaults: for any method, with any value
_FREE_KEYS = ("task_type", "peft_version", "base_model_name_or_path", "inference_mode", "auto_mapping", "revision")
# reasons to refuse an adapter with another value of a key
_UNSUPPORTED = {
    "bias": " (trains biases of the base)",
    "lora_bias": " (adapter layers with a bias)",
    "init_lora_weights": " (changes the base, unless PEFT converted it when saving)",
}
_ROUTERS = frozenset({"gate", "shared_expert_gate", "router", "indexer"})
_EXPERT_LAYERS = frozenset({"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})


ADAPTERS: dict[str, type[AdapterMethod] | None] = {"none": None, "lora": Lora, "peft": PeftAdapter}


def adapter_of(config: AdapterConfig) -> AdapterMethod | None:
    """Return the adapter method of a run; None: the model itself is trained."""
    method = ADAPTERS[config.kind]
    return None if method is None else method(config)


def add_adapter(config: AdapterConfig, task: Task, lm: Any, base_path: str) -> nn.Module:
    """Return the network to train: `lm`, or `lm` with a trainable adapter and new head, and everything else frozen."""
    method = adapter_of(config)
    if method is None:
        result: nn.Module = lm
        return result
    layers = _of_numbers(config.layers, _named_layers(method, lm))
    rows = rows_to_train(config, lm)
    whole = sorted({*(head_modules(lm) if task.has_classes else []), *modules_to_train(config, lm, layers)})
    experts = expert_wrappers(lm) if config.experts else []
    expected = {f"{name}.token_adapter.trainable_tokens_delta.default" for name in rows}
    expected |= {
        f"{name}.modules_to_save.default.{weight}"
        for name in whole
        for weight, _ in lm.get_submodule(name).named_parameters()
    }
    lm.name_or_path = base_path  # PEFT writes it as the adapter's base
    shared = {
        "task_type": task.peft_type,
        "target_modules": short_names(layers, lm),
        "modules_to_save": short_names(whole, lm, str.endswith) or None,
        **({"trainable_token_indices": rows} if rows else {}),
        **({"ensure_weight_tying": True} if whole and _embedding(lm) in whole and _is_tied(lm) else {}),
    }
    with quiet_peft(), shown_to_peft(lm), method.refusing():
        from peft import get_peft_model

        network: nn.Module = get_peft_model(lm, method.peft_config(lm, layers, shared))
    trained = {without_peft(name): weight for name, weight in network.named_parameters() if weight.requires_grad}
    expected |= method.trained_of([*layers, *experts], trained)
    assert trained.keys() == expected, (
        f"trained but not meant: {trained.keys() - expected}; meant but not trained: {expected - trained.keys()}"
    )
    for copied in trained_copies(network).values():
        if isinstance(copied, nn.Linear):  # PEFT swaps the two in the copy of a tied head
            copied.out_features, copied.in_features = copied.weight.shape
    for parameter in trained.values():
        parameter.data = parameter.data.float()  # copies of 16-bit modules of the base
    return network


def _ends_with(name: str, end: str) -> bool:
    return name.rpartition(".")[2] == end


def short_names(names: list[str], lm: Any, matches: Callable[[str, str], bool] = _ends_with) -> list[str]:
    """Return short names, as other tools write them, if they match exactly these modules in PEFT; else full names."""
    short = sorted({name.rpartition(".")[2] for name in names})
    meant = {name for name, _ in lm.named_modules() if any(matches(name, end) for end in short)}
    return short if meant <= set(names) else names


def _named_layers(method: AdapterMethod, lm: Any) -> list[str]:
    """Return the layers of `adapter.targets`; if it is empty, the method's default layers for this model, or all."""
    of_norms, targets = method.of_norms, method.config.targets
    if targets:
        return layers_to_adapt(targets, lm, of_norms=of_norms)
    every, usual = layers_to_adapt([ALL_LINEAR], lm, of_norms=of_norms), method.usual_targets(lm)
    return [name for name in every if name.rpartition(".")[2] in usual] or every


def _of_numbers(numbers: list[int], names: list[str]) -> list[str]:
    """Return the adapted layers inside the repeated layers with these numbers; all if there are no numbers."""
    number_of = {name: next((int(part) for part in name.split(".") if part.isdecimal()), None) for name in names}
    existing = sorted({number for number in number_of.values() if number is not None})
    unknown = [number for number in numbers if number not in existing]
    if unknown:
        raise ConfigError(
            f"adapter.layers: no adapted layer has the number {', '.join(map(str, unknown))}. Use numbers from "
            f"{existing[0]} to {existing[-1]}."
            if existing
            else "adapter.layers: the adapted layers of this model are not numbered. Leave it out."
        )
    return [name for name in names if not numbers or number_of[name] in numbers]


def _embedding(lm: Any) -> str:
    embedding: nn.Module = lm.get_input_embeddings()
    return next(str(name) for name, module in lm.named_modules() if module is embedding)


def _is_tied(lm: Any) -> bool:
    return bool(lm.config.get_text_config().tie_word_embeddings) and lm.get_output_embeddings() is not None


def _embedding_and_head(lm: Any) -> list[str]:
    """Return the modules with a row per token; for tied ones the embedding alone."""
    head = lm.get_output_embeddings()
    names = [name for name, module in lm.named_modules() if head is not None and module is head and not _is_tied(lm)]
    return [_embedding(lm), *names]


def modules_to_train(config: AdapterConfig, lm: Any, layers: list[str]) -> list[str]:
    """Return the full names of the modules that are fully trained in addition to the adapter."""
    modules = {name: module for name, module in lm.named_modules() if name and any(True for _ in module.parameters())}
    chosen = set(_embedding_and_head(lm) if config.train_tokens == "all" else [])
    for typed in config.train_whole:
        matched = [name for name in modules if name == typed or name.endswith(f".{typed}")]
        adapted = [layer for layer in layers if any(f"{layer}.".startswith(f"{name}.") for name in matched)]
        if not matched or adapted:
            ends = sorted({name.rpartition(".")[2] for name in modules})
            cause = (
                f"contains the adapted layer {adapted[0]}" if matched else "is not a module with weights in this model"
            )
            raise ConfigError(
                f"adapter.train_whole: {typed} {cause}. Use names such as lm_head, embed_tokens or norm."
                f"{'' if matched else did_you_mean(typed, ends)}"
            )
        if _is_tied(lm) and modules[matched[0]] is lm.get_output_embeddings():
            name = _embedding(lm).rpartition(".")[2]
            raise ConfigError(f"adapter.train_whole: {typed} is tied to {name}. Use {name}, which trains both.")
        chosen.update(matched)
    return sorted(chosen)


def rows_to_train(config: AdapterConfig, lm: Any) -> dict[str, list[int]]:
    """Return the IDs of tokens with trained rows, by the names of the modules with these rows."""
    ids = [] if config.train_tokens == "all" else sorted(set(map(int, config.train_tokens)))
    vocabulary = lm.get_input_embeddings().num_embeddings
    outside = [token for token in ids if not 0 <= token < vocabulary]
    if outside:
        raise ConfigError(f"adapter.train_tokens: unknown token ID {outside[0]}. IDs range from 0 to {vocabulary - 1}.")
    return dict.fromkeys(_embedding_and_head(lm), ids) if ids else {}


def layers_without_gradient(config: AdapterConfig, gradients: Mapping[str, Tensor | None], step: int) -> list[str]:
    """Return the adapted layers without the gradient required in `step`, from gradients by parameter name."""
    method = adapter_of(config)
    part = None if method is None else method.moves_in.get(step)
    moves: dict[str, bool] = {}
    for name, gradient in gradients.items():
        if part is not None and part in name:
            layer = without_peft(name).partition(part)[0]
            moves[layer] = moves.get(layer, False) or (gradient is not None and bool(gradient.any()))
    return [layer for layer, has_moved in moves.items() if not has_moved]


def require_gradient(silent: list[str]) -> None:
    """Refuse adapted layers that no gradient reaches."""
    if silent:
        raise TrainingError(
            f"no gradient reaches the adapter of {listed(silent, 3)}, so it would not be trained. "
            "Remove these layers from adapter.targets."
        )


def lr_factor(config: AdapterConfig) -> Callable[[str], float]:
    """Return the learning rate of a parameter name as a multiple of `optimizer.lr`."""
    method = adapter_of(config)
    return (lambda _name: 1.0) if method is None else method.lr_factor


def read_adapter_config(final: Path, *, of_peft: bool = False) -> dict[str, Any]:
    """Return adapter_config.json; refuse keys that runs do not write, with which PEFT may do more or never end.

    `of_peft`: LoRA may also match its layers in PEFT's other ways, which the caller replaces by `adapter_layers`.
    """
    try:
        config = read_json(final / ADAPTER)
    except (OSError, ValueError) as fault:
        raise CheckpointError(f"{final / ADAPTER} cannot be read ({fault}).") from fault
    if not isinstance(config, dict) or not (final / ADAPTER_WEIGHTS).is_file():
        raise CheckpointError(f"{final} is not an adapter: {ADAPTER} has no keys, or {ADAPTER_WEIGHTS} is missing.")
    from peft import PEFT_TYPE_TO_CONFIG_MAPPING

    named = str(config.get("peft_type"))
    keys = [(named, method.keys_of(named)) for method in ADAPTERS.values() if method is not None]
    # LoRA for an unknown type, so that the file is refused by its keys
    peft_type, written = next((pair for pair in keys if pair[1] is not None), (Lora.peft_type, Lora.written))
    defaults = PEFT_TYPE_TO_CONFIG_MAPPING[peft_type]().to_dict()
    needed: dict[str, Callable[[Any], bool]] = {
        "peft_type": lambda value: value == peft_type,
        "target_modules": lambda value: _are_names(value) and bool(value),
        **dict.fromkeys(("modules_to_save", "target_parameters"), lambda value: value is None or _are_names(value)),
        **(written or {}),
    }
    valid = {**dict.fromkeys(_FREE_KEYS, lambda value: isinstance(value, str | bool | dict | None)), **needed}
    if of_peft and peft_type == Lora.peft_type:
        valid |= dict.fromkeys(("target_modules", *MATCHING_FIELDS), lambda _value: True)
    odd = [
        f"{key}={str(value)[:80]}{_UNSUPPORTED.get(key, '')}"
        for key, value in {**dict.fromkeys(needed), **config}.items()
        if not (valid[key](value) if key in valid else not value or value == defaults.get(key, value))
    ]
    if odd:
        raise CheckpointError(
            f"{final / ADAPTER}: not supported: {', '.join(odd)}. Use an adapter without them, or merge it into its "
            "base with PEFT and set model.path to the result."
        )
    return config


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) and LAYER_NAME.fullmatch(name) for name in value)


@contextlib.contextmanager
def quiet_peft() -> Iterator[None]:
    """Silence PEFT warnings: a name that transformers has changed, and the limits of PEFT's own saving."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
        for text in (
            "Unsupported layer type",
            "Detected that the base layer has no bias",
            "The density ",
        ):  # norms; BEFT, which adds one; nothing pruned at density 1
            warnings.filterwarnings("ignore", message=text)
        warnings.filterwarnings("ignore", message="Using Rank-Stabilized LoRA with rank_pattern")
        yield


def trained_copies(network: nn.Module) -> dict[nn.Module, nn.Module]:
    """Return the trained copies of whole modules (`modules_to_save`) by their frozen originals."""
    copies: dict[nn.Module, nn.Module] = {}
    for module in network.modules():
        if isinstance(getattr(module, "modules_to_save", None), nn.ModuleDict):  # PEFT's wrapper
            wrapper: Any = module
            (copied,) = wrapper.modules_to_save.values()
            copies |= dict(zip(wrapper.original_module.modules(), copied.modules(), strict=True))
    return copies


def layers_to_adapt(targets: list[str], lm: Any, *, of_norms: bool = False) -> list[str]:
    """Return the full names of the layers that `targets` match; every target must match, and the head never does.

    In a mixture of experts all-linear means attention: experts are stacked in 3D parameters, routers choose experts,
    and PEFT confuses dense and shared experts with stacked ones. Mamba kernels would ignore adapters on some layers of
    their mixers.
    """
    has_stacked_experts = bool(stacks_of(lm) or other_stacks(lm))
    unusable = _EXPERT_LAYERS if has_stacked_experts else frozenset()
    unseen = layers_read_past(lm) | stack_layers(lm)
    linear = [
        name
        for name, module in lm.named_modules()
        if in_backbone(lm, name)  # others belong to the head
        and (is_norm(module) if of_norms else isinstance(module, nn.Linear) or is_conv1d(module))
        and not hasattr(module, "n_groups")  # a grouped product is not a product with one matrix
        and name.rpartition(".")[2] not in unusable
        and name not in unseen
    ]
    chosen: set[str] = set()
    problems = []
    for target in targets:
        if target == ALL_LINEAR:
            matched = [name for name in linear if not _ROUTERS & set(name.split("."))]
        else:
            matched = [name for name in linear if name == target or name.endswith(f".{target}")]
        if not matched:
            ends = sorted({name.rpartition(".")[2] for name in linear})
            what = "norm" if of_norms else "linear layer"
            names = "; ".join(filter(None, (", ".join(ends), "" if of_norms else f"or {ALL_LINEAR}")))
            problems.append(
                f"adapter.targets: {target} matches no {what} of this model ({names}).{did_you_mean(target, ends)}"
            )
        chosen.update(matched)
    if problems:
        raise ConfigError(problems)
    return sorted(chosen)
