"""Runs that differ in a few overrides, composed at the price of one for each set of choices."""

from collections.abc import Iterator, Sequence
from copy import deepcopy

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from app.config.load import compose_plain, composed_run, with_any_model
from app.config.overrides import check_overrides
from app.config.schema import RunConfig
from app.errors import ConfigError

_SETS_A_VALUE = "++"


def compose_runs(commands: Sequence[Sequence[str]]) -> Iterator[RunConfig | ConfigError]:
    """For each command line what `load.compose_run` makes of it: the run, or what is wrong with it.

    Hydra takes a tenth of a second for the choices of groups and next to nothing for values.
    """
    bases: dict[tuple[str, ...], DictConfig | ConfigError] = {}
    for command in commands:
        try:
            yield _run(with_any_model(check_overrides(command, RunConfig)), bases)
        except ConfigError as problem:
            yield problem


def _run(overrides: Sequence[str], bases: dict[tuple[str, ...], DictConfig | ConfigError]) -> RunConfig:
    choices = tuple(text for text in overrides if not text.startswith(_SETS_A_VALUE))
    if choices not in bases:
        bases[choices] = _base(choices)
    base = bases[choices]
    if isinstance(base, ConfigError):
        raise base
    config = deepcopy(base)
    parse = OverridesParser.create().parse_override
    try:
        for override in (parse(text) for text in overrides if text.startswith(_SETS_A_VALUE)):
            # what Hydra does itself with `++key=value`, after it has composed the choices
            OmegaConf.update(config, override.key_or_group, override.value(), merge=True, force_add=True)
    except (OmegaConfBaseException, ValueError):
        config = compose_plain(overrides)  # which words it as it does for a single run
    return composed_run(config, overrides)


def _base(choices: tuple[str, ...]) -> DictConfig | ConfigError:
    try:
        config = compose_plain(choices)
    except ConfigError as problem:
        return problem
    with open_dict(config):
        config.pop("hydra")  # half of it, to be copied for each run
    return config
