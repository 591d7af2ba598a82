"""What layers ask of attention, and what a backend is."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from app.batch import PackedSequences


@dataclass(frozen=True, slots=True)
class Rules:
    """What a layer asks for besides q, k and v."""

    causal: bool
    scale: float | None
    dropout: float
    window: int | None  # tokens each side of the query may see, itself included
    softcap: float | None
    sinks: Tensor | None  # one logit per head that takes part in the softmax and is thrown away


@dataclass(frozen=True, slots=True)
class Needs:
    """What a run asks for, known before any weight is loaded."""

    packed: bool
    compute: torch.dtype | None  # of autocast; None: everything is float32
    softcap: bool
    sinks: bool
    dropout: bool
    key_size: int  # of one head, like its queries
    value_size: int
    window: bool = False  # whether one cuts documents of this run


Kernel = Callable[[Tensor, Tensor, Tensor, Rules, PackedSequences | None], Tensor]


@dataclass(frozen=True, slots=True)
class Backend:
    """One way to compute attention.

    `run` takes [B, H, S, D] (fewer heads for keys and values where they are shared) and returns the same shape: the
    documents of a packed row, of which B is 1, or padded rows when there are none. `requires` says what this machine
    lacks, `refuses` what of a run's needs it cannot do, both in words. Without `refuses` it is right for every model.
    `traced` gives what compiled layers call in place of `run`: it reads only what all batches share.
    """

    run: Kernel
    requires: Callable[[torch.device], list[str]]
    refuses: Callable[[Needs], list[str]] | None = None
    traced: Callable[[torch.device], Kernel] | None = None
