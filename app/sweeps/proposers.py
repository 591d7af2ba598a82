"""Proposers of trials: named rungs of a ladder, and optuna's TPE.

For optuna, sweep.json is the only state. The study is rebuilt for each trial: a study on disk could have a trial
that a killed sweep did not record, or a failure that a later start repaired.
"""

import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.config.conf_files import choices_by_group
from app.config.dataset import RANDOM, RANDOM_ROWS
from app.config.rules import is_unread, readers_of
from app.config.schema import RunConfig
from app.errors import ConfigError, refuse
from app.files import read_json
from app.sweeps.search_space import (
    GROUP,
    Dimension,
    Grid,
    Preset,
    Range,
    Setting,
    SweepConfig,
    as_read,
    compose_or_error,
    corners,
    multiply_out,
    parse_multiple,
    value_in,
    without_unread,
)
from app.sweeps.trials import DRY_RUN, FINISHED, Outcome, Trial, key_of, name_of, value_of
from app.tracking.output_dir import RunFolder, read_lines
from app.tracking.recorder import read_result

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution


LADDER = "rungs"  # the proposer of a ladder
_SMALL = "small"
_FIRST_STEADY_STEP = 3  # checks and measurements slow the first two
_CLOSE = 0.02  # largest relative difference of eval losses
_RESULT_KEYS = (
    *("steps", "seconds", "samples_per_second", "memory_predicted_bytes", "memory_measured_bytes"),
    *("device_used_bytes", "train_loss_last", "eval_loss", "accuracy"),
)
_LIMITS_OF_SPEED = ("max_sm_mhz", "power_limit_watts")  # in `clocks` of the manifest; other clocks vary with the load
_GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # CUDA, ROCm and WSL 2; torch is not loaded here


class Ladder(Grid):
    """Rungs of a preset as trials, and their comparison. base < rung < small < command line."""

    def __init__(self, preset: Preset, settings: Sequence[Setting]) -> None:
        refuse(_problems(preset, settings))
        config, digits = preset.config, len(str(len(preset.config.rungs)))
        small = config.small if config.size == _SMALL else []
        overrides = [text for setting in settings for text in setting.texts]
        unread = _unread_rows((*config.base, *small), overrides)
        self.name, self.source, self.rungs = preset.name, config.source, config.rungs
        self.points = []
        for number, (name, rung) in enumerate(self.rungs.items(), 1):
            # the last override of each key: Hydra refuses a group that is set twice
            strongest_last = (*config.base, *rung.overrides, *small, *overrides)
            texts = {key_of(text): text for text in strongest_last if text not in unread}
            folder = f"{number:0{digits}}-{name}"
            trial = Trial(number, tuple(texts.values()), tuple(rung.overrides), folder, refused=rung.reason)
            self.points.append(trial)
        if any(readers_of(key_of(text)) for text in overrides):
            self.points = _as_read(self.points, overrides)
        self.count = len(self.points)
        self._runs: Mapping[int, RunConfig] = {}

    def check(self, runs: Mapping[int, RunConfig], problems: Mapping[int, Sequence[str]]) -> None:
        """Store the runs of the valid rungs by number, and refuse the others with their problems."""
        if not runs:  # an error in the command or the file
            raise ConfigError(
                list(dict.fromkeys(problem for trial_problems in problems.values() for problem in trial_problems))
            )
        self._runs = runs
        refused = {number: "\n".join(trial_problems) for number, trial_problems in problems.items()}
        self.points = [replace(point, refused=refused.get(point.number, point.refused)) for point in self.points]

    def compared(self, outcomes: Sequence[Outcome]) -> dict[str, Any]:
        """Return `ladder` of sweep.json: the results of each rung, next to the claims of the source."""
        rungs: list[dict[str, Any]] = []
        for outcome, (name, rung) in zip(outcomes, self.rungs.items(), strict=True):
            run = self._runs.get(outcome.number)
            facts: dict[str, Any] = {
                "name": name,
                "batch": None if run is None else batch_text(run),
                "status": outcome.status,
            }
            facts |= {"error": outcome.error, "claimed": dict(rung.claimed)}
            if run is not None and outcome.status == FINISHED:
                facts |= _measured(run, Path(outcome.folder))
                first = rungs[0] if rungs else facts
                speed, base = facts["tokens_per_second"], first.get("tokens_per_second")  # without padding
                are_whole = not (facts["splits"] or first.get("splits"))
                ratio = speed / base if speed and base and are_whole else None
                facts |= {"ratio": ratio, "as_first": _as_first(facts, first)}
            rungs.append(facts)
        return {"source": self.source, "rungs": rungs}


