"""The batch that data makes and that model and engine use: the one shape they agree on."""

from dataclasses import dataclass

import torch
from torch import Tensor

IGNORE = -100  # the target of a row that only fills up


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch: R rows of S positions.

    Padded, each row is one document followed by padding, and `documents` is None. Packed, R is 1 and the row is
    `documents` side by side; the last of them may be filling. What decides shapes or control flow is a host value, so
    that nothing data-dependent runs on the device.
    """

    ids: Tensor  # [R, S] token ids
    positions: Tensor  # [R, S] position of each token within its document
    label_rows: Tensor  # [N] flat index (r * S + s) of each hidden state that predicts a trained token
    targets: Tensor  # [N] the token it must predict, IGNORE where the row only fills up
    lengths: tuple[int, ...]  # tokens of each document, without padding
    num_labels: int  # targets that are not IGNORE
    num_tokens: int  # tokens without padding
    documents: tuple[int, ...] | None = None  # lengths that add up to S, for attention

    def to(self, device: torch.device) -> "Batch":
        """The same batch on `device`; host values stay."""
        return Batch(
            ids=self.ids.to(device, non_blocking=True),
            positions=self.positions.to(device, non_blocking=True),
            label_rows=self.label_rows.to(device, non_blocking=True),
            targets=self.targets.to(device, non_blocking=True),
            lengths=self.lengths,
            num_labels=self.num_labels,
            num_tokens=self.num_tokens,
            documents=self.documents,
        )
