"""Command `finetune train -m`: plan a sweep, check all trials, run them one by one, and resume after a stop."""

import hashlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from hydra.core.override_parser.types import Quote, QuotedString

from app.config.arguments import split_arguments
from app.config.finished_run import read_manifest
from app.config.schema import RunConfig
from app.errors import AppError, ConfigError, refuse
from app.files import write_text
from app.pages.comparison_page import sweep_page
from app.pages.ladder_tables import measured_tables
from app.pages.page import Page, as_markdown, as_text, write_page
from app.safe_text import redact_text
from app.signals import CTRL_C, START_ME_AGAIN, StopRequest, listening
from app.sweeps.ladder import LADDER, Ladder, size_note
from app.sweeps.search import Search
from app.sweeps.search_space import (
    NO_PRESET,
    Dimension,
    Grid,
    Preset,
    Range,
    Setting,
    SweepConfig,
    as_read,
    compose_or_error,
    dimensions_in,
    dimensions_of,
    is_sweep_key,
    multiply_out,
    read_preset,
    settings_of,
    wrong_overrides,
)
from app.sweeps.trials import (
    DRY_RUN,
    FAILED,
    FINISHED,
    REFUSED,
    RUNNING,
    STOPPED,
    Outcome,
    SweepFolder,
    Trial,
    TrialLog,
    TrialProcess,
    best,
    cpu_share,
    describe,
    key_of,
    leaderboard,
    reason,
    values_of,
)
from app.tracking.console import Console
from app.tracking.formatting import align, format_duration
from app.tracking.output_dir import lock_owner
from app.tracking.recorder import read_result

SOME_FAILED = 3
_USERS_FAULT = 2
_POLL_SECONDS = 0.2
_LOAD_SECONDS = 0.5  # to measure other programs before each trial of a ladder


class Proposer(Protocol):
    """Chooses the trials of a sweep: a grid, a search or a ladder.

    `points` are checked before the first trial: all trials of a grid or ladder, the corners of a search space.
    """

    points: Sequence[Trial]
    count: int  # number of trials

    def recall(self, recorded: Sequence[Mapping[str, Any]], /) -> Sequence[Trial]:
        """Return the trials determined before the first one starts, from earlier starts in sweep.json."""

    def next(self, ended: Sequence[Outcome], /) -> Trial | None:
        """Return the trial to run after these outcomes; None at the end."""


