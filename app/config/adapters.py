"""Adapters: their kinds and rules, PEFT's methods, and the settings of an adapter that a run starts from.

tests/full/model/test_adapter_methods.py tries all methods of PEFT.
"""

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from yaml import YAMLError

from app.config.conf_files import read_yaml
from app.config.schema import AdapterConfig, RunConfig
from app.config.validate import did_you_mean, format_value
from app.files import read_object


class PeftMethod(NamedTuple):
    """Properties of a PEFT method beyond training tensors in each linear layer."""

    quantized: bool = True  # supports a base in nf4 or fp4
    indivisible: str = ""  # reason why FSDP cannot shard it, or empty
    merges: bool = True  # PEFT can merge it weight by weight
    of_norms: bool = False  # adapts norms instead of linear layers
    compiles: bool = True  # torch.compile can trace its layers as one graph


SHARED = "has trained tensors that layers share"
_PLAIN, _READS_BASE = PeftMethod(), PeftMethod(quantized=False)
METHODS = {
    "BEFT": PeftMethod(indivisible="has trained tensors of one row", merges=False),
    "C3A": _PLAIN,
    "DEFT": _READS_BASE,
    "DELORA": _READS_BASE,
    "FOURIERFT": _PLAIN,
    "GLORA": _READS_BASE,
    "GRALORA": _PLAIN,
    "HIRA": _PLAIN,
    "HRA": _READS_BASE,
    "IA3": _PLAIN,
    "LILY": PeftMethod(indivisible=SHARED, merges=False),
    "LN_TUNING": PeftMethod(of_norms=True),
    "LOHA": PeftMethod(quantized=False, compiles=False),
    "LOKR": PeftMethod(quantized=False, compiles=False),
    "MISS": _PLAIN,
    "OFT": _PLAIN,
    "OSF": PeftMethod(quantized=False, indivisible="projects the gradients of whole matrices"),
    "PEANUT": _READS_BASE,
    "PSOFT": _READS_BASE,
    "PVERA": _PLAIN,
    "RANDLORA": _PLAIN,
    "ROAD": _PLAIN,
    "SUPERTUNING": _READS_BASE,
    "TINYLORA": PeftMethod(quantized=False, indivisible=SHARED, merges=False),
    "VBLORA": PeftMethod(indivisible=SHARED, compiles=False),
    "VERA": _PLAIN,
}

