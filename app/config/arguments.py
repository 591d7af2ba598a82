"""Which words of the command line are overrides, and which are Hydra's own switches."""

from argparse import ArgumentError, Namespace
from collections.abc import Sequence

from hydra._internal.utils import get_args_parser

from app.errors import ConfigError

_SWEEP_SWITCHES = ("-m", "--multirun")
# there is one tree of configurations, and it is checked; `rerun` would unpickle a file
_OTHER_ROOTS = ("config_path", "config_name", "config_dir", "experimental_rerun")


def is_sweep(arguments: Sequence[str]) -> bool:
    """Whether `-m` is among them; words that cannot be read at all are reported as those of a run."""
    try:
        return bool(_read(arguments)[0].multirun)
    except ConfigError:
        return False


def overrides_of(arguments: Sequence[str]) -> list[str]:
    """The settings among `arguments`; ConfigError for a switch that this program does not have.

    Hydra's own parser decides, so that both always agree.
    """
    known, overrides, problems = _read(arguments)
    if known.multirun:
        problems.append("-m starts a sweep, and this is one run. Leave it out.")
    if problems:
        raise ConfigError(problems)
    return overrides


def sweep_overrides_of(arguments: Sequence[str]) -> list[str]:
    """The same for a command with `-m`, which goes with no other switch."""
    _, overrides, problems = _read(arguments)
    others = [word for word in arguments if word not in overrides and word not in _SWEEP_SWITCHES]
    if others and not problems:
        problems.append(
            f"{' '.join(others)} does not go with -m, because it is about one run. Leave out one of them; "
            "dry_run=true tells the plan of every trial."
        )
    if problems:
        raise ConfigError(problems)
    return overrides


def switches_of(arguments: Sequence[str]) -> list[str]:
    """The rest: `--help`, `--cfg job` and the like."""
    overrides = overrides_of(arguments)
    return [argument for argument in arguments if argument not in overrides]


def _read(arguments: Sequence[str]) -> tuple[Namespace, list[str], list[str]]:
    """The switches, the settings, and what is wrong with the switches."""
    parser = get_args_parser()
    parser.exit_on_error = False
    try:
        known, others = parser.parse_known_args(list(arguments))
    except ArgumentError as fault:
        raise ConfigError(f"{fault.argument_name}: {fault.message}.") from None
    problems = [_unknown(other) for other in others if other.startswith("-")]
    problems += [
        f"--{name.replace('_', '-')} is not in this program: its configurations are the files of conf/. "
        "Choose among them with group=choice; --help lists them."
        for name in _OTHER_ROOTS
        if getattr(known, name) is not None
    ]
    return known, [*known.overrides, *others], problems


def _unknown(switch: str) -> str:
    name, _, value = switch.lstrip("-").partition("=")
    setting = f"{name.replace('-', '_')}={value or '...'}"
    return f"{switch}: there is no such switch. Settings have no dashes in front: {setting}"
