"""Where an adapter goes on from: a run, a folder or the hub. What of its settings holds for the run that goes on."""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from yaml import YAMLError

from app.config.adapters import ADAPTER, ADAPTER_WEIGHTS, LAYER_NAME, MATCHING_FIELDS, PEFT_PREFIX, RESERVED_FIELDS
from app.config.schema import AdapterConfig, RunConfig
from app.config.validate import format_value
from app.config.yaml_files import read_yaml
from app.files import read_object

# keys of LoRA that hold, by the names in an adapter's own file
KEPT = {
    "r": "r",
    "rank_pattern": "rank_pattern",
    "alpha_pattern": "alpha_pattern",
    "alpha": "lora_alpha",
    "targets": "target_modules",
    "rslora": "use_rslora",
    "dora": "use_dora",
}
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_NAME = re.compile(r"[A-Za-z_][\w.-]*")  # of a layer, as Hydra takes it without quotes


def start_folder(adapter: AdapterConfig) -> Path | None:
    """The folder of `adapter.start`, which need not exist: a run has its adapter in final/."""
    return None if adapter.start is None else adapter_folder(adapter.start)


def with_names(adapter: AdapterConfig, named: Callable[[str], str]) -> AdapterConfig:
    """The same adapter where its layers have other names."""
    return replace(
        adapter,
        targets=[*map(named, adapter.targets)],
        rank_pattern={named(name): rank for name, rank in adapter.rank_pattern.items()},
        alpha_pattern={named(name): alpha for name, alpha in adapter.alpha_pattern.items()},
    )


def adapter_folder(start: str) -> Path:
    """The folder of an adapter, which need not exist, of a run, a folder or a hub id."""
    given = Path(os.path.expanduser(start))  # noqa: PTH111 (os.path: no unknown user or long name is an error)
    if not os.path.exists(given) and _HUB_ID.fullmatch(start):  # noqa: PTH110
        return _from_hub(start)[0] or given
    return given / "final" if os.path.isdir(given / "final") else given  # noqa: PTH112


@cache
def _from_hub(name: str) -> tuple[Path | None, str]:
    """The snapshot of an adapter, or why there is none."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(name, allow_patterns=[ADAPTER, ADAPTER_WEIGHTS])), ""
    except (OSError, HFValidationError) as fault:  # every hub and network error is one of these
        return None, f", and the hub gave none ({type(fault).__name__})"


def kept_settings(typed: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a typed `adapter.start` that hold, by their keys, as far as they are not typed themselves.

    A resumed run that has lost the adapter keeps those that it began with.
    """
    start = typed.get("adapter.start")
    if not isinstance(start, str) or not start:
        return {}
    folder = adapter_folder(start)
    found = read_object(folder / ADAPTER)
    if found:
        found = {**found, "target_modules": adapter_layers(folder, found)}
    fields = typed.get("adapter.fields")
    names = {*typed, *(f"adapter.fields.{name}" for name in (fields if isinstance(fields, dict) else ()))}
    return {
        f"adapter.{key}": value
        for key, value in (_settings_in(found) if found else _begun_with(typed)).items()
        if not any(f"{name}.".startswith(f"adapter.{key}.") for name in names) and _is_plain(value)
        if not (key in KEPT and isinstance(value, str))
    }


def adapter_layers(folder: Path, found: Mapping[str, Any]) -> Any:
    """Return the layers in an adapter's own file; where PEFT matches them otherwise, those that its tensors name."""
    names = found.get("target_modules")
    if isinstance(names, list) and all(found.get(key) in (None, []) for key in MATCHING_FIELDS):
        return names
    try:
        with safe_open(folder / ADAPTER_WEIGHTS, framework="np") as saved:
            split = [name.removeprefix(PEFT_PREFIX).partition(".lora_A.") for name in saved.keys()]  # noqa: SIM118
    except (OSError, SafetensorError):
        return names
    return sorted({layer for layer, half, _ in split if half}) or names


