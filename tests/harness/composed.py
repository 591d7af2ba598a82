"""Runs composed once in a session: Hydra takes a fifth of a second for each."""

from copy import deepcopy
from dataclasses import fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from app.config.load import compose_run
from app.config.schema import RunConfig

_FOLDER = "/folder-of-a-test"


def composed(*words: str, folder: Path | None = None) -> RunConfig:
    """The run of these words, for its caller to change; tests whose words differ only in `folder` share it."""
    if folder is None:
        return deepcopy(_composed(words))
    run = _composed(tuple(word.replace(str(folder), _FOLDER) for word in words))
    moved: RunConfig = _moved(run, str(folder))
    return moved


@cache
def _composed(words: tuple[str, ...]) -> RunConfig:
    return compose_run(words)


def _moved(value: Any, folder: str) -> Any:
    """A copy with paths in this folder."""
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{each.name: _moved(getattr(value, each.name), folder) for each in fields(value)})
    if isinstance(value, dict):
        return {key: _moved(each, folder) for key, each in value.items()}
    if isinstance(value, list):
        return [_moved(each, folder) for each in value]
    return value.replace(_FOLDER, folder) if isinstance(value, str) else value
