"""`python -m app.train -m ...`: from the command line to the leaderboard."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from app.config.overrides import split_words
from app.config.schema import RunConfig
from app.errors import ConfigError
from app.sweep.checking import checked_runs, wrong_overrides
from app.sweep.expansion import Setting, settings_of
from app.sweep.folder import SweepFolder, default_path, identity_of
from app.sweep.preset import NO_PRESET, Preset, is_of_the_sweep, read_preset
from app.sweep.proposers import PROPOSERS, Proposer
from app.sweep.runner import Runner
from app.sweep.space import Dimension, dimensions_in
from app.sweep.varied import dimensions_of

_FOLDER = "output_dir"


@dataclass(frozen=True, slots=True)
class Plan:
    """A sweep whose trials, or the ends of what they may be, are known to be sound."""

    proposer: Proposer
    runs: Sequence[RunConfig]
    place: str
    identity: str
    notes: Sequence[str]


def planned(arguments: Sequence[str], check_parts: Callable[[RunConfig], None]) -> Plan:
    """From the words of the command line; `check_parts` is the run's own check."""
    preset, space, settings = _read(split_words(arguments, sweep=True)[0])
    of_trials = [setting for setting in settings if setting.key != _FOLDER]
    given = [text for setting in settings if setting.key == _FOLDER for text in setting.texts]
    dimensions, notes = dimensions_of(preset, space, of_trials, given)
    proposer = PROPOSERS[preset.config.proposer].make(dimensions, preset.config)
    runs = checked_runs(proposer.points, given, check_parts)
    place = _one_folder(runs, given[-1]) if given else default_path(settings, preset)
    return Plan(proposer, runs, place, identity_of(of_trials, preset), notes)


def sweep(arguments: Sequence[str], check_parts: Callable[[RunConfig], None]) -> int:
    """All trials are checked before the first starts; returns the exit code."""
    plan = planned(arguments, check_parts)
    with SweepFolder.claim(plan.place, plan.identity) as folder:
        command = ["python", "-m", "app.train", *arguments]
        return Runner(folder, plan.identity, plan.proposer, command, plan.notes).run()


def _read(overrides: Sequence[str]) -> tuple[Preset, list[Dimension], list[Setting]]:
    """What single words say, and all that is wrong with any of them."""
    problems: list[str] = []
    preset, space = NO_PRESET, list[Dimension]()
    try:
        preset = read_preset([text for text in overrides if is_of_the_sweep(text)])
        problems += PROPOSERS[preset.config.proposer].check()
        space, wrong_space = dimensions_in(preset.config.space)
        problems += wrong_space
    except ConfigError as problem:
        problems += problem.problems
    settings, refused = settings_of([text for text in overrides if not is_of_the_sweep(text)])
    problems += refused
    if problems or preset.name:  # there are no trials yet to be checked, but their words can be
        wrong = wrong_overrides(text for setting in settings for text in setting.texts)
        problems += (problem for several in wrong.values() for problem in several)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return preset, space, settings


def _one_folder(runs: Sequence[RunConfig], given: str) -> str:
    """Where `output_dir` leads, which may depend on other settings but must not on swept ones."""
    places = sorted({run.output_dir for run in runs})
    if len(places) > 1:
        raise ConfigError(
            f"{given}: this is another folder for each trial ({', '.join(places[:3])}). "
            "Give one for the whole sweep; each trial gets a folder in it."
        )
    return places[0]
