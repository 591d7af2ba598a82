"""The training loop: steps, and what happens between them."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from app.batch import Batch
from app.config.schema import CheckpointConfig, EvalConfig, TrainingConfig
from app.data.loader import Loader
from app.distributed.process_group import Runtime
from app.errors import TrainingError
from app.model.checks import LAST_CHECKED_STEP, layers_without_gradient
from app.signals import START_ME_AGAIN, StopRequest
from app.training.ahead import Ahead
from app.training.checkpoint import Checkpoints
from app.training.eta import Course, Pace
from app.training.memory import Measured
from app.training.progress import Progress
from app.training.scores import Scores, score
from app.training.steps import StepPlan
from app.training.train_step import Stepper, StepResult


class Journal(Protocol):
    """What the loop tells the record."""

    def message(self, text: str) -> None:
        """A remark for whoever watches."""

    def step(self, values: dict[str, float | int], seconds_left: float | None) -> None:
        """A line of metrics, and how long the rest takes."""

    def evaluation(self, values: dict[str, float | int]) -> None:
        """A line of an evaluation."""

    def sync(self) -> None:
        """All lines onto the disk."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What the command assembled."""

    runtime: Runtime
    plan: StepPlan
    loader: Loader
    eval_batches: Callable[[], Iterable[Batch]] | None
    stepper: Stepper
    learning_rate: Callable[[int], float]
    checkpoints: Checkpoints
    journal: Journal
    show_samples: Callable[[int], None]
    classes: int = 0  # of a classification
    answers: bool = False  # whether trained are answers, which an evaluation can find right as a whole
    eval_size: float = 0.0  # tokens of an evaluation over those of a step


@dataclass(frozen=True, slots=True)
class Rhythm:
    """The sections of the config that say how often things happen."""

    training: TrainingConfig
    eval: EvalConfig
    checkpoint: CheckpointConfig
    record_every: int


@dataclass(slots=True)
class _Window:
    """What has been measured since the last line of metrics."""

    started: float = field(default_factory=time.perf_counter)
    tokens: int = 0


