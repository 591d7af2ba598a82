"""Command `app.train -m`: plans a sweep, checks all its trials, then runs them."""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from app.config.overrides import settings_notes, split_arguments
from app.config.schema import RunConfig
from app.errors import AppError, ConfigError, refuse
from app.sweeps.grid import Grid, Setting, settings_of, wrong_overrides
from app.sweeps.ladder import LADDER, Ladder, size_note
from app.sweeps.optuna_search import Search
from app.sweeps.preset import NO_PRESET, Preset, SweepConfig, dimensions_of, is_sweep_key, read_preset
from app.sweeps.runner import Proposer, Runner
from app.sweeps.search_space import Dimension, Range, as_read, compose_or_error, dimensions_in, multiply_out
from app.sweeps.trials import SweepFolder, Trial, describe, key_of

_FOLDER = "output_dir"
_NOT_IN_IDENTITY = ("output_dir", "dry_run")
_MAX_FOLDER_CHARACTERS = 48


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """A sweep whose trials, or the corners of whose search space, are valid."""

    proposer: Proposer
    runs: Sequence[RunConfig]
    place: str
    identity: str
    notes: Sequence[str]


def sweep(arguments: Sequence[str], check_parts: Callable[[RunConfig], None]) -> int:
    """Run a sweep; returns the exit code. `check_parts` is the check of a run before it starts."""
    plan = plan_sweep(arguments, check_parts)
    with SweepFolder.claim(plan.place, plan.identity) as folder:
        command = ["python", "-m", "app.train", *arguments]
        return Runner(folder, plan.identity, plan.proposer, command, plan.notes).run()


def plan_sweep(arguments: Sequence[str], check_parts: Callable[[RunConfig], None]) -> SweepPlan:
    """Plan the sweep of a command line."""
    preset, space, settings = _read(split_arguments(arguments, sweep=True)[0])
    of_trials = [setting for setting in settings if setting.key != _FOLDER]
    given = [text for setting in settings if setting.key == _FOLDER for text in setting.texts]
    if preset.config.planned:
        plan = f"python -m app.check memory sweep={preset.name}"
        raise ConfigError(f"sweep={preset.name}: its rungs are planned, not trained. Type {plan} hardware=h100")
    if preset.config.proposer == LADDER:
        ladder = Ladder(preset, of_trials)
        runs, notes = _checked_rungs(ladder, given, check_parts), size_note(preset)
        proposer: Proposer = ladder
    else:
        dimensions, notes = dimensions_of(preset, space, of_trials, given)
        proposer = proposer_of(dimensions, preset.config)
        runs = _checked_runs(proposer.points, given, check_parts)
        notes += _left_out(dimensions, proposer)
    place = _one_folder(runs, given[-1]) if given else default_path(settings, preset)
    return SweepPlan(proposer, runs, place, identity_of(of_trials, preset), [*settings_notes(arguments), *notes])


def read_ladder(overrides: Sequence[str]) -> Ladder:
    """The ladder of `sweep=NAME`, its rungs not checked yet."""
    preset, _, settings = _read(overrides)
    if preset.config.proposer != LADDER:
        raise ConfigError(
            f"sweep={preset.name} has no rungs, and app.check memory plans one run or the rungs of a ladder. "
            f"Leave it out; dry_run=true plans each trial: python -m app.train -m sweep={preset.name} dry_run=true"
        )
    return Ladder(preset, settings)


def _left_out(dimensions: Sequence[Dimension], proposer: Proposer) -> Iterator[str]:
    """Notes on the keys that not every trial has."""
    for key in dict.fromkeys(each.key for each in dimensions):
        if any(key not in map(key_of, trial.overrides) for trial in proposer.points):
            yield f"{'note':8}{key} is left out of the trials that do not read it, and equal trials run once"


def proposer_of(dimensions: Sequence[Dimension], config: SweepConfig) -> Proposer:
    """A search or a grid."""
    if config.proposer == "tpe":
        return Search(dimensions, config)
    settings = [each for each in dimensions if isinstance(each, Setting)]
    refuse(
        f"sweep.space.{each.key}: a range has no list of values. Give values, [a, b], or choose sweep=optuna."
        for each in dimensions
        if isinstance(each, Range)
    )
    combinations = as_read(itertools.product(*(setting.texts for setting in settings)), settings)
    relative = {setting.key for setting in settings if setting.is_relative}
    swept_keys = relative | {setting.key for setting in settings if setting.is_swept}
    return Grid(multiply_out(combinations, relative), swept_keys)


