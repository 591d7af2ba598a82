"""One optimizer step: the gradient of the weighted mean over all trained tokens, independent of their split.

With `optimizer.in_backward`, all gradients together take the memory of one. In return they cannot be clipped to a
common norm, accumulated over micro-batches or processes, or recomputed once the first weight has changed.

The rehearsal before the first step finds OOM early, instead of in step 3,000, in the first evaluation or after a
resume. Only recomputed layers and the split depth of micro-batches may change: weights, optimizer states and random
numbers are unchanged.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from app.batch import Batch
from app.config.schema import OptimizerConfig, TrainingConfig
from app.distributed.gradient_reduction import GradientReduction
from app.distributed.process_group import Runtime
from app.errors import ConfigError
from app.model.training_model import TrainingModel
from app.oom_retry import RetryOnRestart, halve, out_of_memory_error, split_batch, try_or_none
from app.optim.optimizer_state import allocate_states, drop_states
from app.optim.optimizers import (
    LR_FACTOR,
    LossScale,
    OneByOne,
    skips_on_device,
    squares,
    step_unless,
    steps_in_backward,
)
from app.training.scores import with_step_mean
from app.training.storage_counter import kept_bytes


def require_gradients_one_by_one(optimizer: OptimizerConfig, processes: int, precision: str) -> None:
    """Raise for settings that need all gradients before a step: several processes, the loss scale of fp16."""
    if not optimizer.in_backward or (processes == 1 and precision != "fp16"):
        return
    conflict, remedy = (
        ("fp16", "precision=fp32") if processes == 1 else (f"{processes} processes", "launch.num_processes=1")
    )
    raise ConfigError(
        f"optimizer.in_backward=true is not supported with {conflict}: it updates each weight before all gradients "
        f"are computed. Set optimizer.in_backward=false, or {remedy}."
    )


class InBackward(GradientReduction):
    """Update of each weight of a single process when its gradient is complete, which is then freed."""

    skipping = "partly skipped: non-finite gradient, other weights were already updated"

    def __init__(self, parameters: Sequence[nn.Parameter], optimizer: OneByOne) -> None:
        super().__init__(parameters)
        self._optimizer = optimizer
        self._skips_on_device = skips_on_device(optimizer)
        self._norms: dict[nn.Parameter, Tensor] = {}  # of the gradients used in this step, on the device
        self._last = False
        self._is_rehearsal = False
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._arrived)

    @property
    def together(self) -> list[Sequence[nn.Parameter]]:
        return [[parameter] for parameter in self.stepped]

    def begin(self) -> None:
        """Drop all gradients; raise if weights have already changed, because the passes cannot be repeated."""
        self._last = False
        super().begin()
        if self._norms:
            raise out_of_memory_error(
                "the rest of a backward pass that has already updated weights and so cannot be repeated in smaller "
                "parts, as with optimizer.in_backward=false,",
                {},
            )

    def last_loss(self, loss: Tensor) -> Tensor:
        self._last = True  # its backward pass completes the gradients
        return loss

    def finish(self) -> None:
        """Use gradients of earlier parts without a contribution of the last part."""
        for parameter in self.stepped:
            if parameter.grad is not None:
                self._step_one(parameter)

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        self._is_rehearsal = True
        try:
            yield
        finally:
            self._is_rehearsal = False

    def apply(self, update: Callable[[list[Tensor]], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        self._optimizer.step()  # without gradients it only counts the step
        norms = [self._norms[parameter] for parameter in self.stepped if parameter in self._norms]
        self._norms.clear()
        norm = torch.stack(norms).square().sum().sqrt()
        return norm, ~torch.isfinite(norm)

    def _arrived(self, parameter: nn.Parameter) -> None:
        if self._last:
            self._step_one(parameter)

    @torch.no_grad()
    def _step_one(self, parameter: nn.Parameter) -> None:
        """Step one parameter, unless its gradient is not finite; others may already be stepped."""
        if self._is_rehearsal:
            parameter.grad = None
            return
        assert parameter.grad is not None
        norm = torch.linalg.vector_norm(parameter.grad, dtype=torch.float64)
        self._norms[parameter] = norm
        skipped = ~norm.isfinite()
        if self._skips_on_device:
            self._optimizer.step_one(parameter, skipped.float())
        elif not bool(skipped):
            self._optimizer.step_one(parameter)
        parameter.grad = None


# ---- train step


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a step; tensors stay on the device until a line of metrics is written."""

    loss_sum: Tensor  # of this process
    grad_norm: Tensor
    skipped: Tensor  # true if the gradient was not finite, so the weights did not change
    labels: int  # over all processes
    tokens: int
    samples: int  # data rows: a pair counts once, each piece of a split text once
    weight: float  # sum of the label weights: the number of labels if all weights are 1
    router_sum: Tensor | None = None  # as `loss_sum`, of a mixture's routers

    def mean(self, loss_sum: float) -> float:
        """Return the weighted mean, from the loss sum over all processes."""
        return loss_sum / (self.weight or 1.0)


