"""Table of the benchmarked frameworks: how to build them, and their requirements."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING

from scripts.bench.contest import Contest

if TYPE_CHECKING:
    from scripts.bench.loops import Contender

TRL = "1.16.0"


@dataclass(frozen=True, slots=True)
class Framework:
    """Framework; `build` also takes overrides of our configuration, `requires` returns missing requirements.

    `imports` are modules to import while another contender is measured. They do not use the device, except Unsloth,
    which replaces parts of transformers, PEFT and TRL and must be imported before them.
    """

    build: Callable[[Contest, tuple[str, ...]], "Contender"]
    requires: Callable[[Contest], list[str]] = lambda _contest: []
    imports: tuple[str, ...] = (
        "scripts.bench.loops",
        "transformers.models.llama.modeling_llama",
        "torch._inductor.compile_fx",
        "datasets",
    )


def _loop(name: str) -> Callable[[Contest, tuple[str, ...]], "Contender"]:
    def build(contest: Contest, settings: tuple[str, ...]) -> "Contender":
        from scripts.bench import loops

        contender: Contender = getattr(loops, name)(loops.prepare(contest, settings))
        return contender

    return build


def _trl(name: str) -> Callable[[Contest, tuple[str, ...]], "Contender"]:
    def build(contest: Contest, settings: tuple[str, ...]) -> "Contender":
        from scripts.bench import with_trl
        from scripts.bench.loops import prepare

        contender: Contender = getattr(with_trl, name)(prepare(contest, settings))
        return contender

    return build


def _unsloth(contest: Contest, settings: tuple[str, ...]) -> "Contender":
    import unsloth  # noqa: F401  first: it replaces parts of packages that ours import

    from scripts.bench.with_unsloth import Unsloth

    return Unsloth(contest, settings)


def _needs_trl(_contest: Contest) -> list[str]:
    try:
        installed = version("trl")
    except PackageNotFoundError:
        return [f"TRL {TRL} (pip install -c constraints.txt -e '.[bench]')"]
    return [] if installed == TRL else [f"TRL {TRL} (installed: {installed})"]


def _needs_liger(contest: Contest) -> list[str]:
    missing = [] if contest.device == "cuda" else ["a GPU"]
    return [*_needs_trl(contest), *missing, *_needs_package("liger_kernel")]


def _needs_unsloth(contest: Contest) -> list[str]:
    missing = [] if contest.device == "cuda" else ["a GPU"]
    if contest.method == "full":
        missing.append("adapters (--method lora or qlora)")
    return [*missing, *_needs_package("unsloth")]


def _needs_package(name: str) -> list[str]:
    return [] if name in sys.modules or find_spec(name) else [f"the package {name}"]


FRAMEWORKS: dict[str, Framework] = {
    "ours": Framework(_loop("Ours")),
    "bare": Framework(_loop("bare")),
    "plain": Framework(_loop("packed")),
    "trl": Framework(_trl("packed"), _needs_trl),
    "trl_default": Framework(_trl("default"), _needs_trl),
    "trl_fair": Framework(_trl("fair"), _needs_trl),
    "trl_fair_liger": Framework(_trl("fair_liger"), _needs_liger),
    "unsloth": Framework(_unsloth, _needs_unsloth, ("unsloth",)),
}


def split_settings(name: str) -> tuple[str, tuple[str, ...]]:
    """Split `ours:key=value,key=value` into the framework and the settings of this contender."""
    framework, _, settings = name.partition(":")
    return framework, tuple(settings.split(",")) if settings else ()


def is_framework(name: str) -> bool:
    """Return whether the framework is in the table; only ours accepts settings."""
    framework, settings = split_settings(name)
    return (
        framework in FRAMEWORKS and (framework == "ours" or ":" not in name) and all("=" in text for text in settings)
    )
