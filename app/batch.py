"""Micro-batch of token ids and labels, from data to model and training."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

IGNORE = -100  # target of a padding row


class HeadExchange(Protocol):
    """Exchange of tokens for heads between the ranks that each have a slice of a row."""

    @property
    def index(self) -> int:
        """Index of this rank."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def to_heads(self, tokens: Tensor) -> Tensor:
        """Return all tokens of the heads of this rank, [1, H / size, S, D], from its tokens, [1, H, S / size, D]."""

    def to_tokens(self, heads: Tensor) -> Tensor:
        """Return the tokens of this rank with all heads: the inverse of `to_heads`."""


@dataclass(frozen=True, slots=True)
class PackedSequences:
    """Documents of a packed row, or of all rows in order; attention must not cross their boundaries.

    The size of `cu_seqlens` and the value of `max_seqlen` are equal in all batches of a run, so that one compiled graph
    serves all of them and the GPU allocator reuses its blocks.
    """

    lengths: tuple[int, ...]  # above 0; their sum is S
    cu_seqlens: Tensor  # int32: start of each document, then the end of the last; a repeated S: empty documents
    max_seqlen: int  # at least the longest document: kernels silently skip tokens beyond it
    exchange: HeadExchange | None = None  # if the model gets one slice of the row

    @classmethod
    def from_lengths(
        cls, lengths: Sequence[int], max_seqlen: int | None = None, max_documents: int | None = None
    ) -> "PackedSequences":
        """Build from document lengths. `max_seqlen` and `max_documents`: limits of the run; default: of `lengths`."""
        max_seqlen = max(lengths) if max_seqlen is None else max_seqlen
        max_documents = len(lengths) if max_documents is None else max_documents
        assert max(lengths) <= max_seqlen, "a document is longer than max_seqlen"
        assert len(lengths) <= max_documents, "more documents than max_documents"
        ends = list(accumulate(lengths, initial=0))
        padded = ends + ends[-1:] * (max_documents - len(lengths))
        return cls(tuple(lengths), torch.tensor(padded, dtype=torch.int32), max_seqlen)

    def are_longest(self, tokens: int) -> bool:
        """Return whether every document of any batch of `tokens` tokens has `max_seqlen`; reads no lengths."""
        return (self.cu_seqlens.shape[0] - 1) * self.max_seqlen == tokens

    def to(self, device: torch.device) -> "PackedSequences":
        return self.map_tensors(lambda tensor: tensor.to(device, non_blocking=True))

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> "PackedSequences":
        return replace(self, cu_seqlens=change(self.cu_seqlens))


@dataclass(frozen=True, slots=True)
class LossWeights:
    """Loss weights of the targets of a batch."""

    per_target: Tensor  # [N] float32
    total: float  # on the host

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> "LossWeights":
        return replace(self, per_target=change(self.per_target))


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch: R lines of S positions, with the documents of some data rows, in order.

    Padded: each line is one document followed by padding; `documents` is None with causal attention, else the documents
    and paddings of all lines in order. Packed: R is 1, and the line is the concatenated `documents`, of which the last
    may be padding. Values that decide shapes or control flow are on the host, so that no data-dependent code runs on
    the device.
    """

    ids: Tensor  # [R, S] token ids
    positions: Tensor  # [R, S] position of each token in its document
    label_rows: Tensor  # [N] flat index (r * S + s) of each hidden state that predicts a token or class
    targets: Tensor  # [N] the token, class or number to predict; IGNORE for padding rows, at the end
    lengths: tuple[int, ...]  # tokens per document, without padding
    num_labels: int  # targets that are not IGNORE
    num_tokens: int  # tokens without padding
    documents: PackedSequences | None = None
    rows: tuple[int, ...] = ()  # documents per data row; (): one each
    samples: tuple[int, ...] = ()  # of an evaluation: index of each data row
    weights: LossWeights | None = None  # None: all weights are 1
    token_type_ids: Tensor | None = None  # [R, S] for text pairs: 1 for the second text, else 0
    document_of_label: Tensor | None = None  # [N] for a loss over documents; D for padding targets
    document_values: Tensor | None = None  # [D, K] float64, for such a loss: reference values of each document, ...
    mean_of: tuple["Batch", ...] = ()  # other documents for the mean in such a loss; (): its own
    step_mean: Tensor | None = None  # float64 scalar for such a loss: one value per step

    @property
    def label_weight(self) -> float:
        """Divisor of the loss, summed over the batches of a step: the weight of all labels, or for a loss over
        documents the number of data rows.
        """
        if self.document_of_label is not None:
            return float(len(self.documents_of_rows)) if self.num_labels else 0.0
        return float(self.num_labels) if self.weights is None else self.weights.total

    @property
    def documents_of_rows(self) -> tuple[int, ...]:
        """Number of documents of each data row."""
        return self.rows or (1,) * len(self.lengths)

    @property
    def starts(self) -> list[int]:
        """Flat index (r * S + s) of the start of each document, which has `lengths` tokens."""
        lines, width = self.ids.shape
        return list(accumulate(self.lengths[:-1], initial=0)) if lines == 1 else [r * width for r in range(lines)]

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors, to be copied to a device."""
        tensors: list[Tensor] = []
        self.map_tensors(lambda tensor: tensors.append(tensor) or tensor)  # type: ignore[func-returns-value]
        return tensors

    def to(self, device: torch.device) -> "Batch":
        """Copy to `device`; the host does not wait if the tensors are pinned."""
        return self.map_tensors(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> "Batch":
        return self.map_tensors(Tensor.pin_memory)

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        """Apply `change` to every tensor; host values are unchanged."""
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