class Runner:
    """Runs the trials of the proposer and writes sweep.json."""

    def __init__(
        self, folder: SweepFolder, identity: str, proposer: Proposer, command: Sequence[str], notes: Sequence[str] = ()
    ) -> None:
        self._folder = folder
        self._proposer = proposer
        self._ladder = proposer if isinstance(proposer, Ladder) else None
        self._facts = {"identity": identity, "command": list(command), "count": proposer.count}
        self._notes = notes
        self._console = Console()
        self._ended: list[Outcome] = []
        before = folder.read().get("trials", [])
        self._before: dict[int, Mapping[str, Any]] = {trial["number"]: trial for trial in before}
        self._expected = [self._finished(trial) or self._new(trial) for trial in proposer.recall(before)]

    def run(self) -> int:
        """Run to the end or until a stop request; return the exit code."""
        count = self._proposer.count
        self._say(f"sweep   {self._folder.path}, {count} {'trials' if count > 1 else 'trial'}")
        for note in self._notes:
            self._say(note)
        self._console.begin(count, 0)
        with listening() as request:
            try:
                while request.exit_code is None and (trial := self._proposer.next(self._ended)):
                    changes = trial.name if self._ladder else describe(trial.swept)
                    self._say(f"trial {trial.number}/{count}  {changes}".rstrip())
                    self._wait_for_lock(self._place(trial), request)
                    if request.exit_code is None:
                        self._ended.append(self._earlier_outcome(trial) or self._run(trial, request))
                        self._console.progress(len(self._ended), "")
                        self._write()
            finally:
                self._console.close()
        return self._close(request)

    def _say(self, text: str) -> None:
        self._console.say(redact_text(text))

    def _earlier_outcome(self, trial: Trial) -> Outcome | None:
        """Return the outcome of a trial that finished earlier."""
        outcome = self._finished(trial)
        if outcome:
            self._say(f"  already finished, {_in_short(outcome)}")
        return outcome

    def _run(self, trial: Trial, request: StopRequest) -> Outcome:
        printed = TrialLog(self._folder.path / f"{trial.name}.txt")
        if trial.refused is not None:
            outcome = replace(self._new(trial), status=REFUSED, error=trial.refused)
            self._report_outcome(outcome, printed)
            return outcome
        outcome = replace(self._new(trial), status=RUNNING)
        self._write(outcome)
        if self._ladder:
            outcome = replace(outcome, other_cpu_share=cpu_share(_LOAD_SECONDS))
        begin = time.monotonic()
        code = self._follow(self._start(trial, printed), printed, request)
        seconds = outcome.seconds + time.monotonic() - begin
        outcome = replace(outcome, exit_code=code, seconds=round(seconds, 3))
        if code == 0:
            outcome = self._with_result(outcome)
        elif request.exit_code is not None:
            outcome = replace(outcome, status=STOPPED)
        elif self._ladder and code == _USERS_FAULT:
            outcome = replace(outcome, status=REFUSED, error=reason(code, printed.text()).removeprefix("error: "))
        else:
            outcome = replace(outcome, status=FAILED, error=reason(code, printed.text()))
        self._report_outcome(outcome, printed)
        return outcome

    def _start(self, trial: Trial, printed: TrialLog) -> TrialProcess:
        place = QuotedString(str(self._place(trial)), Quote.single).with_quotes()
        group = os.environ.get("WANDB_RUN_GROUP") or self._folder.path.name
        environment = {**os.environ, "WANDB_RUN_GROUP": group}
        overrides = (*trial.overrides, *self._as_first(trial), f"output_dir={place}", "resume=auto")
        return TrialProcess(overrides, environment, printed.path)

    def _as_first(self, trial: Trial) -> Sequence[str]:
        """Disable compilation on a GPU if compile=auto compiled no layers of the first trial, for comparable trials."""
        if not self._ended or any(key_of(text).partition(".")[0] == "compile" for text in trial.overrides):
            return ()
        choices = read_manifest(Path(self._ended[0].folder) / "manifest.json").get("choices", {})
        return ("compile=none",) if (choices.get("device"), choices.get("compile")) == ("cuda", "none") else ()

    def _follow(self, process: TrialProcess, printed: TrialLog, request: StopRequest) -> int:
        """Wait for the end of a trial. A stop request is passed on; a trial that stops without one stops the sweep."""
        is_requested = False
        try:
            while (code := process.wait(_POLL_SECONDS)) is None:
                self._console.progress(len(self._ended), printed.latest())
                if request.exit_code is not None and not is_requested:
                    is_requested = True
                    self._say("  Stopping: saving the trial. Ctrl-C again to kill it.")
                    process.request_stop(request.exit_code)
        except KeyboardInterrupt:
            return process.kill()
        except BaseException:
            process.kill()
            raise
        if code in (CTRL_C, START_ME_AGAIN) and request.exit_code is None:
            request.exit_code = code
        return code

    def _wait_for_lock(self, place: Path, request: StopRequest) -> None:
        """Wait for a trial of a killed sweep to save and end."""
        is_reported = False
        while (user := lock_owner(place)) and request.exit_code is None:
            if not is_reported:
                self._say(f"  waiting: {user} still uses {place}")
            is_reported = True
            time.sleep(_POLL_SECONDS)

    def _report_outcome(self, outcome: Outcome, printed: TrialLog) -> None:
        took = format_duration(outcome.seconds)
        if outcome.status == FINISHED:
            self._say(f"  finished, {_in_short(outcome)}, {took}")
        elif outcome.status == STOPPED:
            self._say(f"  stopped after {took}")
        elif outcome.status == REFUSED:
            self._say(_indented(f"refused: {outcome.error}", by=2))
        elif outcome.status == DRY_RUN:
            self._say(_indented(printed.text().rstrip(), by=2))
        else:
            where = f"full output in {printed.path}"
            self._say(f"  failed with exit code {outcome.exit_code} after {took}; {where}")
            self._say(_indented(outcome.error or "no result was written", by=4))

    def _close(self, request: StopRequest) -> int:
        winner = None if self._ladder else best(self._all())
        if self._ladder:
            tables = measured_tables(self._ladder.compared(self._all()))
            write_text(self._folder.path / "ladder.md", as_markdown(Page(self._folder.path.name, tables)))
            self._say(f"\n{as_text(*tables)}\n")
        else:
            self._say(f"\n{leaderboard(self._all())}")
        if winner:
            text = f"trial {winner['number']}, {winner['folder']}\n{winner['line']}"
            self._say("\n" + align([("best", text), ("all", str(self._folder.content))]))
        if self._ended:
            folder, page = self._folder, self._folder.path / "report.html"
            self._say(write_page(page, lambda: sweep_page(folder.path, folder.read(), page)))
        is_whole = self._proposer.next(self._ended) is None and STOPPED not in self._statuses()
        if request.exit_code is not None and not is_whole:
            self._say("Stopped. Run the same command to continue.")
            return request.exit_code
        failed = self._statuses().count(FAILED)
        if failed:
            self._say(f"{failed} of {len(self._ended)} trials failed; run the same command to retry them")
        return SOME_FAILED if failed or {*self._statuses()} == {REFUSED} else 0

    def _statuses(self) -> list[str]:
        return [outcome.status for outcome in self._ended]

    def _all(self, running: Outcome | None = None) -> list[Outcome]:
        """Return the outcomes of all trials so far: ended, running, and expected."""
        started = [*self._ended, running] if running else self._ended
        return [*started, *self._expected[len(started) :]]

    def _write(self, running: Outcome | None = None) -> None:
        trials = self._all(running)
        compared = {"ladder": self._ladder.compared(trials)} if self._ladder else {}
        self._folder.write({**self._facts, "best": None if self._ladder else best(trials), **compared}, trials)

    def _place(self, trial: Trial) -> Path:
        return self._folder.path / trial.name

    def _new(self, trial: Trial) -> Outcome:
        before = self._before.get(trial.number, {})
        place = str(self._place(trial))
        return Outcome(
            number=trial.number,
            overrides=trial.overrides,
            swept=trial.swept,
            values=values_of(trial.swept),
            proposed=trial.proposed,
            folder=place,
            seconds=before.get("seconds", 0.0),
            other_cpu_share=before.get("other_cpu_share"),
        )

    def _finished(self, trial: Trial) -> Outcome | None:
        outcome = replace(self._with_result(self._new(trial)), exit_code=0)
        return outcome if outcome.status == FINISHED else None

    def _with_result(self, outcome: Outcome) -> Outcome:
        result = read_result(outcome.folder)
        return replace(
            outcome,
            status=result.get("status", FAILED),
            objective=result.get("objective"),
            objective_is=result.get("objective_is"),
            steps=result.get("steps"),
            tokens_per_second=result.get("tokens_per_second"),
            samples_per_second=result.get("samples_per_second"),
        )