def _unread_rows(preset: Sequence[str], overrides: Sequence[str]) -> set[str]:
    """Return the sizes of random rows in the preset that have no effect with the dataset of `overrides`."""
    texts = {key_of(text): text for text in (*preset, *overrides)}
    run = compose_or_error([text for key, text in texts.items() if not key.startswith(RANDOM_ROWS)])
    if isinstance(run, ConfigError):
        return set()
    return {text for text in preset if is_unread(run, key_of(text))}.difference(overrides)


def _as_read(rungs: Sequence[Trial], overrides: Sequence[str]) -> list[Trial]:
    """Return the rungs without `overrides` that only other rungs use; overrides used by none are refused by the run."""
    read = [{*without_unread(rung.overrides)} for rung in rungs]
    skipped = [{text for text in overrides if text not in used and text in set().union(*read)} for used in read]
    return [
        replace(rung, overrides=tuple(text for text in rung.overrides if text not in unread))
        for rung, unread in zip(rungs, skipped, strict=True)
    ]


def _problems(preset: Preset, settings: Sequence[Setting]) -> Iterator[str]:
    """Yield problems of settings that cannot be combined with rungs."""
    name, config = preset.name, preset.config
    differ = {key_of(text) for rung in config.rungs.values() for text in rung.overrides}
    if config.size == _SMALL and not config.small:
        yield f"{GROUP}.size=small: sweep={name} has no small sizes. Remove it."
    for key in differ.intersection(map(key_of, config.small)):
        yield f"sweep={name}: small sets {key}, which the rungs differ in. Remove it from conf/{GROUP}/{name}.yaml."
    for setting in settings:
        if setting.key in differ:
            yield (
                f"{setting.key} differs between the rungs of sweep={name}. Remove it, or edit a copy of "
                f"conf/{GROUP}/{name}.yaml with another name."
            )
        elif setting.is_swept:
            yield f"{setting.key} has several values, but the trials of sweep={name} are its rungs. Set one value."


def size_note(preset: Preset) -> list[str]:
    """Return a note on rungs of full size without a GPU."""
    has_gpu = any(Path(device).exists() for device in _GPU_DEVICES)
    if has_gpu or preset.config.size == _SMALL or not preset.config.small:
        return []
    return [
        f"{'note':8}full sizes without a GPU; small sizes: finetune train -m sweep={preset.name} {GROUP}.size=small"
    ]


def batch_text(run: RunConfig) -> str:
    """Return the micro-batch size (in rows if all have one length), times accumulation and processes if several."""
    batching, processes, data = run.batching, run.launch.num_processes, run.dataset
    size = str(batching.rows)
    if batching.packing:
        size = f"{batching.tokens} tokens"
        has_one_length = data.random.shortest is None and data.max_length <= data.random.length
        if data.path == RANDOM and not data.mix and has_one_length and isinstance(batching.tokens, int):
            rows, rest = divmod(batching.tokens, data.max_length)
            size = size if rest else str(rows)
    return " x ".join([size, str(batching.accumulation), *([] if processes == 1 else [str(processes)])])


def _measured(run: RunConfig, folder: Path) -> dict[str, Any]:
    """Return the results of a finished rung; None for missing numbers."""
    place = RunFolder(folder)
    result, metrics = read_result(folder), place.metrics
    manifest = read_json(place.manifest) if place.manifest.is_file() else {"counts": {"fill": None}}
    fill, clocks = manifest["counts"]["fill"], manifest.get("clocks") or {}
    states = sorted(folder.glob("checkpoints/step-*/state.json"))
    progress = read_json(states[-1])["progress"] if states else {}
    batching = run.batching
    size = batching.tokens if batching.packing else batching.rows
    return {
        **{key: result.get(key) for key in _RESULT_KEYS},
        "padding": None if fill is None else (1 - fill) or None,
        "tokens_per_second": _steady_tokens_per_second(read_lines(metrics) if metrics.is_file() else ()),
        "skipped_steps": progress.get("skipped_steps", 0),
        "splits": progress.get("depth", 0),
        "clocks": {name: clocks[name] for name in _LIMITS_OF_SPEED if name in clocks},
        "step": [batching.packing, size * batching.accumulation, run.launch.num_processes, run.optimizer.lr],
    }


