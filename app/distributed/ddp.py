"""Data parallelism by torch's DistributedDataParallel, with the reduction in a pass of its own.

DDP sends a gradient as soon as a backward pass has made it, so a process that runs out of memory in that pass cannot
make it again: some of its gradients are on their way. Here every micro-batch only adds up, and `reduce` starts the
all-reduce by a backward pass that computes nothing and cannot run out of memory. The other processes wait in it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class GradientSum:
    """The gradients of `parameters` as sums over all processes, in buckets that stay the same from step 1 on."""

    def __init__(self, parameters: Sequence[nn.Parameter], bucket_mb: float | None = None) -> None:
        self._parameters = list(parameters)
        self._ddp = DistributedDataParallel(
            _NoPass(self._parameters),
            init_sync=False,
            bucket_cap_mb=bucket_mb,
            gradient_as_bucket_view=True,
        )
        self._ddp.register_comm_hook(None, _summed)
        # DDP deals gradients to other buckets before its second reduction. Sums of three processes are then made in
        # another order, so a continued run would differ from an uninterrupted one unless this happens before step 1.
        for _ in range(2):
            self.reduce()
        self._views = [parameter.grad for parameter in self._parameters]
        self.clear()

    def clear(self) -> None:
        """There are no gradients yet. They are views of the buckets, so that they need no memory of their own."""
        for parameter, view in zip(self._parameters, self._views, strict=True):
            assert view is not None
            parameter.grad = view.zero_()

    def reduce(self) -> None:
        """Returns when every parameter has the sum of its gradients of all processes."""
        self._ddp().backward()


class _NoPass(nn.Module):
    """What DDP wraps: all parameters take part in a pass whose gradients are zero."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.parameters_of_all = nn.ParameterList(parameters)

    def forward(self) -> Tensor:
        result: Tensor = _Zero.apply(*self.parameters_of_all)  # type: ignore[no-untyped-call]
        return result


class _Zero(torch.autograd.Function):
    """0, with zeros as gradients, which take no memory."""

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
    """Sums, where DDP by itself takes means: the loss is divided by the weight of all processes already."""
    work = torch.distributed.all_reduce(bucket.buffer(), async_op=True)
    summed: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return summed
