"""Training loop: steps, evaluations, metrics, checkpoints and stops; profile of one step."""

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from app.adapters.adapters import CHECKED_STEPS, layers_without_gradient, require_gradient
from app.batch import Batch
from app.config.schema import RunConfig
from app.data.loader import Loader
from app.distributed.fsdp import local
from app.distributed.process_group import Runtime
from app.errors import TrainingError
from app.files import report_write_errors, write_json
from app.oom_retry import try_or_none
from app.safe_text import listed
from app.signals import START_ME_AGAIN, StopRequest
from app.tasks.table import counts_of
from app.tracking.formatting import align_columns
from app.tracking.recorder import Recorder
from app.training.checkpoint import Checkpoints, Progress
from app.training.eta import Eta
from app.training.gpu_usage import GpuMonitor
from app.training.memory import Measured
from app.training.mirror import Mirror
from app.training.phase_times import DATA, FORWARD, PhaseTimes
from app.training.rows import StepPlan
from app.training.scores import ALSO, finite, logged, score
from app.training.summary import split_message
from app.training.train_step import Stepper, StepResult

# Substrings of operation names; the first matching kind counts. Inductor's names mark pointwise operations (poi),
# reductions (red, per) and templates of a product (tem).
KINDS = {
    "own kernels": "app_kernels::",
    "collectives": "c10d:: nccl gloo fsdp::",
    "contractions": "::mm addmm bmm _mm matmul gemm gemv ::linear attention conv _tem_",
    "normalisations": "_norm softmax logsumexp cross_entropy nll_loss _red_ _per_ ::mean ::sum ::var ::amax",
    "element-wise": "add sub mul div neg pow sqrt lerp ::exp ::log ::sin ::cos where masked_fill clamp silu gelu relu "
    "sigmoid tanh dropout bernoulli _poi_ cpp_fused _fused_ optimizer_update quantize",
    "copies": "copy ::cat stack clone fill_ zero_ index gather scatter embedding slice_",
}
OTHER = "other"
BETWEEN = "between operations"  # Python on a CPU; idle time of a GPU
_SHOWN_NAMES = 3  # of a kind


def kind_of(name: str) -> str:
    """Return the kind of an operation by its name."""
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts.split())), OTHER)