class Loop:
    """Runs from `progress` to the end of the plan, or until asked to stop."""

    def __init__(self, parts: Parts, rhythm: Rhythm, progress: Progress) -> None:
        self.parts = parts
        self._rhythm = rhythm
        self.progress = progress
        self._ahead = Ahead(parts.loader.batches, parts.runtime.device)
        self._window = _Window()
        self._pace = Pace(_course(parts, rhythm, progress))
        self._tokens, self._seconds = 0, 0.0
        self.scores: Scores | None = None  # of the last evaluation of this start
        self.stopped_by: int | None = None  # the exit code that was asked for
        self.memory = Measured(parts.runtime, parts.plan.steps - progress.step)
        # steps that changed something, as far as flow is checked
        self._made = progress.step - progress.skipped_steps
        self._skipped: list[Tensor] = []  # flags that nobody has read yet: reading them waits for the device

    @property
    def tokens_per_second(self) -> float:
        """Of training since this start; evaluations, samples and saves excluded."""
        return self._tokens / self._seconds if self._seconds else 0.0

    def fit(self, request: StopRequest) -> bool:
        """True when the run came to its end, false when it was asked to stop and has saved."""
        while self.progress.step < self.parts.plan.steps:
            result = self._step()
            if self.progress.step == self._rhythm.training.stop_after:
                request.exit_code = START_ME_AGAIN
            asked = self._is_asked_to_stop(request)
            if asked or self._should_report():
                self._report(result)
            improved = self._evaluate_if_due()
            ended = self._at_end() or self._out_of_patience()
            if asked or ended or self._should_save(improved):
                self._save()
            if asked or ended:
                return ended
        return True

    def _is_asked_to_stop(self, request: StopRequest) -> bool:
        """Whether any process was: signals reach them at different times, and all must stop after the same step."""
        code = int(self.parts.runtime.peers.highest(request.exit_code or 0))
        self.stopped_by = code or None
        return code > 0

    def _step(self) -> StepResult:
        at = self.progress.step
        lr = self.parts.learning_rate(at)
        result = self.memory.run(self.parts.stepper, self._ahead.batches(at), lr)
        self.progress.step = at + 1
        if not self._at_end():
            self._ahead.prepare(at + 1)  # before anybody waits for the device
        self.progress.tokens += result.tokens
        self.progress.trained_tokens += result.labels
        self._window.tokens += result.tokens
        self._skipped.append(result.skipped)
        self._tell_splits(self.parts.stepper.depth)
        if self._made < LAST_CHECKED_STEP and not bool(result.skipped):
            self._made += 1
            self._check_flow()
        return result

    def _tell_splits(self, depth: int) -> None:
        if depth > self.progress.depth:
            self.parts.journal.message(
                f"step {self.progress.step}: out of memory, so micro-batches are split by documents from here on, into "
                f"up to {2**depth} parts. The gradient is the same, nothing is left out. A smaller batching.tokens "
                "(or batching.rows) with more batching.accumulation is faster"
            )
        self.progress.depth = depth

    def _check_flow(self) -> None:
        """In the first steps: an adapter that gets no gradient is told now, not after the run."""
        found = layers_without_gradient(self.parts.stepper.own_gradients(), self._made)
        of_all = [set(each) for each in self.parts.runtime.peers.collected(found)]
        silent = [name for name in found if all(name in each for each in of_all)]  # others may have its rows
        if silent:
            shown = ", ".join(silent[:3]) + (f" and {len(silent) - 3} more" if len(silent) > 3 else "")
            raise TrainingError(
                f"no gradient reaches the adapter of {shown}, so it would never learn. "
                "Leave these layers out of adapter.targets."
            )

    def _due(self, every: int) -> bool:
        return every > 0 and self.progress.step % every == 0

    def _at_end(self) -> bool:
        return self.progress.step >= self.parts.plan.steps

    def _out_of_patience(self) -> bool:
        patience = self._rhythm.eval.patience
        return patience > 0 and self.progress.evals_without_gain >= patience

    def _should_report(self) -> bool:
        """The first and the last step, and beside each evaluation."""
        due = self._due(self._rhythm.record_every) or self._due(self._rhythm.eval.every)
        return due or self._at_end() or self.progress.step == 1

    def _should_save(self, improved: bool) -> bool:
        return self._due(self._rhythm.checkpoint.every) or (
            improved and self._rhythm.checkpoint.final == "best"
        )

    def _evaluate_if_due(self) -> bool:
        parts, step = self.parts, self.progress.step
        if parts.eval_batches is None or not (self._at_end() or self._due(self._rhythm.eval.every)):
            return False
        started = time.perf_counter()
        parts.stepper.forget_gradients()
        stepper, batches = parts.stepper, parts.eval_batches()
        of_whom: dict[str, Any] = {"answers": parts.answers, "classes": parts.classes, "depth": stepper.depth}
        scores = score(stepper.trainee, batches, parts.runtime, **of_whom)
        self.scores = scores
        improved = self.progress.note_eval(scores.loss, self._rhythm.eval.min_delta)
        parts.journal.evaluation({"step": step, "epoch": parts.plan.epoch(step), **scores.line()})
        parts.show_samples(step)
        seconds = time.perf_counter() - started
        self._pace.evaluated(seconds)
        self._window.started += seconds  # training speed is of training
        return improved

    def _report(self, result: StepResult) -> None:
        """The only place where the host waits for the device."""
        runtime, progress = self.parts.runtime, self.progress
        self._count_skipped()
        loss = result.mean(runtime.peers.totals([float(result.loss_sum)])[0])
        seconds = time.perf_counter() - self._window.started
        self._tokens += self._window.tokens
        self._seconds += seconds
        progress.first_loss = loss if progress.first_loss is None else progress.first_loss
        progress.last_loss = loss
        self.parts.journal.step(
            {
                "step": progress.step,
                "epoch": self.parts.plan.epoch(progress.step),
                "loss": loss,
                "lr": self.parts.learning_rate(progress.step - 1),
                "grad_norm": float(result.grad_norm),
                "tokens": progress.tokens,
                "trained_tokens": progress.trained_tokens,
                "tokens_per_second": self._window.tokens / seconds,
                "peak_memory_bytes": int(runtime.peers.highest(runtime.peak_memory_bytes())),
            },
            self._pace.seconds_left(progress.step),
        )
        self._window = _Window()

    def _count_skipped(self) -> None:
        """Name the rows of steps whose gradient was not finite; stop when they do not end."""
        flags = [bool(flag) for flag in self._skipped]
        self._skipped.clear()
        for step, skipped in enumerate(flags, self.progress.step - len(flags)):
            self.progress.skipped_in_a_row = self.progress.skipped_in_a_row + 1 if skipped else 0
            if skipped:
                self.progress.skipped_steps += 1
                places = self.parts.loader.source_locations(step)
                shown = ", ".join(places[:8]) + (f" and {len(places) - 8} more" if len(places) > 8 else "")
                self.parts.journal.message(
                    f"step {step + 1} {self.parts.stepper.skipping}. Its rows: {shown}"
                )
        if (
            self.progress.skipped_in_a_row >= self._rhythm.training.max_bad_steps
            and not self._scale_can_fall()
        ):
            raise TrainingError(
                f"{self.progress.skipped_in_a_row} gradients in a row were not finite, up to step "
                f"{self.progress.step}. Lower optimizer.lr, or try precision=fp32; checkpoints before it are kept."
            )

    def _scale_can_fall(self) -> bool:
        scale = self.parts.stepper.scale
        return scale is not None and float(scale.value) > 1.0

    def _save(self) -> None:
        started = time.perf_counter()
        self._count_skipped()
        self.parts.journal.sync()
        peers = self.parts.runtime.peers
        self._tell_splits(int(peers.highest(self.parts.stepper.depth)))  # what the next step will begin with
        self.parts.checkpoints.save(self.progress, self.parts.stepper, peers)
        seconds = time.perf_counter() - started
        self._pace.saved(seconds, planned=self._at_end() or self._due(self._rhythm.checkpoint.every))
        self._window.started += seconds


def _course(parts: Parts, rhythm: Rhythm, progress: Progress) -> Course:
    """Of this start: it may be told to stop before the end of the run."""
    total, stop = parts.plan.steps, rhythm.training.stop_after
    end = stop if stop is not None and progress.step < stop < total else total
    return Course(
        end=end,
        eval_every=rhythm.eval.every,
        save_every=rhythm.checkpoint.every,
        evaluates=parts.eval_batches is not None,
        evaluates_at_end=end == total,
        eval_size=parts.eval_size,
    )