def _steady_tokens_per_second(lines: Iterable[Mapping[str, Any]]) -> float | None:
    """Return the speed without the first two steps, from lines with total tokens and the time since the last line."""
    tokens, seconds = 0, 0.0
    before: Mapping[str, Any] = {"step": 0, "tokens": 0}
    for line in lines:
        if not line.get("seconds"):
            continue  # an evaluation
        if before["step"] >= _FIRST_STEADY_STEP - 1:
            tokens += line["tokens"] - before["tokens"]
            seconds += line["seconds"]
        before = line
    return tokens / seconds if seconds else None


def _as_first(rung: Mapping[str, Any], first: Mapping[str, Any]) -> str | None:
    """Compare losses with the first rung; return None if batch or rate differ, or the first did not finish."""
    if rung is first or rung["step"] != first.get("step"):
        return None
    if rung["train_loss_last"] == first["train_loss_last"]:
        return "equal"
    losses = rung["eval_loss"], first["eval_loss"]
    is_close = None not in losses and abs(losses[0] - losses[1]) <= _CLOSE * abs(losses[1])
    return "close" if is_close and not rung["skipped_steps"] else "no"


# ---- optuna search


STARTUP_TRIALS = 4  # random trials before TPE chooses; more would leave few of a dozen
_TRIAL_NUMBER_DIGITS = 3
_MAX_ATTEMPTS = 8  # to find an unused point; then the first unused one is taken


class Search:
    """Proposer of trials by TPE."""

    def __init__(self, dimensions: Sequence[Dimension], config: SweepConfig) -> None:
        self._fixed = tuple(d.texts[0] for d in dimensions if isinstance(d, Setting) and not d.is_swept)
        self._dimensions = [dimension for dimension in dimensions if dimension.is_swept]
        self._relative = {dimension.key for dimension in self._dimensions if dimension.is_relative}
        self._seed = config.seed
        self.count = int(min(config.trials, math.prod(map(_count, self._dimensions))))
        self._recalled: Sequence[Trial] = []
        combinations = as_read([(*self._fixed, *texts) for texts in corners(self._dimensions)], self._dimensions)
        self.points: Sequence[Trial] = [
            Trial(0, texts, self._swept(texts), "") for texts in multiply_out(combinations, self._relative)
        ]

    def recall(self, recorded: Sequence[Mapping[str, Any]], /) -> Sequence[Trial]:
        """Return the recorded trials as proposed, without dry runs."""
        started = [trial for trial in recorded if trial["status"] != DRY_RUN]
        if len(started) > self.count:
            raise ConfigError(
                f"sweep.trials={self.count}: this sweep has already started {len(started)} trials. "
                f"Set sweep.trials={len(started)} or more."
            )
        self._recalled = [self._recorded(trial) for trial in started]
        return self._recalled

    def next(self, ended: Sequence[Outcome], /) -> Trial | None:
        """Return the next trial, which depends only on the seed and the outcomes."""
        number = len(ended) + 1
        if number <= len(self._recalled):
            return self._recalled[number - 1]
        has_only_dry_runs = number > STARTUP_TRIALS and all(outcome.status == DRY_RUN for outcome in ended)
        if number > self.count or has_only_dry_runs:
            return None
        observed = [(outcome.proposed or {}, outcome.cost) for outcome in ended]
        first = self._first() if number == 1 else None
        return self._trial(number, first or suggest(self._dimensions, observed, seed=self._seed, number=number))

    def _trial(self, number: int, point: Mapping[str, Any]) -> Trial:
        texts = (d.text(point[d.key]) if isinstance(d, Range) else point[d.key] for d in self._dimensions)
        (overrides,) = multiply_out(as_read([(*self._fixed, *texts)], self._dimensions), self._relative)
        swept = self._swept(overrides)
        return Trial(number, overrides, swept, name_of(number, _TRIAL_NUMBER_DIGITS, swept), point)

    def _recorded(self, trial: Mapping[str, Any]) -> Trial:
        swept = tuple(trial["swept"])
        fixed = (text for text in self._fixed if key_of(text) not in self._relative)
        (overrides,) = as_read([(*fixed, *swept)], self._dimensions)
        return Trial(trial["number"], overrides, swept, Path(trial["folder"]).name, trial["proposed"])

    def _swept(self, overrides: tuple[str, ...]) -> tuple[str, ...]:
        keys = [dimension.key for dimension in self._dimensions]
        return tuple(text for text in overrides if key_of(text) in keys)

    def _first(self) -> Mapping[str, Any] | None:
        """Return the values of the run without the sweep, so that the best trial is never worse; None if outside."""
        run = compose_or_error(self._fixed)
        assert isinstance(run, RunConfig)
        point = {dimension.key: _run_value(dimension, run) for dimension in self._dimensions}
        return None if None in point.values() else point