def profiled(
    number: int, step: Callable[[], StepResult], runtime: Runtime, recorder: Recorder
) -> tuple[StepResult, float]:
    """Run a step under the profiler and record its time by kind of operation; also return the total seconds.

    The kinds sum to the duration of the step.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise it writes to stderr
    wait: Callable[[], object] = torch.cuda.synchronize if runtime.device.type == "cuda" else lambda: None
    wait()  # for earlier steps
    started = time.perf_counter()
    with runtime.accelerator.profile() as profiler:
        step_started = time.perf_counter()
        result = step()
        wait()
        seconds = time.perf_counter() - step_started
    operations = operations_of(profiler, on_gpu=runtime.device.type == "cuda")
    kinds = {kind: sum(row["seconds"] for row in operations if row["kind"] == kind) for kind in (*KINDS, OTHER)}
    busy = sum(kinds.values())  # more than the step if threads or streams run in parallel
    kinds[BETWEEN] = max(0.0, seconds - busy)
    facts = {"seconds": busy + kinds[BETWEEN], "kinds": kinds, "operations": operations}
    write_json(recorder.folder.profile, {"step": number, "device": runtime.device.type, **facts})
    trace = recorder.folder.trace
    with report_write_errors(trace):
        partial = trace.with_name(f".{trace.name}.partial")
        profiler.export_chrome_trace(str(partial))
        partial.replace(trace)
    recorder.message(_table(f"profile of step {number}", facts))
    return result, time.perf_counter() - started


def operations_of(profiler: Any, *, on_gpu: bool) -> list[dict[str, Any]]:
    """Return the self time of operations, on a GPU that of their kernels, slowest first."""
    operations, of_device = list[tuple[str, int, float]](), 0.0
    for event in profiler.key_averages():
        if event.device_type.name == "CPU":
            seconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
            operations.append((event.key, event.count, seconds))
        elif not event.is_user_annotation:
            of_device += event.self_device_time_total
    if on_gpu:
        operations.append(("launched by no operation", 1, of_device - sum(took for *_, took in operations)))
    return [
        {"name": name, "kind": kind_of(name), "calls": calls, "seconds": took / 1e6}
        for name, calls, took in sorted(operations, key=lambda operation: -operation[2])
        if took > 0
    ]


def _table(title: str, facts: Mapping[str, Any]) -> str:
    rows = [(title, "seconds", "share", "top operations")]
    for kind, seconds in sorted(facts["kinds"].items(), key=lambda item: -item[1]):
        names = [row["name"].removeprefix("aten::") for row in facts["operations"] if row["kind"] == kind]
        if seconds:
            rows.append((kind, f"{seconds:.4f}", f"{seconds / facts['seconds']:.1%}", ", ".join(names[:_SHOWN_NAMES])))
    return align_columns([*rows, ("all", f"{facts['seconds']:.4f}", "", "")])


# ---- trainer


@dataclass(frozen=True, slots=True)
class Parts:
    """Components of the trainer."""

    config: RunConfig
    runtime: Runtime
    gpu: GpuMonitor
    plan: StepPlan
    loader: Loader
    eval_batches: Callable[[], Iterable[Batch]] | None
    stepper: Stepper
    learning_rate: Callable[[int], float]
    checkpoints: Checkpoints
    recorder: Recorder
    show_samples: Callable[[int], None]
    also_batches: Callable[[], Iterable[Batch]] | None = None  # of `eval.also`
    mirror: Mirror | None = None  # of rank 0

    def score(self, batches: Iterable[Batch]) -> dict[str, float]:
        """Score eval batches on all processes together."""
        self.stepper.forget_gradients()
        return score(self.stepper.model, batches, self.runtime, counts_of(self.config), self.stepper.split_depth)

    def try_evaluation(self) -> bool:
        """Score the first batch, which has the longest rows; return False without an eval set."""
        if self.eval_batches is None:
            return False
        self.score(islice(self.eval_batches(), 1))
        return True


@dataclass(slots=True)
class _Window:
    """Counts since the last line of metrics.jsonl."""

    started: float = field(default_factory=time.perf_counter)
    tokens: int = 0
    samples: int = 0


class Prefetch:
    """Prepares the micro-batches of the next step in pinned memory while the device is busy.

    From pageable memory the host would wait for all queued work at the first copy of each step. A separate stream
    would not help: a micro-batch is some hundred kilobytes of ids, a hundred-thousandth of the step.
    """

    def __init__(self, make: Callable[[int], list[Batch]], device: torch.device) -> None:
        self._make = make  # a pure function of the step, so an unused result can be dropped
        self._pins = device.type == "cuda"
        self.ready: tuple[int, list[Batch]] | None = None

    def batches(self, step: int) -> list[Batch]:
        ready, self.ready = self.ready, None
        return ready[1] if ready is not None and ready[0] == step else self._pinned_batches(step)

    def prepare(self, step: int) -> None:
        self.ready = step, self._pinned_batches(step)

    def _pinned_batches(self, step: int) -> list[Batch]:
        batches = self._make(step)
        pinned = try_or_none(lambda: [batch.pinned() for batch in batches]) if self._pins else None
        return batches if pinned is None else pinned  # pinning may fail if host memory is short


class Trainer:
    """Runs from `progress` to the end of the plan or a stop request."""

    def __init__(self, parts: Parts, progress: Progress) -> None:
        self.parts = parts
        self._config = parts.config
        self.progress = progress
        self.prefetch = Prefetch(parts.loader.batches, parts.runtime.device)
        self._window = _Window()
        run, plan, stop = parts.config, parts.plan, parts.config.training.stop_after
        end = stop if stop is not None and progress.step < stop < plan.steps else plan.steps
        evaluations = {} if parts.eval_batches is None else {"evaluation": plan.every(run.eval.every)}
        self._eta = Eta(end, {**evaluations, "save": plan.every(run.checkpoint.every)})
        self._tokens, self._samples, self._seconds = 0, 0, 0.0  # in metrics.jsonl, since this start
        self.stopped_by: int | None = None  # the requested exit code
        self.memory = Measured(parts.runtime, parts.plan.steps - progress.step)
        self.times = PhaseTimes(parts.runtime.device)
        parts.stepper.on_phase = self.times.enter
        self._updates = progress.step - progress.skipped_steps  # counted while gradients are checked
        self.skipped: list[Tensor] = []  # flags on the device: reading one waits for all queued work

    @property
    def speed(self) -> dict[str, float]:
        """The speed of this start, without evaluations, answers and saves; empty if no step was left."""
        return _speed(self._tokens, self._samples, self._seconds) if self._seconds else {}

    def fit(self, request: StopRequest) -> bool:
        """Train; return True at the end of the run, False after a stop request and a saved checkpoint."""
        config, progress = self._config, self.progress
        if progress.step == 0:
            self._evaluate_at_start()
        self._window.started = time.perf_counter()  # excludes answers before the first step
        while not self._has_ended():
            result = self.take_step()
            if progress.step == config.training.stop_after:
                request.exit_code = START_ME_AGAIN
            must_stop = self._is_stop_requested(request)
            due = self._due(config.record.every) or self._due(config.eval.every)
            if must_stop or due or self._at_end() or progress.step == 1:
                self._report(result)
            improved = self._evaluate_if_due()
            ended = self._has_ended()
            to_keep = improved and config.checkpoint.final == "best"
            if must_stop or ended or to_keep or self._due(config.checkpoint.every):
                self._save()
            if must_stop or ended:
                return ended
        return True

    def _is_stop_requested(self, request: StopRequest) -> bool:
        """Return whether any process got a stop signal: all must stop after the same step."""
        code = int(self.parts.runtime.host_group.max(request.exit_code or 0))
        self.stopped_by = code or None
        return code > 0

    def take_step(self) -> StepResult:
        step, times = self.progress.step, self.times
        lr = self.parts.learning_rate(step)
        times.enter(DATA)
        batches, stepper, runtime = self.prefetch.batches(step), self.parts.stepper, self.parts.runtime
        times.enter(FORWARD)
        is_profiled = step + 1 == self._config.training.profile_step and runtime.rank == 0
        if is_profiled:
            result, seconds = profiled(step + 1, partial(stepper.run, batches, lr), runtime, self.parts.recorder)
            self._window.started += seconds
        else:
            result = self.memory.run(stepper, batches, lr)
            self._window.tokens += result.tokens
            self._window.samples += result.samples
        self.progress.step += 1
        times.enter(DATA)
        if not self._at_end():
            self.prefetch.prepare(step + 1)  # before a line of metrics waits for the device
        is_repeated = stepper.split_depth > self.progress.depth
        times.end_step(counts=not (is_profiled or is_repeated))
        if self.parts.gpu.note_stage("first_step"):
            self.parts.recorder.add_facts(device_used_bytes=self.parts.gpu.stages)
        self.progress.tokens += result.tokens
        self.progress.trained_tokens += result.labels
        self.skipped.append(result.skipped)
        self._note_split(stepper.split_depth)
        if self._updates < CHECKED_STEPS and not bool(result.skipped):
            self._updates += 1
            self._check_gradients()
        return result

    def _note_split(self, depth: int) -> None:
        if depth > self.progress.depth:
            self.parts.recorder.message(split_message(self.progress.step, depth))
        self.progress.depth = depth

    def _check_gradients(self) -> None:
        """Stop in the first steps if an adapter gets no gradient."""
        trained = self.parts.stepper.model.trained().items()
        gradients = {name: None if parameter.grad is None else local(parameter.grad) for name, parameter in trained}
        layers = layers_without_gradient(self._config.adapter, gradients, self._updates)
        of_all = [set(names) for names in self.parts.runtime.host_group.all_gather_object(layers)]
        # their rows may be on other ranks
        require_gradient([name for name in layers if all(name in names for names in of_all)])

    def _due(self, interval: int | str) -> bool:
        every = self.parts.plan.every(interval)
        return every > 0 and self.progress.step % every == 0

    def _at_end(self) -> bool:
        return self.progress.step >= self.parts.plan.steps

    def _has_ended(self) -> bool:
        """Return whether all steps are done or early stopping (eval.patience) has ended the run."""
        return self._at_end() or 0 < self._config.eval.patience <= self.progress.evals_without_gain

    def _evaluate_at_start(self) -> None:
        """Score the eval set and answer prompts before the first step; this is never the best evaluation."""
        at_start, every = self._config.eval.at_start, self._config.eval.every
        if self.parts.eval_batches is not None and (every != 0 if at_start == "auto" else at_start):
            self.progress.start_metrics = finite(self._evaluated(self.parts.eval_batches))
        else:
            self.parts.show_samples(0)

    def _evaluate_if_due(self) -> bool:
        batches = self.parts.eval_batches
        if batches is None or not (self._at_end() or self._due(self._config.eval.every)):
            return False
        metrics = self._evaluated(batches)
        return self.progress.note_eval(metrics, self._config.eval.min_delta, self._config.eval.objective)

    def _evaluated(self, batches: Callable[[], Iterable[Batch]]) -> dict[str, float]:
        """Record and return the eval metrics; the time does not count as training."""
        parts, step = self.parts, self.progress.step
        started = time.perf_counter()
        metrics = parts.score(batches())
        if parts.also_batches is not None:
            metrics |= {f"{ALSO}{key}": value for key, value in parts.score(parts.also_batches()).items()}
        parts.recorder.evaluation({"step": step, "epoch": parts.plan.epoch(step), **logged(metrics)})
        parts.show_samples(step)
        seconds = time.perf_counter() - started
        self._eta.add_pause("evaluation", seconds)
        self._window.started += seconds
        return metrics

    def _report(self, result: StepResult) -> None:
        """Write a line of metrics.jsonl, for which the host waits for the device."""
        runtime, progress = self.parts.runtime, self.progress
        self._count_skipped()
        sums = [float(tensor) for tensor in (result.loss_sum, result.router_sum) if tensor is not None]
        loss, *routers = map(result.mean, runtime.host_group.totals(sums))
        seconds = time.perf_counter() - self._window.started
        self._tokens += self._window.tokens
        self._samples += self._window.samples
        self._seconds += seconds
        progress.first_loss = loss if progress.first_loss is None else progress.first_loss
        progress.last_loss = loss
        self.parts.recorder.step(
            {
                "step": progress.step,
                "epoch": self.parts.plan.epoch(progress.step),
                "loss": loss,
                **({"router_loss": routers[0]} if routers else {}),
                "lr": self.parts.learning_rate(progress.step - 1),
                "grad_norm": float(result.grad_norm),
                "tokens": progress.tokens,
                "trained_tokens": progress.trained_tokens,
                **(_speed(self._window.tokens, self._window.samples, seconds) if self._window.tokens else {}),
                **self.times.since_last_line(),
                "peak_memory_bytes": int(runtime.host_group.max(runtime.peak_memory_bytes())),
                **(self.parts.gpu.line(runtime.host_group) if runtime.device.type == "cuda" else {}),
            },
            self._eta.seconds_left(progress.step),
        )
        self._window = _Window()

    def _count_skipped(self) -> None:
        """Report the rows of skipped steps; stop after too many consecutive ones."""
        flags = [bool(flag) for flag in self.skipped]
        self.skipped.clear()
        for step, skipped in enumerate(flags, self.progress.step - len(flags)):
            self.progress.skipped_in_a_row = self.progress.skipped_in_a_row + 1 if skipped else 0
            if skipped:
                self.progress.skipped_steps += 1
                rows = listed(self.parts.loader.source_locations(step), 8)
                self.parts.recorder.message(f"step {step + 1} {self.parts.stepper.skipping}. Rows: {rows}")
        scale = self.parts.stepper.scale
        scale_can_fall = scale is not None and float(scale.value) > 1.0
        if self.progress.skipped_in_a_row >= self._config.training.max_bad_steps and not scale_can_fall:
            raise TrainingError(
                f"Stopped: {self.progress.skipped_in_a_row} consecutive steps with NaN/Inf gradients (last: step "
                f"{self.progress.step}). Try a lower optimizer.lr or precision=fp32; earlier checkpoints are kept."
            )

    def _save(self) -> None:
        started = time.perf_counter()
        self._count_skipped()
        self.parts.recorder.sync()
        host_group = self.parts.runtime.host_group
        self._note_split(int(host_group.max(self.parts.stepper.split_depth)))  # for the next step
        for remark in self.parts.checkpoints.save(self.progress, self.parts.stepper, host_group):
            self.parts.recorder.message(remark)
        for remark in self.parts.mirror.update() if self.parts.mirror else ():
            self.parts.recorder.message(remark)
        seconds = time.perf_counter() - started
        self._eta.add_pause("save", seconds)
        self._window.started += seconds


def _speed(tokens: int, samples: int, seconds: float) -> dict[str, float]:
    return {"tokens_per_second": tokens / seconds, "samples_per_second": samples / seconds, "seconds": seconds}
