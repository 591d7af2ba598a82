"""Which words of the command line are overrides, and which are Hydra's own switches."""

from argparse import ArgumentError
from collections.abc import Sequence

from hydra._internal.utils import get_args_parser

from app.errors import ConfigError

SWEEPS = "sweeps are not in this version. Start one run for each value, each with its output_dir."
# there is one tree of configurations, and it is checked; `rerun` would unpickle a file
_OTHER_ROOTS = ("config_path", "config_name", "config_dir", "experimental_rerun")


def overrides_of(arguments: Sequence[str]) -> list[str]:
    """The settings among `arguments`; ConfigError for a switch that this program does not have.

    Hydra's own parser decides, so that both always agree.
    """
    parser = get_args_parser()
    parser.exit_on_error = False
    try:
        known, others = parser.parse_known_args(list(arguments))
    except ArgumentError as fault:
        raise ConfigError(f"{fault.argument_name}: {fault.message}.") from None
    problems = [_unknown(other) for other in others if other.startswith("-")]
    if known.multirun:
        problems.append(f"-m: {SWEEPS}")
    problems += [
        f"--{name.replace('_', '-')} is not in this program: its configurations are the files of conf/. "
        "Choose among them with group=choice; --help lists them."
        for name in _OTHER_ROOTS
        if getattr(known, name) is not None
    ]
    if problems:
        raise ConfigError(problems)
    return [*known.overrides, *others]


def switches_of(arguments: Sequence[str]) -> list[str]:
    """The rest: `--help`, `--cfg job` and the like."""
    overrides = overrides_of(arguments)
    return [argument for argument in arguments if argument not in overrides]


def _unknown(switch: str) -> str:
    name, _, value = switch.lstrip("-").partition("=")
    setting = f"{name.replace('-', '_')}={value or '...'}"
    return f"{switch}: there is no such switch. Settings have no dashes in front: {setting}"
