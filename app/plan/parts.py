"""A trace of a model that is divided among processes (`parallel=zero2`, `zero3`): how it lies, where gradients go."""

from dataclasses import dataclass

from torch import nn

from app.engine.anatomy import kept_tensors
from app.engine.divided import Divided, buckets, dealt
from app.engine.reduction import Alone, Reduction
from app.model.lending import Lending, owned
from app.model.trainee import Trainee
from app.plan.lent import Sizes, lend, sizes_of
from app.plan.share import Nowhere
from app.plan.whose import NOBODY, LayerCounter


@dataclass(frozen=True, slots=True)
class Parts:
    """How a model is divided: `lends`, its weights too.

    `part`: rank and number of the process that is traced; None: one that keeps all gradients and states, and of weights
    that are lent none.
    """

    bucket_bytes: int
    lends: bool = False
    trained: bool = False  # whether what is lent is trained
    part: tuple[int, int] | None = None


def lending_of(parts: Parts | None, trainee: Trainee, bare: nn.Module | None) -> tuple[Lending | None, Sizes]:
    """How layers lie, and how large they are."""
    if parts is None or bare is None:
        return None, {}
    kept = kept_tensors(trainee, None)
    lending = lend(trainee.network, bare, Nowhere(), parts.part, trained=parts.trained)
    return lending, sizes_of(lending, kept)


def reduction_of(parts: Parts | None, trainee: Trainee, wire: Nowhere) -> Reduction:
    """Of one process; where it stands for all it keeps every gradient: what is kept of it is known without a trace."""
    parameters, lending = list(trainee.trained().values()), trainee.lending
    if parts is None:
        return Alone(parameters)
    kept = owned(lending, parameters)
    if parts.part is None:
        shares = [(each, 0) for each in buckets(parameters, parts.bucket_bytes, kept)]
        return Divided(parameters, shares, 0, wire, lending)
    rank, processes = parts.part
    return Divided(parameters, dealt(parameters, processes, kept), rank, wire, lending)


def disown_gradients(trainee: Trainee, wire: Nowhere, counter: LayerCounter) -> None:
    """They wait until a bucket is full, which may be in the turn of another layer, and go: no more of them wait where
    there are more layers.
    """

    def arrived(parameter: nn.Parameter) -> None:
        if parameter.grad is not None:
            counter.give(NOBODY, [parameter.grad])

    for parameter in trainee.trained().values():
        parameter.register_post_accumulate_grad_hook(arrived)
    wire.sees = lambda tensor: counter.give(NOBODY, [tensor])
