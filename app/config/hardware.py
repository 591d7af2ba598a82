"""`hardware=NAME` of app.check: a file of conf/hardware, with what the command line changes of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from app.config import groups
from app.config.overrides import key_of
from app.config.schema import QuantizationConfig, number
from app.config.validate import typed
from app.errors import ConfigError

_FP8_FROM = (8, 9)  # compute capability: Ada, Hopper and what came after them


@dataclass(kw_only=True, slots=True)
class HardwareConfig:
    """Facts of one GPU; `name` is that of its file, and `names` are what its driver calls it."""

    name: str
    label: str
    names: list[str] = field(default_factory=list)
    memory_gib: float = number(above=0)
    bandwidth_gb: float = number(above=0)
    bf16_tflops: float = number(above=0)
    fp8_tflops: float | None = number(None, above=0)
    capability: str | None = None
    context_gib: float | None = number(None, at_least=0)

    @property
    def has_fp8(self) -> bool:
        """Whether its tensor cores multiply such numbers, and CUDA knows how."""
        if self.capability is None or self.fp8_tflops is None:
            return False
        major, _, minor = self.capability.partition(".")
        return (int(major), int(minor or 0)) >= _FP8_FROM


@dataclass(kw_only=True, slots=True)
class _Root:
    """So that messages name the keys as they are typed."""

    hardware: HardwareConfig


def read_hardware(words: Sequence[str]) -> HardwareConfig | None:
    """From the overrides `hardware=...` and `hardware.KEY=...`, the last of each; None: the machine at hand."""
    given = {key_of(word): word.partition("=")[2].strip("'\"") for word in words}
    name = given.pop("hardware", "auto")
    if name != "auto":
        changes = {key.partition(".")[2]: None if text == "null" else text for key, text in given.items()}
        return _read(name, changes)
    if given:
        raise ConfigError(
            f"{next(iter(given))} needs hardware=NAME, which it changes. Choose one of {', '.join(named())}."
        )
    return None


def every_hardware() -> list[HardwareConfig]:
    """All GPUs that have a file."""
    return [_read(name, {}) for name in named()]


def named() -> list[str]:
    """The names of the files, without the one that stands for whatever is present."""
    return [name for name in groups.choices_by_group()["hardware"] if name != "auto"]


def lacking(quantization: QuantizationConfig, hardware: HardwareConfig) -> list[str]:
    """What a run needs and this GPU does not have."""
    if quantization.kind != "fp8" or hardware.has_fp8:
        return []
    those = ", ".join(each.name for each in every_hardware() if each.has_fp8)
    has = "none of CUDA's" if hardware.capability is None else hardware.capability
    return [
        f"quantization.kind=fp8 needs an NVIDIA GPU of compute capability 8.9 or higher, and "
        f"hardware={hardware.name} has {has}. Set quantization=none or nf4, or choose one of {those}."
    ]


def _read(name: str, changes: Mapping[str, Any]) -> HardwareConfig:
    file = groups.CONF / "hardware" / f"{name}.yaml"
    try:
        facts = yaml.safe_load(file.read_text("utf-8"))
    except yaml.YAMLError as fault:
        raise ConfigError(f"{file}: {' '.join(str(fault).split())}") from fault
    if not isinstance(facts, dict):
        raise ConfigError(
            f"{file}: expected label:, memory_gib: and so on, as in the other files of the folder."
        )
    return typed(_Root, {"hardware": {"name": name, **facts, **changes}}).hardware
