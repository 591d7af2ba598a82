"""The batch that data makes and that model and engine use: the one shape they agree on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

IGNORE = -100  # the target of a row that only fills up


@dataclass(frozen=True, slots=True)
class Documents:
    """Which positions of a packed row, or of all rows one after another, belong together, for attention.

    The size of `bounds` and the value of `longest` are the same in every batch of a run, so that one compiled graph
    serves all of them and a GPU's allocator sees nothing new.
    """

    lengths: tuple[int, ...]  # none is 0; they add up to S
    bounds: Tensor  # int32: where each begins and the last one ends; S repeated after that means empty ones
    longest: int  # no document has more tokens: kernels would leave the rest uncomputed, without an error

    @classmethod
    def of(cls, lengths: Sequence[int], longest: int | None = None, places: int | None = None) -> "Documents":
        """Of these lengths; `places` for documents and `longest` hold for the whole run, by default for these alone."""
        longest = max(lengths) if longest is None else longest
        places = len(lengths) if places is None else places
        assert max(lengths) <= longest, "a document is longer than kernels are told"
        assert len(lengths) <= places, "there are more documents than places"
        bounds = list(accumulate(lengths, initial=0))
        padded = bounds + bounds[-1:] * (places - len(lengths))
        return cls(tuple(lengths), torch.tensor(padded, dtype=torch.int32), longest)

    def to(self, device: torch.device) -> "Documents":
        """The same with its bounds on `device`; host values stay."""
        return self.mapped(lambda bounds: bounds.to(device, non_blocking=True))

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "Documents":
        """The same with its tensors elsewhere; host values stay."""
        return replace(self, bounds=change(self.bounds))


@dataclass(frozen=True, slots=True)
class Weights:
    """How much each target of a batch counts in the loss."""

    each: Tensor  # [N] float32
    total: float  # a host value

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "Weights":
        """The same with its tensors elsewhere."""
        return replace(self, each=change(self.each))


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch: R rows of S positions.

    Padded, each row is one document followed by padding, and `documents` is None if no token sees those after it, else
    the documents and paddings of all rows in turn. Packed, R is 1 and the row is `documents` side by side; the last of
    them may be filling. What decides shapes or control flow is a host value, so
    that nothing data-dependent runs on the device.
    """

    ids: Tensor  # [R, S] token ids
    positions: Tensor  # [R, S] position of each token within its document
    label_rows: (
        Tensor  # [N] flat index (r * S + s) of each hidden state that predicts a trained token, or a class
    )
    targets: Tensor  # [N] the token or the class it must predict, IGNORE where the row only fills up
    lengths: tuple[int, ...]  # tokens of each document, without padding
    num_labels: int  # targets that are not IGNORE
    num_tokens: int  # tokens without padding
    documents: Documents | None = None
    samples: tuple[int, ...] = ()  # of an evaluation: which row of the data each document is
    weights: Weights | None = None  # None: each label counts 1
    segments: Tensor | None = None  # [R, S] of pairs: 1 where the second side is, else 0

    @property
    def label_weight(self) -> float:
        """What the labels count together: the loss of a step is divided by that of all its batches."""
        return float(self.num_labels) if self.weights is None else self.weights.total

    @property
    def starts(self) -> list[int]:
        """The flat index (r * S + s) at which each document begins; `lengths` says where it ends."""
        rows, width = self.ids.shape
        return (
            list(accumulate(self.lengths[:-1], initial=0)) if rows == 1 else [r * width for r in range(rows)]
        )

    @property
    def tensors(self) -> list[Tensor]:
        """All that a device gets of it."""
        bounds = [] if self.documents is None else [self.documents.bounds]
        weights = [] if self.weights is None else [self.weights.each]
        sides = [] if self.segments is None else [self.segments]
        return [self.ids, self.positions, self.label_rows, self.targets, *bounds, *weights, *sides]

    def to(self, device: torch.device) -> "Batch":
        """The same batch on `device`; host values stay. The host does not wait if it is pinned."""
        return self.mapped(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> "Batch":
        """The same in pages of the host that a GPU copies by itself."""
        return self.mapped(Tensor.pin_memory)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        """The same with its tensors elsewhere; host values stay."""
        return replace(
            self,
            ids=change(self.ids),
            positions=change(self.positions),
            label_rows=change(self.label_rows),
            targets=change(self.targets),
            documents=None if self.documents is None else self.documents.mapped(change),
            weights=None if self.weights is None else self.weights.mapped(change),
            segments=None if self.segments is None else change(self.segments),
        )