def _in_short(outcome: Outcome) -> str:
    objective = "no objective" if outcome.objective is None else f"objective {outcome.objective:.4f}"
    return objective if outcome.steps is None else f"{objective}, {outcome.steps:,} steps"


def _indented(text: str, by: int) -> str:
    return "\n".join(" " * by + line for line in text.splitlines())


# ---- sweep


_FOLDER = "output_dir"
_NOT_IN_IDENTITY = ("output_dir", "dry_run")
_MAX_FOLDER_CHARACTERS = 48


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """A sweep with valid trials, or a valid search space (checked at its corners)."""

    proposer: Proposer
    runs: Sequence[RunConfig]
    place: str
    identity: str
    notes: Sequence[str]


def sweep(arguments: Sequence[str], check_parts: Callable[[RunConfig], None]) -> int:
    """Run a sweep; return the exit code. `check_parts` is the check of a run before it starts."""
    plan = plan_sweep(arguments, check_parts)
    with SweepFolder.claim(plan.place, plan.identity) as folder:
        command = ["finetune", "train", *arguments]
        return Runner(folder, plan.identity, plan.proposer, command, plan.notes).run()


def plan_sweep(arguments: Sequence[str], check_parts: Callable[[RunConfig], None]) -> SweepPlan:
    """Plan the sweep of a command line."""
    overrides, _, of_files = split_arguments(arguments, sweep=True)
    preset, space, settings = _read(overrides)
    of_trials = [setting for setting in settings if setting.key != _FOLDER]
    folders = [text for setting in settings if setting.key == _FOLDER for text in setting.texts]
    if preset.config.planned:
        plan = f"finetune check memory sweep={preset.name}"
        raise ConfigError(f"sweep={preset.name} only estimates memory and is not trained. Run {plan} hardware=h100")
    if preset.config.proposer == LADDER:
        ladder = Ladder(preset, of_trials)
        runs, notes = _checked_rungs(ladder, folders, check_parts), size_note(preset)
        proposer: Proposer = ladder
    else:
        dimensions, notes = dimensions_of(preset, space, of_trials, folders)
        proposer = proposer_of(dimensions, preset.config)
        runs = _checked_runs(proposer.points, folders, check_parts)
        notes += _left_out(dimensions, proposer)
    place = _one_folder(runs, folders[-1]) if folders else default_path(settings, preset)
    return SweepPlan(proposer, runs, place, identity_of(of_trials, preset), [*of_files, *notes])


def read_ladder(overrides: Sequence[str]) -> Ladder:
    """Return the ladder of `sweep=NAME`, with unchecked rungs."""
    preset, _, settings = _read(overrides)
    if preset.config.proposer != LADDER:
        raise ConfigError(
            f"sweep={preset.name} is not a ladder; finetune check memory estimates one run or the rungs of a "
            f"ladder. To estimate each trial: finetune train -m sweep={preset.name} dry_run=true"
        )
    return Ladder(preset, settings)


