"""Every trial composed and checked before the first one starts, with the functions that check a single run."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from app.config.load import compose_runs
from app.config.overrides import check_overrides
from app.config.schema import RunConfig
from app.errors import AppError, ConfigError
from app.sweep.trial import Trial, shown


def checked_runs(
    trials: Sequence[Trial], extra: Sequence[str], check_parts: Callable[[RunConfig], None]
) -> list[RunConfig]:
    """The run of each trial, told `extra` too; one ConfigError with what is wrong with any of them, each thing once."""
    wrong = wrong_overrides([*extra, *(text for trial in trials for text in trial.overrides)])
    sound = [trial for trial in trials if not wrong.keys() & {*trial.overrides, *extra}]
    runs: list[RunConfig] = []
    found: dict[str, list[Trial]] = {}
    for trial, run in zip(sound, compose_runs([(*t.overrides, *extra) for t in sound]), strict=True):
        if isinstance(run, RunConfig):
            runs.append(run)
        for problem in _problems(run, check_parts):
            found.setdefault(problem, []).append(trial)
    problems = [problem for several in wrong.values() for problem in several]
    problems += [_placed(problem, by, len(trials)) for problem, by in found.items()]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return runs


def wrong_overrides(texts: Iterable[str]) -> dict[str, Sequence[str]]:
    """What is wrong with single overrides, whatever they are combined with."""
    wrong: dict[str, Sequence[str]] = {}
    for text in dict.fromkeys(texts):
        try:
            check_overrides([text], RunConfig)
        except ConfigError as problem:
            wrong[text] = problem.problems
    return wrong


def _problems(run: RunConfig | ConfigError, check_parts: Callable[[RunConfig], None]) -> Iterator[str]:
    if isinstance(run, ConfigError):
        yield from run.problems
        return
    try:
        check_parts(run)
    except AppError as problem:
        yield from problem.problems


def _placed(problem: str, by: Sequence[Trial], trials: int) -> str:
    """With the trials that have it, unless all of them do; points of a space have no number."""
    if len(by) == trials:
        return problem
    if not by[0].number:
        return f"{problem} (with {shown(by[0].swept)})"
    others = f" and {len(by) - 1} more" if len(by) > 1 else ""
    return f"{problem} (trial {by[0].number}{others}: {shown(by[0].swept)})"