def _settings_in(found: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in an adapter's own file that hold, by their keys; dropout may change."""
    if found.get("peft_type") == "LORA":
        return {key: found.get(name) for key, name in KEPT.items()}
    own = (name for name in found if name.isidentifier() and name not in RESERVED_FIELDS and "dropout" not in name)
    fields = {f"fields.{name}": found[name] for name in own}
    return {"method": found.get("peft_type"), "targets": found.get("target_modules"), **fields}


def _begun_with(typed: Mapping[str, Any]) -> dict[str, Any]:
    """The same of the section `adapter` in the run.yaml of a run that is resumed."""
    resume = typed.get("resume")
    if resume is None:
        return {}
    given = Path(str(typed.get("output_dir", "") if resume == "auto" else resume)).expanduser()
    section = _section(given.parent.parent if given.parent.name == "checkpoints" else given, "adapter")
    fields = section.get("fields")
    own = {f"fields.{name}": value for name, value in (fields if isinstance(fields, dict) else {}).items()}
    return {key: section[key] for key in (*KEPT, "method") if key in section} | own


def _section(run: Path, name: str) -> Mapping[str, Any]:
    """A section of the run.yaml of a run; empty where there is none."""
    try:
        section = read_yaml(run / "run.yaml")[name]
    except (OSError, ValueError, YAMLError, LookupError, TypeError):
        return {}
    return section if isinstance(section, dict) else {}


def _is_plain(value: Any) -> bool:
    """Whether it is a number, a name, or several, as a command line has them."""
    if isinstance(value, dict):
        return all(LAYER_NAME.fullmatch(str(name)) and _is_plain(each) for name, each in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return bool(_NAME.fullmatch(value)) if isinstance(value, str) else type(value) in (int, float, bool)


def check_start(run: RunConfig) -> Iterator[str]:
    """Problems with `adapter.start`; a run that is continued needs the folder no more."""
    adapter, folder = run.adapter, start_folder(run.adapter)
    if folder is None or (run.resume is not None and not os.path.isdir(folder)):  # noqa: PTH112
        return
    given, found = f"adapter.start={adapter.start}", read_object(folder / ADAPTER)
    if not found or not (folder / ADAPTER_WEIGHTS).is_file():
        is_local = not _HUB_ID.fullmatch(str(adapter.start)) or os.path.exists(folder)  # noqa: PTH110
        why = "" if is_local else _from_hub(str(adapter.start))[1]
        yield (
            f"{given}: there is no {ADAPTER} with {ADAPTER_WEIGHTS}{why}. Give a run that trained an adapter, or the "
            "folder or hub id of an adapter."
        )
        return
    method, is_lora = found.get("peft_type"), found.get("peft_type") == "LORA"
    if is_lora != (adapter.kind == "lora"):
        wanted = "lora" if is_lora else "peft"
        yield f"{given}: it is of {method}, and the run is of adapter={adapter.kind}. Type adapter={wanted}."
        return
    yield from _other_tokens(adapter, found, folder.parent)
    other = [
        f"adapter.{key}={format_value(value)}"
        for key, value in _settings_in(found).items()
        if key != "targets" and value != _setting(adapter, key) and not (value is None and is_lora)
    ]
    if other:
        yield (
            f"{given}: it goes on with its own {'rank and scale' if is_lora else 'method and fields'}. Type "
            f"{' '.join(other)}, or leave {'it' if len(other) == 1 else 'them'} out."
        )


def _setting(adapter: AdapterConfig, key: str) -> Any:
    section, _, name = key.partition(".")
    value = getattr(adapter, section)
    return value.get(name) if name else value.upper() if section == "method" else value


def _other_tokens(adapter: AdapterConfig, found: Mapping[str, Any], run: Path) -> Iterator[str]:
    """Rows of tokens that the adapter has and the run does not train, or the other way; ids of new ones come later."""
    rows = found.get("trainable_token_indices")
    ids = sorted(next(iter(rows.values()))) if isinstance(rows, dict) and rows else []
    if not isinstance(adapter.train_tokens, list) or sorted(adapter.train_tokens) == ids:
        return
    texts = _section(run, "model").get("add_tokens")
    new = f"model.add_tokens={json.dumps(texts, ensure_ascii=False)} adapter.train_tokens=new" if texts else ""
    yield (
        f"adapter.start={adapter.start}: it has rows of {len(ids) or 'no'} tokens, and this run trains those of "
        f"{len(adapter.train_tokens) or 'none'} or of others. Type {new or f'adapter.train_tokens={ids}'}."
    )
