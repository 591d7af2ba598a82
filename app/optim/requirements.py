"""Required packages of optimizers, and notes on them; no torch."""

from importlib.util import find_spec

from app.config.schema import OptimizerConfig

BITSANDBYTES_KINDS = frozenset({"adamw_8bit", "adamw_bnb_32bit", "paged_adamw_8bit", "paged_adamw_32bit", "lion_8bit"})
PAGED_KINDS = frozenset({"paged_adamw_8bit", "paged_adamw_32bit"})
# required package by kind, and how to install it
_PACKAGES = dict.fromkeys(BITSANDBYTES_KINDS, ("bitsandbytes", "pip install bitsandbytes"))
_PACKAGES |= {"adamw_apex": ("apex", "build it with its CUDA extensions (https://github.com/NVIDIA/apex)")}


def check(config: OptimizerConfig) -> list[str]:
    """Return the problems that prevent building this optimizer here."""
    package, remedy = _PACKAGES.get(config.kind, ("", ""))
    if package and find_spec(package) is None:
        return [
            f"optimizer={config.kind} needs the package {package}, which is not installed: {remedy}, "
            "or choose optimizer=adamw"
        ]
    return []


def notes(config: OptimizerConfig, device: str) -> list[str]:
    """Return notes on this optimizer on `device` (`cpu`, `cuda`)."""
    if config.kind in PAGED_KINDS and device == "cpu":
        return [f"optimizer={config.kind}: paging has no effect on CPU, where states are in ordinary memory"]
    return []
