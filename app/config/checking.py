"""What app.check can be told: what to look at, and the run to look at, in the words of app.train."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from app.config.arguments import overrides_of, switches_of
from app.config.hardware import GROUP, HardwareConfig, lacking, read_hardware
from app.config.load import compose_run
from app.config.overrides import check_overrides
from app.config.schema import RunConfig
from app.config.strict import typed
from app.config.suggest import nearest
from app.errors import ConfigError

CHECKS = ("data", "memory")  # without a word: all of them
_OWN = ("exact",)


@dataclass(frozen=True, slots=True)
class CheckConfig:
    """`folder` is None where no output_dir was given: then nothing is written. `overrides` are those of the run;
    `hardware` is None for the machine at hand; `exact` traces every layer.
    """

    checks: tuple[str, ...]
    run: RunConfig
    folder: Path | None
    overrides: tuple[str, ...] = ()
    hardware: HardwareConfig | None = None
    exact: bool = False


@dataclass(kw_only=True, slots=True)
class _Options:
    """What app.check is told beside the run and the hardware."""

    exact: bool = False


@dataclass(kw_only=True, slots=True)
class _Known(RunConfig):
    """Every key that may stand in the command line."""

    hardware: HardwareConfig
    exact: bool = False


def check_config(arguments: Sequence[str]) -> CheckConfig:
    """From the command line, with everything that is wrong with it."""
    word = arguments[0] if arguments and _is_bare(arguments[0]) else None
    if word is not None and word not in CHECKS:
        near = nearest(word, CHECKS)
        meant = f" Did you mean {near}?" if near else ""
        raise ConfigError(
            f"{word!r} is neither a check nor key=value.{meant} Checks: {', '.join(CHECKS)}; no word means all."
        )
    rest = list(arguments if word is None else arguments[1:])
    overrides = overrides_of(rest)
    switches = switches_of(rest)
    if switches:
        raise ConfigError(f"{' '.join(switches)} is a switch of app.train. Leave it out.")
    check_overrides(overrides, _Known)  # of all keys together, so that all misspelt ones are told at once
    own = [text for text in overrides if _key(text) in _OWN]
    of_hardware = [text for text in overrides if _key(text).partition(".")[0] == GROUP]
    of_run = [text for text in overrides if text not in own and text not in of_hardware]
    checks = CHECKS if word is None else (word,)
    _require_memory(checks, [*own, *of_hardware])
    run = compose_run(of_run)
    given = any(_key(text) == "output_dir" for text in of_run)
    folder = Path(run.output_dir).expanduser() if given else None
    options = typed(_Options, {_key(text): text.partition("=")[2] for text in own})
    hardware = read_hardware(of_hardware)
    problems = [] if hardware is None else lacking(run.quantization, hardware)
    if problems:
        raise ConfigError(problems)
    return CheckConfig(checks, run, folder, tuple(of_run), hardware, options.exact)


def _require_memory(checks: Sequence[str], given: Sequence[str]) -> None:
    if given and "memory" not in checks:
        raise ConfigError(f"{' '.join(given)}: only app.check memory asks for it. Leave it out.")


def _key(text: str) -> str:
    return text.lstrip("+").partition("=")[0]


def _is_bare(word: str) -> bool:
    return "=" not in word and not word.startswith(("-", "~"))
