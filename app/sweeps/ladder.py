"""Ladders: named rungs as trials, in turns, and their comparison with the first rung and the figures of a source."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from app.config.dataset import RANDOM, RANDOM_ROWS
from app.config.rules import is_unread, readers_of
from app.config.schema import RunConfig
from app.errors import ConfigError, refuse
from app.files import read_json
from app.sweeps.search_space import GROUP, Grid, Preset, Setting, compose_or_error, without_unread
from app.sweeps.trials import DRY_RUN, FAILED, FINISHED, PENDING, REFUSED, RUNNING, STOPPED, Outcome, Trial, key_of
from app.tracking.formatting import PHASES
from app.tracking.output_dir import RunFolder, read_lines
from app.tracking.recorder import read_result

LADDER = "rungs"  # the proposer of a ladder
_SMALL = "small"
_FIRST_STEADY_STEP = 3  # checks and measurements slow the first two
_CLOSE = 0.02  # largest relative difference of eval losses
_LEARNS = 0.02  # largest difference of accuracies
_MIN_SECONDS = 2.0  # of steady steps, for a speed that can be compared
_MAX_OTHERS_SHARE = 0.1  # of the CPU time of the machine
_MAX_OTHERS_BYTES = 1 << 30  # of GPU memory
_RESULT_KEYS = (
    *("steps", "seconds", *PHASES),
    *("memory_predicted_bytes", "memory_measured_bytes", "device_used_bytes"),
    *("gpu_utilization", "train_loss_last", "eval_loss", "accuracy", "exact_match"),
)
_MEDIAN_KEYS = (
    *("seconds", "compile_seconds", "steady_seconds", "tokens_per_second", "samples_per_second", "gpu_utilization"),
    *PHASES,
)
_STATUSES = (FAILED, REFUSED, FINISHED, RUNNING, STOPPED, PENDING, DRY_RUN)  # a rung has the first of any repeat
_LIMITS_OF_SPEED = ("max_sm_mhz", "power_limit_watts")  # in `clocks` of the manifest; other clocks vary with the load
_GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # CUDA, ROCm and WSL 2; torch is not loaded here
Results = Mapping[str, Any]  # of a rung, in `ladder` of sweep.json


class Ladder(Grid):
    """Rungs of a preset as trials, in turns. base < rung < full or small < command line.

    All rungs run once before any runs again, so that a change of the machine's speed affects all alike. `points` are
    the rungs of one turn.
    """

    def __init__(self, preset: Preset, settings: Sequence[Setting]) -> None:
        refuse(_problems(preset, settings))
        config, digits = preset.config, len(str(len(preset.config.rungs)))
        sizes = config.small if config.size == _SMALL else config.full
        overrides = [text for setting in settings for text in setting.texts]
        unread = _unread_rows((*config.base, *sizes), overrides)
        self.name, self.source, self.rungs = preset.name, config.source, config.rungs
        self.points = []
        for number, (name, rung) in enumerate(self.rungs.items(), 1):
            # the last override of each key: Hydra refuses a group that is set twice
            strongest_last = (*config.base, *rung.overrides, *sizes, *overrides)
            texts = {key_of(text): text for text in strongest_last if text not in unread}
            folder = f"{number:0{digits}}-{name}"
            trial = Trial(number, tuple(texts.values()), tuple(rung.overrides), folder, refused=rung.reason)
            self.points.append(trial)
        if any(readers_of(key_of(text)) for text in overrides):
            self.points = _as_read(self.points, overrides)
        self.count = len(self.points) * config.repeats
        self._runs: Mapping[int, RunConfig] = {}

    def recall(self, _recorded: Sequence[Mapping[str, Any]], /) -> Sequence[Trial]:
        return [self._trial(at) for at in range(self.count)]

    def next(self, ended: Sequence[Outcome], /) -> Trial | None:
        """Return the next trial; a refused rung is refused in later turns, and a dry run has one turn."""
        turn, place = divmod(len(ended), len(self.points))
        has_only_dry_runs = turn > 0 and all(outcome.status in (DRY_RUN, REFUSED) for outcome in ended)
        if len(ended) >= self.count or has_only_dry_runs:
            return None
        trial = self._trial(len(ended))
        if turn and ended[place].status == REFUSED:
            return replace(trial, refused=ended[place].error)
        return trial

    def _trial(self, at: int) -> Trial:
        turn, place = divmod(at, len(self.points))
        point = self.points[place]
        return replace(point, number=at + 1, name=f"{point.name}-{turn + 1}") if turn else point

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
        claims = [rung.claimed for rung in self.rungs.values()]
        for place, (name, rung) in enumerate(self.rungs.items()):
            run, repeats = self._runs.get(place + 1), outcomes[place :: len(self.points)]
            facts: dict[str, Any] = {
                "name": name,
                "batch": None if run is None else batch_text(run),
                "status": min((outcome.status for outcome in repeats), key=_STATUSES.index),
                "error": next((outcome.error for outcome in repeats if outcome.error), None),
                "claimed": dict(rung.claimed),
                "source_ratio": _quotient(rung.claimed, claims[0], "samples/s"),
                "source_memory_ratio": _quotient(rung.claimed, claims[0], "MB"),
            }
            finished = [outcome for outcome in repeats if outcome.status == FINISHED]
            if run is not None and finished:
                facts |= _repeated([_measured(run, outcome) for outcome in finished])
                facts |= {"no_ratio": _incomparable(facts)}
                facts |= _compared_with(rungs[0] if rungs else facts, facts)
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
    for key in differ.intersection(map(key_of, (*config.full, *config.small))):
        yield f"sweep={name}: a size sets {key}, which the rungs differ in. Remove it from conf/{GROUP}/{name}.yaml."
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


# ---- results of a rung


def _measured(run: RunConfig, outcome: Outcome) -> dict[str, Any]:
    """Return the results of a finished trial; None for missing numbers."""
    place = RunFolder(Path(outcome.folder))
    result = read_result(place.path)
    manifest = read_json(place.manifest) if place.manifest.is_file() else {}
    counts, clocks = manifest.get("counts", {}), manifest.get("clocks") or {}
    processes = manifest.get("choices", {}).get("processes", 1)
    cores = manifest.get("cpus") if manifest.get("hardware", {}).get("device") == "cpu" else None
    states = sorted(place.path.glob("checkpoints/step-*/state.json"))
    progress = read_json(states[-1])["progress"] if states else {}
    batching = run.batching
    size = batching.tokens if batching.packing else batching.rows
    fill = counts.get("fill")
    return {
        **{key: result.get(key) for key in _RESULT_KEYS},
        **_steady_speed(read_lines(place.metrics) if place.metrics.is_file() else ()),
        "compile_seconds": manifest.get("compile_seconds"),
        "padding": None if fill is None else (1 - fill) or None,
        "chance": _chance(counts.get("data", {})),
        "skipped_steps": progress.get("skipped_steps", 0),
        "splits": progress.get("depth", 0),
        "clocks": {name: clocks[name] for name in _LIMITS_OF_SPEED if name in clocks},
        **_others(result.get("other_processes") or {}, outcome.other_cpu_share or 0.0),
        "processes": processes,
        "shares_cores": cores is not None and processes > cores,
        "step": [batching.packing, size * batching.accumulation * processes, run.optimizer.lr],
    }


def _steady_speed(lines: Iterable[Mapping[str, Any]]) -> dict[str, float | None]:
    """Return the speed without the first two steps, from lines with total tokens and the time since the last line."""
    tokens, samples, seconds = 0, 0.0, 0.0
    before: Mapping[str, Any] = {"step": 0, "tokens": 0}
    for line in lines:
        if not line.get("seconds"):
            continue  # an evaluation
        if before["step"] >= _FIRST_STEADY_STEP - 1:
            tokens += line["tokens"] - before["tokens"]
            samples += line.get("samples_per_second", 0.0) * line["seconds"]
            seconds += line["seconds"]
        before = line
    return {
        "tokens_per_second": tokens / seconds if seconds else None,
        "samples_per_second": samples / seconds if samples else None,
        "steady_seconds": seconds or None,
    }


def _chance(data: Mapping[str, Any]) -> float | None:
    """Return the accuracy of a constant answer: the share of the largest class of the eval set."""
    classes = ((data.get("eval") or {}).get("classes") or {}).values()
    return max(classes) / sum(classes) if classes else None


def _repeated(repeats: Sequence[Results]) -> dict[str, Any]:
    """Return the results of a rung: medians of times and speeds, otherwise those of the first repeat."""
    facts = dict(repeats[0])
    for key in _MEDIAN_KEYS:
        values = [repeat[key] for repeat in repeats if repeat[key] is not None]
        facts[key] = median(values) if values else None
    speeds = [repeat["tokens_per_second"] for repeat in repeats if repeat["tokens_per_second"] is not None]
    return {
        **facts,
        "repeats": len(repeats),
        "spread": (max(speeds) - min(speeds)) / median(speeds) if len(speeds) > 1 else None,
        "splits": max(repeat["splits"] for repeat in repeats),
        "disturbances": list(dict.fromkeys(text for repeat in repeats for text in repeat["disturbances"])),
        "shares_gpu": any(repeat["shares_gpu"] for repeat in repeats),
    }


def _others(on_gpu: Mapping[str, int], cpu_share: float) -> dict[str, Any]:
    """Return whether other processes used the GPU of a trial, and remarks on programs next to it."""
    count, size = on_gpu.get("count", 0), on_gpu.get("bytes", 0)
    shares_gpu = count > 0 or size > _MAX_OTHERS_BYTES
    texts = [f"{count or 'other'} processes used {size / 1e9:.1f} GB of the same GPU"] if shares_gpu else []
    texts += [f"other programs used {cpu_share:.0%} of the CPU"] if cpu_share > _MAX_OTHERS_SHARE else []
    return {"shares_gpu": shares_gpu, "disturbances": texts}


def _compared_with(first: Results, rung: Results) -> dict[str, Any]:
    """Return the comparison of a rung with the first one."""
    speeds = rung["tokens_per_second"], first.get("tokens_per_second")  # without padding
    is_fair = all(speeds) and not (rung["no_ratio"] or first.get("no_ratio"))
    ratio = speeds[0] / speeds[1] if is_fair else None
    noise = max(rung["spread"] or 0.0, first.get("spread") or 0.0)
    memory = "device_used_bytes" if rung["device_used_bytes"] else "memory_measured_bytes"
    return {
        "ratio": ratio,
        "efficiency": ratio * first["processes"] / rung["processes"] if ratio and rung["processes"] > 1 else None,
        "is_noise": ratio is not None and rung is not first and abs(ratio - 1) < noise,
        "memory_ratio": _quotient(rung, first, memory),
        "as_first": _as_first(rung, first),
        "learns": _learns(rung, first),
    }


def _incomparable(rung: Results) -> str | None:
    """Return the reason why the speed of a rung is not compared."""
    if rung.get("splits"):
        return "out of memory, repeated in smaller parts"
    if (rung.get("steady_seconds") or 0.0) < _MIN_SECONDS:
        return f"less than {_MIN_SECONDS:g} s"
    if rung.get("shares_cores"):
        return "more processes than CPU cores"
    return "shared GPU" if rung.get("shares_gpu") else None


def _quotient(rung: Results, first: Results, key: str) -> float | None:
    value, base = rung.get(key), first.get(key)
    return value / base if isinstance(value, int | float) and isinstance(base, int | float) and base else None


def _learns(rung: Results, first: Results) -> str | None:
    """Return whether a rung learns as the first one does, not a constant answer; None without an accuracy."""
    accuracy, chance, goal = rung["accuracy"], rung["chance"], first.get("accuracy")
    if accuracy is None or chance is None or goal is None:
        return None
    return "yes" if accuracy >= goal - _LEARNS and accuracy > chance + _LEARNS else "no"


def _as_first(rung: Results, first: Results) -> str | None:
    """Compare losses with the first rung; return None if batch or rate differ, or the first did not finish."""
    if rung is first or rung["step"] != first.get("step"):
        return None
    if rung["train_loss_last"] == first["train_loss_last"]:
        return "equal"
    losses = rung["eval_loss"], first["eval_loss"]
    is_close = None not in losses and abs(losses[0] - losses[1]) <= _CLOSE * abs(losses[1])
    return "close" if is_close and not rung["skipped_steps"] else "no"
