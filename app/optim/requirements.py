"""Packages that an optimizer needs, and notes on it; no torch."""

from importlib.util import find_spec

from app.config.schema import OptimizerConfig

BITSANDBYTES_KINDS = frozenset({"adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "lion_8bit"})
PAGED_KINDS = frozenset({"paged_adamw_8bit", "paged_adamw_32bit"})


def check(config: OptimizerConfig) -> list[str]:
    """Problems that keep this optimizer from being built here."""
    if config.kind in BITSANDBYTES_KINDS and find_spec("bitsandbytes") is None:
        return [
            f"optimizer={config.kind} needs the package bitsandbytes, which is not installed: "
            "pip install bitsandbytes, or choose optimizer=adamw"
        ]
    return []


def notes(config: OptimizerConfig, device: str) -> list[str]:
    """Notes on this optimizer on `device` (`cpu`, `cuda`)."""
    if config.kind in PAGED_KINDS and device == "cpu":
        return [f"optimizer={config.kind}: on a CPU its states are in ordinary memory, nothing is paged"]
    return []
