"""What app.check can be told: what to look at, and the run to look at, in the words of app.train."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from app.config.arguments import overrides_of, switches_of
from app.config.load import compose_run
from app.config.schema import RunConfig
from app.config.suggest import nearest
from app.errors import ConfigError

CHECKS = ("data",)  # without a word: all of them


@dataclass(frozen=True, slots=True)
class CheckConfig:
    """`folder` is None where no output_dir was given: then nothing is written."""

    checks: tuple[str, ...]
    run: RunConfig
    folder: Path | None


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
    run = compose_run(overrides)
    given = any(text.lstrip("+").startswith("output_dir=") for text in overrides)
    folder = Path(run.output_dir).expanduser() if given else None
    return CheckConfig(CHECKS if word is None else (word,), run, folder)


def _is_bare(word: str) -> bool:
    return "=" not in word and not word.startswith(("-", "~"))
