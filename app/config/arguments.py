"""Which words of the command line are overrides, and which are Hydra's own switches."""

from collections.abc import Sequence

from hydra._internal.utils import get_args_parser

from app.errors import ConfigError

_SWEEPS = ("-m", "--multirun")


def overrides_of(arguments: Sequence[str]) -> list[str]:
    """Hydra's own parser decides, so that both always agree."""
    if any(argument in _SWEEPS for argument in arguments):
        raise ConfigError(
            "-m: sweeps are not in this version. Start one run for each value, each with its output_dir."
        )
    overrides: list[str] = get_args_parser().parse_args(list(arguments)).overrides
    return overrides
