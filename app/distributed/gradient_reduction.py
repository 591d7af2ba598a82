"""Gradient reduction of a step: in one process, summed by DDP, or sharded by FSDP.

The loss of a step is one mean over the labels of all its micro-batches m on all processes k,

    L = (sum over k, m of l[k, m]) / N        dL = (sum over k of (sum over m of dl[k, m])) / N

where l[k, m] is the loss sum of a micro-batch and N the weight of all labels. So each process accumulates its inner
sum, the processes are summed once, and the train step divides by N. A mean of means (the default of DDP, or a loss
divided in each micro-batch) would give the labels of a micro-batch with few labels a higher weight.

DDP sends a gradient as soon as a backward pass has computed it, so a process that runs out of memory in that pass
cannot repeat it: some of its gradients are already sent. Here every micro-batch only accumulates, and `finish` starts
the all-reduce by a backward pass without computation, which cannot run out of memory. The other processes wait in it.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from app.distributed.fsdp import Sharding, local


class GradientReduction:
    """Calls of a train step, in this order; this class is for one process.

    `stepped`: parameters of the optimizer of this process; `can_repeat`: whether a process may repeat its passes while
    the others wait.
    """

    can_repeat = True
    skipping = "skipped: non-finite gradient"  # message for such a step

    def __init__(self, stepped: Sequence[nn.Parameter]) -> None:
        self.stepped = stepped

    @property
    def together(self) -> list[Sequence[nn.Parameter]]:
        """Groups of parameters whose gradients are in memory at the same time."""
        return [self.stepped]

    def begin(self) -> None:
        """Drop all gradients, before a step and before its passes are repeated."""
        for parameter in self.stepped:
            parameter.grad = None

    def last_loss(self, loss: Tensor) -> Tensor:
        """Prepare for the last backward pass of this process in the step, and return its loss."""
        return loss

    def finish(self) -> None:
        """Wait until each of `stepped` has its gradient, summed over all processes."""

    def gradients(self) -> list[Tensor]:
        """Assign the gradients of `stepped`, and return those of this process."""
        return [parameter.grad for parameter in self.stepped if parameter.grad is not None]

    def apply(self, update: Callable[[list[Tensor]], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """End the step with `update` of the gradients; return their norm, and whether it was not finite."""
        return update(self.gradients())

    def rehearsing(self) -> AbstractContextManager[None]:
        """Return a context in which passes change no weight."""
        return nullcontext()

    def total(self, squares: Tensor) -> Tensor:
        """Return the sum over all gradients, from the sum over those of this process."""
        return squares


class AllReduce(GradientReduction):
    """Reduction with a full model per process, by DistributedDataParallel. Frozen weights and buffers are equal by
    construction and are not sent.

    Gradients are views of the DDP buckets, so they need no extra memory; the buckets are the same in every start.
    `overlap`: reduce during the last backward pass of a step, which then cannot be repeated. `in_lockstep`: the passes
    of several processes need each other, so none can be repeated.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        overlap: bool = False,
        in_lockstep: bool = False,
        bucket_mb: float | None = None,
    ) -> None:
        super().__init__(parameters)
        self._overlap = overlap
        self._in_lockstep = in_lockstep
        self._is_sent = False
        for parameter in parameters:
            torch.distributed.broadcast(parameter.data, 0)
        self._ddp = DistributedDataParallel(
            _NoPass(parameters), init_sync=False, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True
        )
        self._ddp.register_comm_hook(None, _summed)
        self._warm_up()
        self._views = [parameter.grad for parameter in self.stepped]
        self.begin()

    def begin(self) -> None:
        for parameter, view in zip(self.stepped, self._views, strict=True):
            assert view is not None
            parameter.grad = view.zero_()
        self.can_repeat, self._is_sent = not self._in_lockstep, False

    def last_loss(self, loss: Tensor) -> Tensor:
        if not self._overlap:
            return loss
        self.can_repeat, self._is_sent = False, True
        prepared: Tensor = loss + self._ddp()  # created last, so its backward runs first and blocks no other
        return prepared

    def finish(self) -> None:
        if not self._is_sent:
            self._ddp().backward()

    def _warm_up(self) -> None:
        """Make DDP rebuild its buckets, which it does before its second reduction.

        This changes the order of sums over three processes, so a resumed run would differ from an uninterrupted one
        unless it happens before step 1. New buckets follow the order in which gradients arrive: from the last
        parameter to the first, as in a model.
        """
        for _ in range(2):
            self._ddp(one_by_one=True).backward()


class ShardedGradients(GradientReduction):
    """Reduction of a sharded model. `whole_matrices`: the optimizer computes on whole tensors."""

    can_repeat = False  # the other processes are in the same pass

    def __init__(self, parameters: Sequence[nn.Parameter], sharding: Sharding, *, whole_matrices: bool) -> None:
        self._parameters = parameters
        self._sharding = sharding
        # plain parameters in the memory of the shards, for optimizers without DTensor support; empty shards have none
        self.local = {
            parameter: nn.Parameter(local(parameter.detach()), requires_grad=parameter.requires_grad)
            for parameter in (() if whole_matrices else parameters)
            if local(parameter).numel()
        }
        super().__init__(parameters if whole_matrices else list(self.local.values()))

    def begin(self) -> None:
        for parameter in (*self._parameters, *self.stepped):
            parameter.grad = None
        self._sharding.begin_step()

    def last_loss(self, loss: Tensor) -> Tensor:
        self._sharding.expect_last()
        return loss

    def gradients(self) -> list[Tensor]:
        for parameter, shard in self.local.items():
            shard.grad = None if parameter.grad is None else local(parameter.grad)
        gradients = [local(parameter.grad) for parameter in self._parameters if parameter.grad is not None]
        return [gradient for gradient in gradients if gradient.numel()]

    def total(self, squares: Tensor) -> Tensor:
        return self._sharding.total(squares)


class _NoPass(nn.Module):
    """Module wrapped by DDP: all parameters take part in a pass with zero gradients."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.reduced = nn.ParameterList(parameters)

    def forward(self, *, one_by_one: bool = False) -> Tensor:
        groups = [[parameter] for parameter in self.reduced] if one_by_one else [self.reduced]
        zeros: list[Tensor] = [_Zero.apply(*group) for group in groups]  # type: ignore[no-untyped-call]
        return torch.stack(zeros).sum()


class _Zero(torch.autograd.Function):
    """Zero, with zero gradients that take no memory."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.shapes = [parameter.shape for parameter in parameters]
        ctx.dtypes = [parameter.dtype for parameter in parameters]
        return parameters[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, ...]:
        pairs = zip(ctx.shapes, ctx.dtypes, strict=True)
        return tuple(upstream[0].new_zeros((), dtype=dtype).expand(shape) for shape, dtype in pairs)


def _summed(_state: object, bucket: torch.distributed.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    """Sum instead of the average of DDP: the loss is already divided by the weight of all processes."""
    work = torch.distributed.all_reduce(bucket.buffer(), async_op=True)
    summed: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return summed
