"""Plain PyTorch loops over a PEFT model, as one would write them by hand."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from app.batch import IGNORE
from app.model.attention import register
from scripts.bench.clock import Clock
from scripts.bench.ours import Collator
from scripts.bench.prepared import (
    BINS,
    PACKED,
    PAD,
    PADDED,
    Prepared,
    ids_of,
    labels_of,
    network_of,
    recompute_as_transformers,
)
from scripts.bench.workload import Bin

Loss = Callable[[Bin], Tensor]  # the sum over the labels of a micro-batch


class Plain:
    """One of the loops; what differs is how a micro-batch becomes its loss."""

    def __init__(self, prepared: Prepared, network: nn.Module, attention: str, layout: str) -> None:
        self._prepared = prepared
        self.attention = attention
        self.layout = layout
        self.network = network
        self.device = prepared.runtime.device
        if prepared.contest.recompute:
            recompute_as_transformers(self.network)
        self._losses: dict[str, Loss] = {PACKED: self._packed, PADDED: self._padded, BINS: self._bare}
        self._collate = Collator(prepared)

    def train(self, clock: Clock) -> None:
        """Forward, backward, clip, step."""
        run, loss_of = self._prepared.run, self._losses[self.layout]
        trained = [p for p in self.network.parameters() if p.requires_grad]
        settings = run.optimizer
        optimizer = torch.optim.AdamW(
            trained,
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        clock.begin()
        for step in self._prepared.steps:
            labels = sum(int(each.trained.sum()) for packed in step for each in packed)
            total = torch.zeros((), device=self.device)
            optimizer.zero_grad(set_to_none=True)
            for packed in step:
                with self._arithmetic():
                    loss = loss_of(packed)
                (loss / labels).backward()
                total += loss.detach()
            if run.training.clip > 0:
                nn.utils.clip_grad_norm_(trained, run.training.clip)
            optimizer.step()
            clock.mark(total / labels)
        clock.end()

    def _arithmetic(self) -> contextlib.AbstractContextManager[None]:
        compute = self._prepared.compute
        if compute is None:
            return contextlib.nullcontext()
        autocast: contextlib.AbstractContextManager[None] = torch.autocast(self.device.type, dtype=compute)
        return autocast

    def _packed(self, packed: Bin) -> Tensor:
        """One row whose positions begin anew with each document; transformers keeps them apart."""
        ids = torch.cat(ids_of(packed))[None].to(self.device)
        labels = torch.cat(labels_of(packed)).to(self.device)
        positions = torch.cat([torch.arange(len(each)) for each in packed])[None].to(self.device)
        logits = self.network(input_ids=ids, position_ids=positions, use_cache=False).logits
        return _cross_entropy(logits[0, :-1], labels[1:])

    def _padded(self, packed: Bin) -> Tensor:
        """A row for each document."""
        ids = pad_sequence(ids_of(packed), batch_first=True, padding_value=PAD).to(self.device)
        labels = pad_sequence(labels_of(packed), batch_first=True, padding_value=IGNORE).to(self.device)
        lengths = torch.tensor([len(each) for each in packed])[:, None]
        mask = (torch.arange(ids.shape[1])[None] < lengths).long().to(self.device)
        logits = self.network(input_ids=ids, attention_mask=mask, use_cache=False).logits
        return _cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    def _bare(self, packed: Bin) -> Tensor:
        """The arithmetic of our own step: our bins and attention, and only labelled rows reach the head."""
        batch = self._collate(packed).to(self.device)
        unwrap = getattr(self.network, "get_base_model", None)
        lm: Any = self.network if unwrap is None else unwrap()
        hidden = lm.base_model(
            input_ids=batch.ids, position_ids=batch.positions, use_cache=False, documents=batch.documents
        )[0]
        rows = hidden[0].index_select(0, batch.label_rows)
        return _cross_entropy(lm.get_output_embeddings()(rows), batch.targets)


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels, ignore_index=IGNORE, reduction="sum")


def packed(prepared: Prepared) -> Plain:
    """Documents side by side, told apart by their positions, with the attention of transformers."""
    return Plain(prepared, network_of(prepared, "sdpa"), "sdpa", PACKED)


def padded(prepared: Prepared) -> Plain:
    """Rows padded to the longest of their micro-batch."""
    return Plain(prepared, network_of(prepared, "sdpa"), "sdpa", PADDED)


def bare(prepared: Prepared) -> Plain:
    """The same arithmetic as ours, by a loop without anything else."""
    name = register(prepared.choices.attention)
    return Plain(prepared, network_of(prepared, name), prepared.choices.attention, BINS)
