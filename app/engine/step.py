"""One optimizer step: the gradient of the weighted mean over all trained tokens, however they are split."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from app.batch import Batch
from app.engine.runtime import Runtime
from app.model.trainee import Trainee
from app.optim.skip import skips_on_device, step_unless


@dataclass(frozen=True, slots=True)
class StepResult:
    """Tensors stay on the device until somebody prints them."""

    loss_sum: Tensor  # over this process
    grad_norm: Tensor
    skipped: Tensor  # true where the gradient was not finite, and nothing was changed
    labels: int  # over all processes
    tokens: int
    weight: float  # of the labels together: their number, unless some count more or less

    def mean(self, loss_sum: float) -> float:
        """Of a sum over all processes."""
        return loss_sum / (self.weight or 1.0)


class Stepper:
    """Runs steps. `scaler` is there for fp16 only."""

    def __init__(
        self, trainee: Trainee, optimizer: torch.optim.Optimizer, runtime: Runtime, clip: float, *, fp16: bool
    ) -> None:
        self.trainee = trainee
        self.optimizer = optimizer
        self.scaler = torch.amp.GradScaler(runtime.device.type) if fp16 else None
        self._runtime = runtime
        self._clip = clip
        self._parameters = list(trainee.trained().values())
        self._skips_on_device = skips_on_device(optimizer)
        self._shared = runtime.shared(trainee)

    def run(self, batches: Sequence[Batch], lr: float) -> StepResult:
        """One step over all micro-batches of all processes."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        labels, tokens, weight = self._runtime.peers.totals(
            [
                sum(b.num_labels for b in batches),
                sum(b.num_tokens for b in batches),
                sum(b.label_weight for b in batches),
            ]
        )
        loss_sum = self._backward(batches, weight)
        norm, skipped = self._update()
        return StepResult(loss_sum, norm, skipped, int(labels), int(tokens), weight)

    def rehearse(self, batch: Batch) -> None:
        """One backward pass that changes nothing, where there are several processes.

        After the first one gradients are put into other buckets, in which sums round differently: a continued run
        would otherwise begin with buckets that the uninterrupted one had left behind.
        """
        if self._runtime.processes > 1:
            loss, _ = self._shared(batch.to(self._runtime.device))
            (loss * 0.0).backward()
            self.optimizer.zero_grad(set_to_none=True)

    def _backward(self, batches: Sequence[Batch], weight: float) -> Tensor:
        """Loss sums over the weight of all processes; times their number, because data parallelism takes the mean."""
        factor = self._runtime.processes / (weight or 1.0)
        total = torch.zeros((), device=self._runtime.device)
        self.optimizer.zero_grad(set_to_none=True)
        for batch in batches:
            with self._runtime.reduced_after(self._shared, last=batch is batches[-1]):
                loss, _ = self._shared(batch.to(self._runtime.device))
                scaled = loss * factor
                (scaled if self.scaler is None else self.scaler.scale(scaled)).backward()
            total += loss.detach()
        return total

    def _update(self) -> tuple[Tensor, Tensor]:
        """Clip and step; leave everything as it is when the gradient is not finite."""
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if self._clip > 0:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self._clip, norm)
        skipped = ~torch.isfinite(norm)
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif self._skips_on_device:
            step_unless(self.optimizer, skipped.float())
        elif not bool(skipped):
            self.optimizer.step()
        return norm, skipped
