"""The batch that data builds, and that model and training use."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

IGNORE = -100  # the target of a row that only fills up


@dataclass(frozen=True, slots=True)
class PackedSequences:
    """The documents of a packed row, or of all rows one after another, between which attention must not look.

    The size of `cu_seqlens` and the value of `max_seqlen` are equal in every batch of a run, so that one compiled
    graph serves all of them and a GPU's allocator sees nothing new.
    """

    lengths: tuple[int, ...]  # none is 0; they add up to S
    cu_seqlens: Tensor  # int32: where each document begins and the last one ends; S repeated means empty ones
    max_seqlen: int  # no document has more tokens: kernels would leave the rest uncomputed, without an error

    @classmethod
    def from_lengths(
        cls, lengths: Sequence[int], max_seqlen: int | None = None, max_documents: int | None = None
    ) -> "PackedSequences":
        """Build from document lengths. The two limits are those of the whole run; by default those of `lengths`."""
        max_seqlen = max(lengths) if max_seqlen is None else max_seqlen
        max_documents = len(lengths) if max_documents is None else max_documents
        assert max(lengths) <= max_seqlen, "a document is longer than max_seqlen"
        assert len(lengths) <= max_documents, "there are more documents than max_documents"
        ends = list(accumulate(lengths, initial=0))
        padded = ends + ends[-1:] * (max_documents - len(lengths))
        return cls(tuple(lengths), torch.tensor(padded, dtype=torch.int32), max_seqlen)

    def are_longest(self, tokens: int) -> bool:
        """Whether all documents of any batch of so many tokens have `max_seqlen` of them; reads no lengths."""
        return (self.cu_seqlens.shape[0] - 1) * self.max_seqlen == tokens

    def to(self, device: torch.device) -> "PackedSequences":
        return self.map_tensors(lambda tensor: tensor.to(device, non_blocking=True))

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> "PackedSequences":
        return replace(self, cu_seqlens=change(self.cu_seqlens))


@dataclass(frozen=True, slots=True)
class LossWeights:
    """How much each target of a batch counts in the loss."""

    per_target: Tensor  # [N] float32
    total: float  # a host value

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> "LossWeights":
        return replace(self, per_target=change(self.per_target))


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch: R lines of S positions, with the documents of some data rows, in their order.

    Padded, each line is one document followed by padding, and `documents` is None if no token sees those after it,
    else the documents and paddings of all lines in turn. Packed, R is 1 and the line is `documents` side by side; the
    last of them may be filling. What decides shapes or control flow is a host value, so that nothing data-dependent
    runs on the device.
    """

    ids: Tensor  # [R, S] token ids
    positions: Tensor  # [R, S] position of each token within its document
    label_rows: Tensor  # [N] flat index (r * S + s) of each hidden state that predicts a token, or a class
    targets: Tensor  # [N] the token, class or number it must predict, IGNORE where the row only fills up, at the end
    lengths: tuple[int, ...]  # tokens of each document, without padding
    num_labels: int  # targets that are not IGNORE
    num_tokens: int  # tokens without padding
    documents: PackedSequences | None = None
    rows: tuple[int, ...] = ()  # documents of each data row; (): one
    samples: tuple[int, ...] = ()  # of an evaluation: which row of the data each one is
    weights: LossWeights | None = None  # None: each target counts 1
    token_type_ids: Tensor | None = None  # [R, S] of pairs: 1 where the second text is, else 0
    document_of_label: Tensor | None = None  # [N] of a loss over documents; D for a target that only fills up
    document_values: Tensor | None = None  # [D, K] float64, what such a loss reads of each document: its reference, ...
    mean_of: tuple["Batch", ...] = ()  # other documents, of which such a loss asks for a mean; (): of its own
    step_mean: Tensor | None = None  # a scalar in float64 that such a loss asks for: one number of the whole step

    @property
    def label_weight(self) -> float:
        """What the loss of a step is divided by, summed over its batches: the weight of all labels, or the data rows
        where the loss is one over documents.
        """
        if self.document_of_label is not None:
            return float(len(self.documents_of_rows)) if self.num_labels else 0.0
        return float(self.num_labels) if self.weights is None else self.weights.total

    @property
    def documents_of_rows(self) -> tuple[int, ...]:
        """The number of documents of each data row."""
        return self.rows or (1,) * len(self.lengths)

    @property
    def starts(self) -> list[int]:
        """The flat index (r * S + s) at which each document begins; `lengths` says where it ends."""
        lines, width = self.ids.shape
        return list(accumulate(self.lengths[:-1], initial=0)) if lines == 1 else [r * width for r in range(lines)]

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors, which are what a device receives."""
        tensors: list[Tensor] = []
        self.map_tensors(lambda tensor: tensors.append(tensor) or tensor)  # type: ignore[func-returns-value]
        return tensors

    def to(self, device: torch.device) -> "Batch":
        """Copy to `device`; the host does not wait if the tensors are pinned."""
        return self.map_tensors(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> "Batch":
        return self.map_tensors(Tensor.pin_memory)

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        """Apply `change` to every tensor; host values stay."""
        changed: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                changed[field.name] = change(value)
            elif isinstance(value, PackedSequences | LossWeights):
                changed[field.name] = value.map_tensors(change)
            elif field.name == "mean_of":
                changed[field.name] = tuple(batch.map_tensors(change) for batch in value)
        return replace(self, **changed)
