"""`hardware=NAME` of app.check: the GPUs of conf/hardware, with overrides of the command line."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from app.config import groups
from app.config.fields import number
from app.config.quantizations import QUANTIZATION_KINDS
from app.config.schema import RunConfig
from app.config.validate import parse_section
from app.errors import ConfigError

_MIN_FP8_CAPABILITY = (8, 9)  # Ada, Hopper and later


@dataclass(kw_only=True, slots=True)
class HardwareConfig:
    """Facts about a GPU; `name` is that of its file, `names` are those of its driver."""

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
        """Whether its tensor cores multiply fp8 through CUDA."""
        if self.capability is None or self.fp8_tflops is None:
            return False
        major, _, minor = self.capability.partition(".")
        return (int(major), int(minor or 0)) >= _MIN_FP8_CAPABILITY


def hardware_facts(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `hardware` section of the options `hardware=` and `hardware.KEY=`; empty for the local machine."""
    changes = {key.partition(".")[2]: value for key, value in options.items() if key.startswith("hardware.")}
    name = options.get("hardware", "auto")
    if name != "auto":
        return {"hardware": {"name": name, **groups.read_choice("hardware", name), **changes}}
    if changes:
        raise ConfigError(
            f"hardware.{next(iter(changes))} needs hardware=NAME, which it changes. Choose one of "
            f"{', '.join(hardware_names())}."
        )
    return {}


def all_hardware() -> list[HardwareConfig]:
    """Every GPU of conf/hardware."""
    of_names = ({"name": name, **groups.read_choice("hardware", name)} for name in hardware_names())
    return [parse_section(HardwareConfig, facts, "hardware.") for facts in of_names]


def hardware_names() -> list[str]:
    """The names of the files, without the one that stands for whatever is present."""
    return [name for name in groups.choices_by_group()["hardware"] if name != "auto"]


def missing_hardware_support(run: RunConfig, hardware: HardwareConfig) -> list[str]:
    """Problems of a run that needs what this GPU lacks."""
    if not QUANTIZATION_KINDS[run.quantization.kind].needs_fp8 or hardware.has_fp8:
        return []
    those = ", ".join(each.name for each in all_hardware() if each.has_fp8)
    has = "none of CUDA's" if hardware.capability is None else hardware.capability
    others = " or ".join(name for name, kind in QUANTIZATION_KINDS.items() if not (kind.needs_fp8 or kind.trains))
    return [
        f"quantization.kind={run.quantization.kind} needs an NVIDIA GPU of compute capability 8.9 or higher, and "
        f"hardware={hardware.name} has {has}. Set quantization={others}, or choose one of {those}."
    ]