def identity_of(settings: Sequence[Setting], preset: Preset = NO_PRESET) -> str:
    """Hash of a sweep, which does not depend on the number of trials of a search."""
    same: list[Any] = [
        [text.lstrip("+") for text in setting.texts] for setting in settings if setting.key not in _NOT_IN_IDENTITY
    ]
    config = preset.config
    if config.proposer == LADDER:  # without what its source claims
        rungs = [[name, rung.overrides] for name, rung in config.rungs.items()]
        same += [config.base, config.small, config.size, rungs]
    elif preset.name:
        same.append({"proposer": config.proposer, "space": config.space, "trials": None, "seed": config.seed})
    return hashlib.sha256(json.dumps(same).encode()).hexdigest()


def default_path(settings: Sequence[Setting], preset: Preset = NO_PRESET) -> str:
    """A name that the same command finds again."""
    swept = (setting.key.rpartition(".")[2] for setting in settings if setting.is_swept)
    words = "-".join(filter(None, ("sweep", preset.name, *swept)))[:_MAX_FOLDER_CHARACTERS].rstrip("-")
    return f"runs/{words}-{identity_of(settings, preset)[:8]}"


def _read(overrides: Sequence[str]) -> tuple[Preset, list[Dimension], list[Setting]]:
    """Read all overrides; one ConfigError has the problems of each of them."""
    problems: list[str] = []
    preset, space = NO_PRESET, list[Dimension]()
    try:
        preset = read_preset([text for text in overrides if is_sweep_key(text)])
        if preset.config.proposer == "tpe" and find_spec("optuna") is None:
            problems.append(
                "sweep=optuna needs the package optuna, which is not installed: "
                "pip install optuna, or list the values yourself: -m optimizer.lr=1e-3,3e-4"
            )
        space, wrong_space = dimensions_in(preset.config.space)
        problems += wrong_space
    except ConfigError as problem:
        problems += problem.problems
    # every trial is started with resume=auto
    settings, refused = settings_of([text for text in overrides if not is_sweep_key(text) and text != "resume=auto"])
    problems += refused
    if problems or preset.name:  # without trials to check yet, check their overrides
        wrong = wrong_overrides(text for setting in settings for text in setting.texts)
        problems += (problem for several in wrong.values() for problem in several)
    refuse(dict.fromkeys(problems))
    return preset, space, settings


def _checked_runs(
    trials: Sequence[Trial], extra: Sequence[str], check_parts: Callable[[RunConfig], None]
) -> list[RunConfig]:
    """The run of each trial with `extra` overrides; one ConfigError has every problem once."""
    wrong = wrong_overrides([*extra, *(text for trial in trials for text in trial.overrides)])
    runs: list[RunConfig] = []
    found: dict[str, list[Trial]] = {}
    for trial in trials:
        if wrong.keys() & {*trial.overrides, *extra}:
            continue
        run = compose_or_error((*trial.overrides, *extra))
        if isinstance(run, RunConfig):
            runs.append(run)
        for problem in _problems(run, check_parts):
            found.setdefault(problem, []).append(trial)
    problems = [problem for several in wrong.values() for problem in several]
    problems += [_with_trials(problem, by, len(trials)) for problem, by in found.items()]
    refuse(dict.fromkeys(problems))
    return runs


def _checked_rungs(
    ladder: Ladder, extra: Sequence[str], check_parts: Callable[[RunConfig], None]
) -> Sequence[RunConfig]:
    """The runs of the rungs that can be run here; the others are refused by name when their turn comes."""
    runs: dict[int, RunConfig] = {}
    problems: dict[int, Sequence[str]] = {}
    for trial in ladder.points:
        if trial.refused is None:
            try:
                (runs[trial.number],) = _checked_runs([trial], extra, check_parts)
            except ConfigError as found:
                problems[trial.number] = found.problems
    ladder.check(runs, problems)
    return list(runs.values())


def _problems(run: RunConfig | ConfigError, check_parts: Callable[[RunConfig], None]) -> Sequence[str]:
    if isinstance(run, ConfigError):
        return run.problems
    try:
        check_parts(run)
    except AppError as problem:
        return problem.problems
    return ()


def _with_trials(problem: str, by: Sequence[Trial], trials: int) -> str:
    """A problem with the trials that have it, unless all have; points of a search space have no number."""
    if len(by) == trials:
        return problem
    if not by[0].number:
        return f"{problem} (with {describe(by[0].swept)})"
    others = f" and {len(by) - 1} more" if len(by) > 1 else ""
    return f"{problem} (trial {by[0].number}{others}: {describe(by[0].swept)})"


def _one_folder(runs: Sequence[RunConfig], given: str) -> str:
    """The folder of `output_dir`, which must not depend on swept settings."""
    places = sorted({run.output_dir for run in runs})
    if len(places) > 1:
        raise ConfigError(
            f"{given}: this is another folder for each trial ({', '.join(places[:3])}). "
            "Give one for the whole sweep; each trial gets a folder in it."
        )
    return places[0]
