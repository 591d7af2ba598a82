"""`python -m app.train -m ...`: from the command line to the leaderboard."""

from collections.abc import Callable, Sequence

from app.config.arguments import sweep_overrides_of
from app.config.schema import RunConfig
from app.errors import ConfigError
from app.sweep.checking import checked_runs, wrong_overrides
from app.sweep.expansion import Setting, settings_of
from app.sweep.folder import SweepFolder, default_path, identity_of
from app.sweep.proposers import PROPOSERS
from app.sweep.runner import Runner

_FOLDER = "output_dir"


def sweep(arguments: Sequence[str], check_parts: Callable[[RunConfig], None]) -> int:
    """All trials are checked (`check_parts` is the run's own check) before the first starts; returns the exit code."""
    settings = _settings(sweep_overrides_of(arguments))
    of_trials = [setting for setting in settings if setting.key != _FOLDER]
    proposer = PROPOSERS["grid"](of_trials)
    given = [text for setting in settings if setting.key == _FOLDER for text in setting.texts]
    runs = checked_runs(proposer.fixed, given, check_parts)
    place = _one_folder(runs, given[-1]) if given else default_path(settings)
    identity = identity_of(of_trials)
    with SweepFolder.claim(place, identity) as folder:
        return Runner(folder, identity, proposer, ["python", "-m", "app.train", *arguments]).run()


def _settings(overrides: Sequence[str]) -> list[Setting]:
    settings, problems = settings_of(overrides)
    if problems:  # there are no trials to be checked, but their words can be
        wrong = wrong_overrides(text for setting in settings for text in setting.texts)
        others = (problem for several in wrong.values() for problem in several)
        raise ConfigError(list(dict.fromkeys([*problems, *others])))
    return settings


def _one_folder(runs: Sequence[RunConfig], given: str) -> str:
    """Where `output_dir` leads, which may depend on other settings but must not on swept ones."""
    places = sorted({run.output_dir for run in runs})
    if len(places) > 1:
        raise ConfigError(
            f"{given}: this is another folder for each trial ({', '.join(places[:3])}). "
            "Give one for the whole sweep; each trial gets a folder in it."
        )
    return places[0]
