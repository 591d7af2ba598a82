"""What `dataset.format=auto` means, before anything is made that depends on it."""

from dataclasses import replace
from typing import TypeVar

from app.config.dataset import formats_for
from app.config.rules import problems_of
from app.config.schema import RunConfig
from app.data.detect_format import detect_formats
from app.errors import ConfigError

Run = TypeVar("Run", bound=RunConfig)


def with_format(run: Run) -> tuple[Run, list[str]]:
    """The run with rows of a known format, which run.yaml keeps, and what to tell; ConfigError if it breaks a rule."""
    dataset, notes = detect_formats(run.dataset, formats_for(run.task.kind))
    if not notes:
        return run, notes
    known = replace(run, dataset=dataset)
    problems = problems_of(known)
    if problems:
        raise ConfigError([*problems[:-1], f"{problems[-1]} ({'; '.join(notes)})"])
    return known, notes
