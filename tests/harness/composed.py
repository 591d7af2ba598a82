"""Runs composed once in a session: Hydra takes a fifth of a second for each."""

from copy import deepcopy
from functools import cache

from app.config.load import compose_run
from app.config.schema import RunConfig


def composed(*words: str) -> RunConfig:
    """The run of these words, for its caller to change."""
    return deepcopy(_composed(words))


@cache
def _composed(words: tuple[str, ...]) -> RunConfig:
    return compose_run(words)