def _left_out(dimensions: Sequence[Dimension], proposer: Proposer) -> Iterator[str]:
    """Yield notes on keys that are not in every trial."""
    for key in dict.fromkeys(dimension.key for dimension in dimensions):
        if any(key not in map(key_of, trial.overrides) for trial in proposer.points):
            yield f"{'note':8}{key} is ignored in trials that do not use it; equal trials run once"


def proposer_of(dimensions: Sequence[Dimension], config: SweepConfig) -> Proposer:
    """Return a search or a grid."""
    if config.proposer == "tpe":
        return Search(dimensions, config)
    settings = [dimension for dimension in dimensions if isinstance(dimension, Setting)]
    refuse(
        f"sweep.space.{dimension.key}: a grid needs a list of values, not a range. Set [a, b], or choose sweep=optuna."
        for dimension in dimensions
        if isinstance(dimension, Range)
    )
    combinations = as_read(itertools.product(*(setting.texts for setting in settings)), settings)
    relative = {setting.key for setting in settings if setting.is_relative}
    swept_keys = relative | {setting.key for setting in settings if setting.is_swept}
    return Grid(multiply_out(combinations, relative), swept_keys)


def identity_of(settings: Sequence[Setting], preset: Preset = NO_PRESET) -> str:
    """Return the hash of a sweep, independent of the number of trials of a search."""
    same: list[Any] = [
        [text.lstrip("+") for text in setting.texts] for setting in settings if setting.key not in _NOT_IN_IDENTITY
    ]
    config = preset.config
    if config.proposer == LADDER:  # without the claims of its source
        rungs = [[name, rung.overrides] for name, rung in config.rungs.items()]
        same += [config.base, config.full, config.small, config.size, rungs]
    elif preset.name:
        same.append({"proposer": config.proposer, "space": config.space, "trials": None, "seed": config.seed})
    return hashlib.sha256(json.dumps(same).encode()).hexdigest()


def default_path(settings: Sequence[Setting], preset: Preset = NO_PRESET) -> str:
    """Return the default folder, the same for the same command."""
    swept = (setting.key.rpartition(".")[2] for setting in settings if setting.is_swept)
    words = "-".join(filter(None, ("sweep", preset.name, *swept)))[:_MAX_FOLDER_CHARACTERS].rstrip("-")
    return f"runs/{words}-{identity_of(settings, preset)[:8]}"


def _read(overrides: Sequence[str]) -> tuple[Preset, list[Dimension], list[Setting]]:
    """Read all overrides; report all problems in one ConfigError."""
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
    """Return the run of each trial with `extra` overrides; report each problem once in one ConfigError."""
    wrong = wrong_overrides([*extra, *(text for trial in trials for text in trial.overrides)])
    runs: list[RunConfig] = []
    trials_of: dict[str, list[Trial]] = {}
    for trial in trials:
        if wrong.keys() & {*trial.overrides, *extra}:
            continue
        run = compose_or_error((*trial.overrides, *extra))
        if isinstance(run, RunConfig):
            runs.append(run)
        for problem in _problems(run, check_parts):
            trials_of.setdefault(problem, []).append(trial)
    problems = [problem for several in wrong.values() for problem in several]
    problems += [_with_trials(problem, by, len(trials)) for problem, by in trials_of.items()]
    refuse(dict.fromkeys(problems))
    return runs


def _checked_rungs(
    ladder: Ladder, extra: Sequence[str], check_parts: Callable[[RunConfig], None]
) -> Sequence[RunConfig]:
    """Return the runs of the valid rungs; the others are refused by name when their turn comes."""
    runs: dict[int, RunConfig] = {}
    problems: dict[int, Sequence[str]] = {}
    for trial in ladder.points:
        if trial.refused is None:
            try:
                (runs[trial.number],) = _checked_runs([trial], extra, check_parts)
            except ConfigError as fault:
                problems[trial.number] = fault.problems
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
    """Return a problem with its trials, unless all have it; points of a search space have no number."""
    if len(by) == trials:
        return problem
    if not by[0].number:
        return f"{problem} (with {describe(by[0].swept)})"
    others = f" and {len(by) - 1} more" if len(by) > 1 else ""
    return f"{problem} (trial {by[0].number}{others}: {describe(by[0].swept)})"


def _one_folder(runs: Sequence[RunConfig], override: str) -> str:
    """Return the folder of `output_dir`, which must not depend on swept settings."""
    places = sorted({run.output_dir for run in runs})
    if len(places) > 1:
        raise ConfigError(
            f"{override}: the folder differs between trials ({', '.join(places[:3])}). "
            "Set one folder for the whole sweep; each trial gets a subfolder."
        )
    return places[0]