def suggest(
    dimensions: Sequence[Dimension],
    observed: Sequence[tuple[Mapping[str, Any], float | None]],
    *,
    seed: int,
    number: int,
    startup: int = STARTUP_TRIALS,
) -> Mapping[str, Any]:
    """Return a value for each dimension; `observed` has earlier points with their objectives, None for a failure.

    Failures are reported to optuna as pruned, which TPE ranks last; it ignores failed trials and repeats them.
    """
    import optuna  # only here: slow to import
    from optuna.trial import TrialState, create_trial

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space = {dimension.key: _distribution(dimension) for dimension in dimensions}
    earlier = [
        create_trial(
            params=dict(point),
            distributions=space,
            value=objective,
            state=TrialState.PRUNED if objective is None else TrialState.COMPLETE,
        )
        for point, objective in observed
    ]
    used = [point for point, _ in observed]
    for attempt in range(_MAX_ATTEMPTS):
        digest = hashlib.sha256(f"{seed} {number} {attempt}".encode()).digest()
        sampler = optuna.samplers.TPESampler(seed=int.from_bytes(digest[:4], "big"), n_startup_trials=startup)
        study = optuna.create_study(direction="minimize", sampler=sampler)
        study.add_trials(earlier)
        params = study.ask(space).params
        point = {d.key: d.rounded(params[d.key]) if isinstance(d, Range) else params[d.key] for d in dimensions}
        if point not in used:
            return point
    keys = [dimension.key for dimension in dimensions]  # a continuous space has no used points
    every = (dict(zip(keys, values, strict=True)) for values in itertools.product(*map(_values, dimensions)))
    return next(point for point in every if point not in used)


def _distribution(dimension: Dimension) -> "BaseDistribution":
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(dimension, Setting):
        return CategoricalDistribution(dimension.texts)
    is_finite = math.isfinite(dimension.count)
    high = dimension.number(dimension.count - 1) if is_finite else dimension.high  # optuna warns of other ends of steps
    if dimension.is_whole:
        step = int(dimension.step or 1)
        return IntDistribution(int(dimension.low), int(high), log=dimension.log, step=step)
    return FloatDistribution(dimension.low, high, log=dimension.log, step=dimension.step)


def _count(dimension: Dimension) -> float:
    return len(dimension.texts) if isinstance(dimension, Setting) else dimension.count


def _values(dimension: Dimension) -> Sequence[Any]:
    return dimension.texts if isinstance(dimension, Setting) else [*map(dimension.number, range(int(dimension.count)))]


def _run_value(dimension: Dimension, run: RunConfig) -> Any:
    """Return the value of the run in the dimension; the first choice for a group, None if outside."""
    value = 1.0 if dimension.is_relative else value_in(run, dimension.key)
    if isinstance(dimension, Range):
        return value if value is not None and dimension.has(value) else None
    parse = (lambda text: parse_multiple(text.partition("=")[2])) if dimension.is_relative else value_of
    default = dimension.texts[0] if dimension.key in choices_by_group() else None
    return next((text for text in dimension.texts if parse(text) == value), default)