class Stepper:
    """Runs optimizer steps. `scale` is the loss scale of fp16, else None."""

    def __init__(
        self,
        model: TrainingModel,
        optimizer: torch.optim.Optimizer,
        runtime: Runtime,
        clip: float,
        *,
        fp16: bool,
        reduction: GradientReduction | None = None,  # None: a single process
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.scale = LossScale(runtime.device) if fp16 else None
        self._runtime = runtime
        self._clip = clip
        self._parameters = list(model.trained().values())
        self._skips_on_device = skips_on_device(optimizer)
        self._reduction = reduction or GradientReduction(self._parameters)
        if steps_in_backward(optimizer):
            self._reduction = InBackward(self._parameters, optimizer)
        self.skipping = self._reduction.skipping
        self.split_depth = 0  # how often micro-batches are halved after OOM
        # recomputes more layers and returns their number: tried once, before micro-batches are halved
        self.recompute_rest: Callable[[], int] | None = None
        self.recomputed_more = 0
        # called at the start of each forward pass, backward pass and update
        self.on_phase: Callable[[str], None] | None = None

    def run(self, batches: Sequence[Batch], lr: float, *, updates: bool = True) -> StepResult:
        """Run one step over all micro-batches of all processes; without `updates`, only the gradient."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get(LR_FACTOR, 1.0)

        # Counts over all processes: the loss is divided by the weight of all labels. All use the deepest split.
        # Processes that share rows each count them.
        mine = (
            sum(b.num_labels for b in batches),
            sum(b.num_tokens for b in batches),
            sum(len(b.documents_of_rows) for b in batches),
            sum(b.label_weight for b in batches),
            self.split_depth,
        )
        *counts, depths = zip(*self._runtime.host_group.gathered(mine), strict=True)
        sharers = self._runtime.processes // self._runtime.readers
        labels, tokens, samples, weight = (sum(count) / sharers for count in counts)
        self.split_depth = int(max(depths))
        batches = [*with_step_mean(self.model, batches, self._runtime, self.split_depth)]

        # Forward and backward of all parts, repeated from the first one with deeper splits after OOM.
        self._reduction.begin()
        while (sums := try_or_none(self._backward, batches, weight)) is None:
            self._deepen(batches)
            if not self._reduction.can_repeat:
                raise RetryOnRestart("a micro-batch", self.split_depth)
            self._reduction.begin()
        self._reduction.finish()
        loss_sum, router_sum = sums

        # Clip and update. With optimizer.in_backward the weights are already updated, and this only returns the norm.
        if updates:
            self._begin("update")
            updated = try_or_none(self._reduction.apply, self._update)
            if updated is None:
                raise out_of_memory_error("the optimizer step", self._sizes_between_steps())
            norm, skipped = updated
        else:
            norm, skipped = torch.zeros(2).unbind()
        return StepResult(loss_sum, norm, skipped, int(labels), int(tokens), int(samples), weight, router_sum)

    def try_out(self, batches: Sequence[Batch]) -> None:
        """Run forward and backward like a step, to test whether they fit; only the split depth may change."""
        with self._reduction.rehearsing():
            self.run(batches, 0.0, updates=False)
        self.split_depth = int(self._runtime.host_group.max(self.split_depth))
        self.forget_gradients()

    def allocate_states(self) -> None:
        """Allocate the optimizer states like the first step; no weight changes."""
        self._reduction.begin()
        for together in self._reduction.together:
            for parameter in together:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            if try_or_none(allocate_states, self.optimizer) is None:
                raise out_of_memory_error("the optimizer step", self._sizes_between_steps())
            self.forget_gradients()

    def forget_gradients(self) -> None:
        """Free the gradients after a step, before an evaluation needs the memory."""
        for parameter in (*self._parameters, *self._reduction.stepped):
            parameter.grad = None

    def _backward(self, batches: Sequence[Batch], weight: float) -> tuple[Tensor, Tensor | None]:
        """Run forward and backward of all parts, and return the loss sum and the router loss sum.

        A separate function: `try_or_none` must drop its frames, and the tensors in them, before a retry.
        """
        parts = [part for batch in batches for part in split_batch(batch, self.split_depth)]
        total = torch.zeros((), device=self._runtime.device)
        routers = None if self.model.router_loss is None else torch.zeros_like(total)
        factor = 1.0 / (weight or 1.0) if self.scale is None else self.scale.value / (weight or 1.0)
        # All processes gather a sharded model together: one with fewer parts repeats its last, with weight 0.
        passes = len(parts)
        if not self._reduction.can_repeat and self.split_depth:
            passes = int(self._runtime.host_group.max(passes))
        for number in range(passes):
            part = parts[min(number, len(parts) - 1)]
            self._begin("forward")
            loss, _ = self.model(self._runtime.on_device(part))
            counts = number < len(parts)
            scaled = loss * (factor if counts else 0.0)
            self._begin("backward")
            if number == passes - 1:
                scaled = self._reduction.last_loss(scaled)
            scaled.backward()
            if counts:
                total += loss.detach()
                if routers is not None and self.model.router_loss is not None:
                    routers += self.model.router_loss.sum
                    total -= self.model.router_loss.coefficient * self.model.router_loss.sum
        return total, routers

    def _deepen(self, batches: Sequence[Batch]) -> None:
        """Recompute more layers, then split one level deeper; with DDP the other ranks follow in the next step."""
        if self.recompute_rest is not None and self._reduction.can_repeat:
            self.recomputed_more, self.recompute_rest = self.recompute_rest(), None
            if self.recomputed_more:
                return
        if not any(halve(part) for batch in batches for part in split_batch(batch, self.split_depth)):
            longest = max(max(batch.lengths, default=0) for batch in batches)
            raise out_of_memory_error(f"a single document of {longest} tokens", self._sizes_between_steps())
        self.split_depth += 1

    def _begin(self, phase: str) -> None:
        if self.on_phase is not None:
            self.on_phase(phase)

    def _sizes_between_steps(self) -> dict[str, int]:
        return kept_bytes(self.model, self.optimizer)

    def _update(self, gradients: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Clip and step; skip the step if the gradient is not finite."""
        norm = self._reduction.total(squares(gradients, self._runtime.device)).sqrt()
        scale = None if self.scale is None else self.scale.value.to(norm.device)  # offloaded shards are on the host
        if scale is not None:
            norm = norm / scale
        skipped = ~torch.isfinite(norm)
        if self._clip > 0 or scale is not None:
            factor = (self._clip / (norm + 1e-6)).clamp(max=1.0) if self._clip > 0 else torch.ones_like(norm)
            torch._foreach_mul_(gradients, factor if scale is None else factor / scale)
        if self._skips_on_device:
            step_unless(self.optimizer, skipped.float())
        elif not bool(skipped):
            self.optimizer.step()
        if self.scale is not None:
            self.scale.update(~skipped)
        return norm, skipped


# ---- rehearsal


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """Measurements of a rehearsal, for the manifest."""

    tokens: int  # of the micro-batch
    depth: int  # how often micro-batches are halved from now on
    deepened: bool  # whether it is deeper than before
    recomputed_more: int  # layers beyond the choice of training.recompute=auto
    evaluated: bool
    peak_bytes: int  # so far, measured by the device or the system
    seconds: float


def is_due(training: TrainingConfig, device: torch.device) -> bool:
    """Return whether to rehearse; on a CPU, which raises no OOM error, only with training.rehearse=true."""
    return device.type != "cpu" if training.rehearse == "auto" else bool(training.rehearse)


def rehearse(
    stepper: Stepper, runtime: Runtime, largest: Batch, micro_batches: int, try_evaluation: Callable[[], bool]
) -> Rehearsal:
    """Rehearse on all processes together. `try_evaluation`: score a batch; False without an eval set."""
    started, depth = time.perf_counter(), stepper.split_depth
    batches = [largest] * min(micro_batches, 2)  # the second adds to the gradients of the first
    is_fresh = not stepper.optimizer.state
    with torch.random.fork_rng([runtime.device] if runtime.device.type == "cuda" else []):
        if is_fresh:
            stepper.allocate_states()
        stepper.try_out(batches)
        evaluated = try_evaluation()
        stepper.recompute_rest = None
        if is_fresh:  # loaded states of a checkpoint stay
            drop_states(stepper.optimizer)
    return Rehearsal(
        tokens=largest.ids.numel(),
        depth=stepper.split_depth,
        deepened=stepper.split_depth > depth,
        recomputed_more=stepper.recomputed_more,
        evaluated=evaluated,
        peak_bytes=int(runtime.host_group.max(runtime.peak_memory_bytes())),
        seconds=time.perf_counter() - started,
    )
