"""One optimizer step: the gradient of the weighted mean over all trained tokens, however they are split."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from app.batch import Batch
from app.distributed.gradient_reduction import GradientReduction
from app.distributed.process_group import Runtime
from app.model.training_model import TrainingModel
from app.oom_retry import RetryOnRestart, halve, out_of_memory_error, split_batch, try_or_none
from app.optim.gradient_scaling import LossScale, skips_on_device, squares, step_unless
from app.optim.optimizer_state import allocate_states
from app.optim.parameter_groups import LR_FACTOR
from app.optim.stochastic_rounding import steps_in_backward
from app.training.optimizer_in_backward import InBackward
from app.training.scores import with_step_mean
from app.training.storage_counter import kept_bytes


@dataclass(frozen=True, slots=True)
class StepResult:
    """Tensors stay on the device until a line of metrics is written."""

    loss_sum: Tensor  # of this process
    grad_norm: Tensor
    skipped: Tensor  # true where the gradient was not finite, so that the weights did not change
    labels: int  # over all processes
    tokens: int
    samples: int  # data rows as laid out: a pair is one, each piece of a split text is one
    weight: float  # sum of the label weights: the number of labels where all weigh 1
    router_sum: Tensor | None = None  # as `loss_sum`, of a mixture's routers

    def mean(self, loss_sum: float) -> float:
        """The weighted mean, from the loss sum over all processes."""
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
        self.split_depth = 0  # how often micro-batches are halved since one ran out of memory
        # recomputes further layers, if any, and says how many: tried once, before micro-batches are halved
        self.recompute_rest: Callable[[], int] | None = None
        self.recomputed_more = 0
        # called at the beginning of each forward pass, backward pass and update
        self.on_phase: Callable[[str], None] | None = None

    def run(self, batches: Sequence[Batch], lr: float, *, updates: bool = True) -> StepResult:
        """Run one step over all micro-batches of all processes; without `updates` up to the gradient."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get(LR_FACTOR, 1.0)

        # Counts over all processes: the loss is divided by the weight of all labels. All use the deepest split of any.
        mine = (
            sum(b.num_labels for b in batches),
            sum(b.num_tokens for b in batches),
            sum(len(b.documents_of_rows) for b in batches),
            sum(b.label_weight for b in batches),
            self.split_depth,
        )
        *counts, depths = zip(*self._runtime.host_group.gathered(mine), strict=True)
        labels, tokens, samples, weight = map(sum, counts)
        self.split_depth = int(max(depths))
        batches = [*with_step_mean(self.model, batches, self._runtime, self.split_depth)]

        # Forward and backward of all parts, repeated from the first one with deeper splits after out-of-memory.
        self._reduction.begin()
        while (sums := try_or_none(self._backward, batches, weight)) is None:
            self._deepen(batches)
            if not self._reduction.can_repeat:
                raise RetryOnRestart("a micro-batch", self.split_depth)
            self._reduction.begin()
        self._reduction.finish()
        loss_sum, router_sum = sums

        # Clip and update. With optimizer.in_backward weights are updated already, and this only returns the norm.
        if updates:
            self._begin("update")
            updated = try_or_none(self._reduction.apply, self._update)
            if updated is None:
                raise out_of_memory_error("the step of the optimizer", self._kept())
            norm, skipped = updated
        else:
            norm, skipped = torch.zeros(2).unbind()
        return StepResult(loss_sum, norm, skipped, int(labels), int(tokens), int(samples), weight, router_sum)

    def try_out(self, batches: Sequence[Batch]) -> None:
        """Run forward and backward as a step does, to find out whether they fit; only the split depth may change."""
        with self._reduction.rehearsing():
            self.run(batches, 0.0, updates=False)
        self.split_depth = int(self._runtime.host_group.max(self.split_depth))
        self.forget_gradients()

    def allocate_states(self) -> None:
        """Allocate the optimizer states as the first step does; no weight changes."""
        self._reduction.begin()
        for together in self._reduction.together:
            for parameter in together:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            if try_or_none(allocate_states, self.optimizer) is None:
                raise out_of_memory_error("the step of the optimizer", self._kept())
            self.forget_gradients()

    def forget_gradients(self) -> None:
        """Free the gradients after a step, before an evaluation needs the memory."""
        for parameter in (*self._parameters, *self._reduction.stepped):
            parameter.grad = None

    def _backward(self, batches: Sequence[Batch], weight: float) -> tuple[Tensor, Tensor | None]:
        """Run forward and backward of all parts, and return the loss sum and the router loss sum.

        This is a separate function because `try_or_none` must drop its frames, and the tensors in them, before a retry.
        """
        parts = [part for batch in batches for part in split_batch(batch, self.split_depth)]
        total = torch.zeros((), device=self._runtime.device)
        routers = None if self.model.router_loss is None else torch.zeros_like(total)
        factor = 1.0 / (weight or 1.0) if self.scale is None else self.scale.value / (weight or 1.0)
        # A sharded model is gathered by all processes together: one with fewer parts repeats its last, unweighted.
        passes = len(parts)
        if not self._reduction.can_repeat and self.split_depth:
            passes = int(self._runtime.host_group.max(passes))
        for number in range(passes):
            part = parts[min(number, len(parts) - 1)]
            self._begin("forward")
            loss, _ = self.model(part.to(self._runtime.device))
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
        """Recompute more layers, then split one level deeper, which with DDP the other ranks do in the next step."""
        if self.recompute_rest is not None and self._reduction.can_repeat:
            self.recomputed_more, self.recompute_rest = self.recompute_rest(), None
            if self.recomputed_more:
                return
        if not any(halve(part) for batch in batches for part in split_batch(batch, self.split_depth)):
            longest = max(max(batch.lengths, default=0) for batch in batches)
            raise out_of_memory_error(f"a document of {longest} tokens by itself", self._kept())
        self.split_depth += 1

    def _begin(self, phase: str) -> None:
        if self.on_phase is not None:
            self.on_phase(phase)

    def _kept(self) -> dict[str, int]:
        return kept_bytes(self.model, self.optimizer)

    def _update(self, gradients: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Clip and step; skip the step where the gradient is not finite."""
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