_PROMPT_METHOD = "trains vectors before the prompt, which packed documents do not support. Set adapter=lora"
_TOO_LATE = (
    "needs loaded weights to attach, so memory cannot be estimated before loading. "
    "Set adapter.method={}, or adapter=lora"
)
REFUSED = {
    **dict.fromkeys(("CARTRIDGE", "CPT", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING"), _PROMPT_METHOD),
    **dict.fromkeys(("ADAPTION_PROMPT", "PROMPT_TUNING"), _PROMPT_METHOD),
    "ADALORA": "needs a call in each step to prune ranks, which is not supported. Set adapter=lora",
    "ADAMSS": _TOO_LATE.format("OSF"),
    "BOFT": _TOO_LATE.format("OFT"),
    "FROD": _TOO_LATE.format("VERA"),
    "LORA": "is adapter=lora, which has separate keys. Set adapter=lora",
    "POLY": "selects adapters by task ID, which rows do not have. Set adapter=lora",
    "SHADOW": "trains a second model next to the base. Set adapter=lora",
    "SHIRA": _TOO_LATE.format("SUPERTUNING"),
    "TRAINABLE_TOKENS": "is adapter.train_tokens. Set adapter=lora adapter.train_tokens=[IDS]",
    "UNILORA": _TOO_LATE.format("VBLORA"),
    "WAVEFT": _TOO_LATE.format("FOURIERFT"),
    "XLORA": "mixes trained adapters. Use finetune export adapters=[...] to sum adapters",
}


# ---- adapters


ADAPTER, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."  # prefix of base tensor names
LAYER_NAME = re.compile(r"[\w.-]+")  # a name or suffix, never a slow regular expression
_PLAIN_INITS = ("default", "gaussian", "eva", "loftq")  # leave the base weights unchanged
_INITS = re.compile(r"default|gaussian|orthogonal|pissa|pissa_niter_[1-9]\d?|olora|eva|corda|loftq")
_NAMES = "default, gaussian, orthogonal, pissa, pissa_niter_N, olora, eva, corda, loftq"
_OTHER_INITS = {"lora_ga": "needs gradients before the first step, which is not supported", "mica": "trains A only"}

# settings of PEFT methods that have separate keys, or that would train or load other weights
RESERVED_FIELDS = frozenset(
    {"task_type", "peft_type", "inference_mode", "base_model_name_or_path", "revision", "auto_mapping", "peft_version"}
    | {"target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save", "bias"}
    | {"fan_in_fan_out"}
)

# fields by which PEFT selects from the layers that target_modules matches
MATCHING_FIELDS = ("exclude_modules", "layers_to_transform", "layers_pattern")

INDIVISIBLE = "adapter.method={} {}, which FSDP cannot shard. Set parallel=ddp, or adapter=lora."


class AdapterKind(NamedTuple):
    """Rules of an adapter kind; its code is in `app/adapters`."""

    name: str  # published name
    problems: Callable[[RunConfig], Iterator[str]]  # rule for its keys
    has_rank: bool  # low-rank matrices of rank adapter.r
    # setting that prevents torch.compile from tracing its layers, or empty
    untraceable: Callable[[AdapterConfig], str] = lambda _adapter: ""


def changes_base(adapter: AdapterConfig) -> bool:
    """Return whether the initial adapter is subtracted from the base; final/ is an adapter of the original base."""
    return adapter.init.startswith(("pissa", "olora", "corda"))


def _lora_problems(run: RunConfig) -> Iterator[str]:
    adapter = run.adapter
    if adapter.r < 1:
        yield f"adapter.r={adapter.r} must be at least 1 for adapter.kind={adapter.kind}."
    if adapter.alpha <= 0:
        yield f"adapter.alpha={adapter.alpha:g} must be above 0 for adapter.kind={adapter.kind}."
    if adapter.experts and adapter.dropout:
        yield (
            f"adapter.dropout={adapter.dropout:g} with adapter.experts=true: PEFT has no dropout for experts. "
            "Set adapter.dropout=0, or adapter.experts=false."
        )
    for key, plain in (("dora", False), ("init", "default")) if adapter.experts else ():
        if getattr(adapter, key) != plain:
            yield (
                f"adapter.{key}={str(getattr(adapter, key)).lower()} with adapter.experts=true: stacked experts "
                f"support plain LoRA only. Set adapter.{key}={str(plain).lower()}, or adapter.experts=false."
            )
    if not adapter.targets:
        yield "adapter.targets is empty. Set adapter.targets=[all-linear] or layer names."
    yield from _pattern_problems(adapter)
    yield from _init_problems(run)


def _pattern_problems(adapter: AdapterConfig) -> Iterator[str]:
    for key, kinds in (("rank_pattern", int), ("alpha_pattern", int | float)):
        pattern: dict[str, object] = getattr(adapter, key)
        for name, value in pattern.items():
            if isinstance(value, bool) or not isinstance(value, kinds) or value <= 0:
                words = "a whole number, at least 1" if key == "rank_pattern" else "a number above 0"
                yield f"adapter.{key}={{{name}: {value}}}: expected {words}."
            if not LAYER_NAME.fullmatch(name):
                yield f"adapter.{key}: {name} is not a layer name. Use names or suffixes, e.g. 3.mlp.down_proj."


def _init_problems(run: RunConfig) -> Iterator[str]:
    adapter, init = run.adapter, f"adapter.init={run.adapter.init}"
    if not _INITS.fullmatch(adapter.init):
        cause = _OTHER_INITS.get(adapter.init, f"is not one of {_NAMES}")
        yield f"{init} {cause}. Choose {'default' if adapter.init in _OTHER_INITS else 'one of these'}."
    elif adapter.init not in _PLAIN_INITS and run.quantization.kind != "none":
        yield (
            f"{init} needs unquantized base weights, but quantization.kind={run.quantization.kind}. Set "
            "adapter.init=eva or default, or recipe=lora quantization=none."
        )
    elif adapter.init == "loftq" and run.quantization.kind not in {"nf4", "fp4"}:
        yield (
            f"{init} needs a 4-bit base, but quantization.kind={run.quantization.kind}. Set "
            "quantization=nf4, or adapter.init=eva."
        )
    if adapter.dora and (changes_base(adapter) or adapter.init == "loftq"):
        cause = "magnitudes would ignore the initial adapter"
        if changes_base(adapter):
            cause = "the result cannot be saved as an adapter of the original base"
        yield f"{init} with adapter.dora=true: {cause}. Choose one of them."
    if adapter.init != "default" and adapter.start is not None:
        yield f"{init}: adapter.start={adapter.start} already provides the initial weights. Leave one out."
    if adapter.dora and run.quantization.kind not in {"none", "nf4", "fp4"}:
        yield (
            f"adapter.dora=true needs the base weights, and PEFT cannot dequantize quantization.kind="
            f"{run.quantization.kind}. Set quantization=nf4 or none, or adapter.dora=false."
        )


def is_plain(value: Any) -> bool:
    """Return whether a value is a number, a name, or several: not a path or a slow regular expression."""
    if isinstance(value, dict):
        return all(is_plain(name) and is_plain(inner) for name, inner in value.items())
    if isinstance(value, list):
        return all(map(is_plain, value))
    if isinstance(value, str):
        return LAYER_NAME.fullmatch(value) is not None
    return value is None or (isinstance(value, bool | int | float) and math.isfinite(value))


def _peft_problems(run: RunConfig) -> Iterator[str]:
    adapter, name = run.adapter, run.adapter.method.upper()
    setting, bits = f"adapter.method={adapter.method}", run.quantization.kind
    if name in REFUSED:
        yield f"{setting} {REFUSED[name]}."
    elif name not in METHODS:
        yield f"{setting} is not a supported PEFT method.{did_you_mean(name, METHODS)}"
    elif bits != "none" and not (METHODS[name].quantized and bits in {"nf4", "fp4"}):
        fix = "quantization=nf4" if METHODS[name].quantized else "adapter=lora"
        yield f"{setting} does not support quantization.kind={bits}. Set quantization=none, or {fix}."
    elif run.parallel.divides and METHODS[name].indivisible:
        yield INDIVISIBLE.format(adapter.method, METHODS[name].indivisible)
    for key, value in adapter.fields.items():
        if not is_plain(value):
            yield (
                f"adapter.fields={{{key}: {format_value(value)}}}: expected a number, true, false, a name, or a "
                "list or mapping of these."
            )
        elif "dropout" in key and value and run.preference.has_reference:
            yield (
                f"adapter.fields={{{key}: {format_value(value)}}} with preference={run.preference.kind}: the reference "
                "model runs without it, so rewards would be noisy from the first step. Leave it out."
            )


def _untraceable_method(adapter: AdapterConfig) -> str:
    return "" if METHODS[adapter.method.upper()].compiles else f"adapter.method={adapter.method}"


ADAPTER_KINDS = {
    "none": AdapterKind("full fine-tuning", lambda _adapter: iter(()), has_rank=False),
    "lora": AdapterKind(
        "LoRA", _lora_problems, has_rank=True, untraceable=lambda adapter: "adapter.dora=true" * adapter.dora
    ),
    "peft": AdapterKind("PEFT", _peft_problems, has_rank=False, untraceable=_untraceable_method),
}


def compile_obstacle(adapter: AdapterConfig) -> str | None:
    """Return why layers with this adapter are not compiled, None where they can be."""
    setting = ADAPTER_KINDS[adapter.kind].untraceable(adapter)
    return f"{setting}: torch.compile cannot trace PEFT's layers" if setting else None


def name_of(adapter: Mapping[str, Any]) -> str:
    """Return the published name of an adapter from recorded settings, which may be incomplete in older runs."""
    kind = str(adapter.get("kind", "none"))
    return str(adapter.get("method")).upper() if kind == "peft" else ADAPTER_KINDS.get(kind, ADAPTER_KINDS["lora"]).name


# ---- adapter start


# LoRA keys that cannot change, with their names in adapter_config.json
FIXED_KEYS = {
    "r": "r",
    "rank_pattern": "rank_pattern",
    "alpha_pattern": "alpha_pattern",
    "alpha": "lora_alpha",
    "targets": "target_modules",
    "rslora": "use_rslora",
    "dora": "use_dora",
}
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_NAME = re.compile(r"[A-Za-z_][\w.-]*")  # layer name that Hydra accepts without quotes


def start_folder(adapter: AdapterConfig) -> Path | None:
    """Return the folder of `adapter.start`, which may not exist; for a run it is final/."""
    return None if adapter.start is None else adapter_folder(adapter.start)


def with_names(adapter: AdapterConfig, named: Callable[[str], str]) -> AdapterConfig:
    """Return the adapter with renamed layers."""
    return replace(
        adapter,
        targets=[*map(named, adapter.targets)],
        rank_pattern={named(name): rank for name, rank in adapter.rank_pattern.items()},
        alpha_pattern={named(name): alpha for name, alpha in adapter.alpha_pattern.items()},
    )


def adapter_folder(start: str) -> Path:
    """Return the folder of an adapter, which may not exist, for a run, a folder or a hub ID."""
    path = Path(os.path.expanduser(start))  # noqa: PTH111 (os.path: no unknown user or long name is an error)
    if not os.path.exists(path) and _HUB_ID.fullmatch(start):  # noqa: PTH110
        return _from_hub(start)[0] or path
    return path / "final" if os.path.isdir(path / "final") else path  # noqa: PTH112


@cache
def _from_hub(name: str) -> tuple[Path | None, str]:
    """Return the snapshot of an adapter, or why the download failed."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(name, allow_patterns=[ADAPTER, ADAPTER_WEIGHTS])), ""
    except (OSError, HFValidationError) as fault:  # every hub and network error is one of these
        return None, f", and the download failed ({type(fault).__name__})"


def implied_settings(typed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings implied by a typed `adapter.start`, by key, except those that are typed.

    A resumed run whose start adapter is missing keeps its own settings.
    """
    start = typed.get("adapter.start")
    if not isinstance(start, str) or not start:
        return {}
    folder = adapter_folder(start)
    config = read_object(folder / ADAPTER)
    if config:
        config = {**config, "target_modules": adapter_layers(folder, config)}
    fields = typed.get("adapter.fields")
    names = {*typed, *(f"adapter.fields.{name}" for name in (fields if isinstance(fields, dict) else ()))}
    return {
        f"adapter.{key}": value
        for key, value in (_settings_in(config) if config else _settings_of_resumed_run(typed)).items()
        if not any(f"{name}.".startswith(f"adapter.{key}.") for name in names) and _is_plain(value)
        if not (key in FIXED_KEYS and isinstance(value, str))
    }


def adapter_layers(folder: Path, config: Mapping[str, Any]) -> Any:
    """Return the layers of an adapter config; if PEFT selects them by other rules, the layers of its tensors."""
    names = config.get("target_modules")
    if isinstance(names, list) and all(config.get(key) in (None, []) for key in MATCHING_FIELDS):
        return names
    try:
        with safe_open(folder / ADAPTER_WEIGHTS, framework="np") as saved:
            split = [name.removeprefix(PEFT_PREFIX).partition(".lora_A.") for name in saved.keys()]  # noqa: SIM118
    except (OSError, SafetensorError):
        return names
    return sorted({layer for layer, half, _ in split if half}) or names


def _settings_in(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fixed settings of an adapter config by key; dropout may change."""
    if config.get("peft_type") == "LORA":
        return {key: config.get(name) for key, name in FIXED_KEYS.items()}
    names = (name for name in config if name.isidentifier() and name not in RESERVED_FIELDS and "dropout" not in name)
    fields = {f"fields.{name}": config[name] for name in names}
    return {"method": config.get("peft_type"), "targets": config.get("target_modules"), **fields}


def _settings_of_resumed_run(typed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fixed adapter settings from the run.yaml of the resumed run."""
    resume = typed.get("resume")
    if resume is None:
        return {}
    path = Path(str(typed.get("output_dir", "") if resume == "auto" else resume)).expanduser()
    section = _section(path.parent.parent if path.parent.name == "checkpoints" else path, "adapter")
    fields = section.get("fields")
    method_fields = {f"fields.{name}": value for name, value in (fields if isinstance(fields, dict) else {}).items()}
    return {key: section[key] for key in (*FIXED_KEYS, "method") if key in section} | method_fields


def _section(run: Path, name: str) -> Mapping[str, Any]:
    """Return a section of a run's run.yaml; empty if there is none."""
    try:
        section = read_yaml(run / "run.yaml")[name]
    except (OSError, ValueError, YAMLError, LookupError, TypeError):
        return {}
    return section if isinstance(section, dict) else {}


def _is_plain(value: Any) -> bool:
    """Return whether a value is a number, a name, or several, as on a command line."""
    if isinstance(value, dict):
        return all(LAYER_NAME.fullmatch(str(name)) and _is_plain(inner) for name, inner in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return bool(_NAME.fullmatch(value)) if isinstance(value, str) else type(value) in (int, float, bool)


def check_start(run: RunConfig) -> Iterator[str]:
    """Yield problems with `adapter.start`; a resumed run does not need the folder."""
    adapter, folder = run.adapter, start_folder(run.adapter)
    if folder is None or (run.resume is not None and not os.path.isdir(folder)):  # noqa: PTH112
        return
    setting, config = f"adapter.start={adapter.start}", read_object(folder / ADAPTER)
    if not config or not (folder / ADAPTER_WEIGHTS).is_file():
        is_local = not _HUB_ID.fullmatch(str(adapter.start)) or os.path.exists(folder)  # noqa: PTH110
        why = "" if is_local else _from_hub(str(adapter.start))[1]
        yield (
            f"{setting}: no {ADAPTER} with {ADAPTER_WEIGHTS} found{why}. Give a run with an adapter, or the "
            "folder or hub ID of an adapter."
        )
        return
    method, is_lora = config.get("peft_type"), config.get("peft_type") == "LORA"
    if is_lora != (adapter.kind == "lora"):
        kind = "lora" if is_lora else "peft"
        yield f"{setting}: it is an adapter of type {method}, not adapter={adapter.kind}. Set adapter={kind}."
        return
    yield from _other_tokens(adapter, config, folder.parent)
    other = [
        f"adapter.{key}={format_value(value)}"
        for key, value in _settings_in(config).items()
        if key != "targets" and value != _setting(adapter, key) and not (value is None and is_lora)
    ]
    if other:
        yield (
            f"{setting}: its {'rank and scale' if is_lora else 'method and fields'} cannot change. Set "
            f"{' '.join(other)}, or leave {'it' if len(other) == 1 else 'them'} out."
        )


def _setting(adapter: AdapterConfig, key: str) -> Any:
    section, _, name = key.partition(".")
    value = getattr(adapter, section)
    return value.get(name) if name else value.upper() if section == "method" else value


def _other_tokens(adapter: AdapterConfig, config: Mapping[str, Any], run: Path) -> Iterator[str]:
    """Yield a problem if the adapter and the run train embeddings of different tokens; new IDs are checked later."""
    rows = config.get("trainable_token_indices")
    ids = sorted(next(iter(rows.values()))) if isinstance(rows, dict) and rows else []
    if not isinstance(adapter.train_tokens, list) or sorted(adapter.train_tokens) == ids:
        return
    texts = _section(run, "model").get("add_tokens")
    new = f"model.add_tokens={json.dumps(texts, ensure_ascii=False)} adapter.train_tokens=new" if texts else ""
    yield (
        f"adapter.start={adapter.start}: it has embeddings of {len(ids) or 'no'} tokens, but this run trains "
        f"{len(adapter.train_tokens) or 'none'} or others. Set {new or f'adapter.train_tokens={ids}'}."
    )
