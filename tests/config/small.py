"""A sound run as plain data, changed key by key, without composing anew; and what the program says of a run."""

from copy import deepcopy
from dataclasses import asdict
from functools import cache
from typing import Any

import pytest

from app.config.load import compose_run
from app.config.schema import RunConfig
from app.config.validate import parse_section
from app.errors import ConfigError
from tests.harness.composed import composed


@cache
def _default() -> dict[str, Any]:
    return asdict(composed())


def data_with(changes: dict[str, Any]) -> dict[str, Any]:
    """The default run with these dotted keys set, known or not."""
    data = deepcopy(_default())
    for key, value in changes.items():
        *sections, leaf = key.split(".")
        place = data
        for section in sections:
            place = place[section]
        place[leaf] = value
    return data


def run_with(changes: dict[str, Any]) -> RunConfig:
    return parse_section(RunConfig, data_with(changes))


def problems_in(changes: dict[str, Any]) -> list[str]:
    """What is wrong with the types, names and limits of the default run with these changes."""
    with pytest.raises(ConfigError) as refusal:
        run_with(changes)
    return list(refusal.value.problems)


def refusal_of(*overrides: str) -> list[str]:
    """The problems of a command line."""
    with pytest.raises(ConfigError) as refusal:
        compose_run(overrides)
    return list(refusal.value.problems)
