"""Proof, before a packed run, that documents do not see each other and attention is the model's own.

A look for leaks alone would pass models that are wrong without leaking, so the packed logits are compared with those of
the model's own plain attention on each document by itself.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from app.batch import Batch, Documents
from app.errors import EnvironmentProblem
from app.model.attention import NAME
from app.model.trainee import Trainee

_DOCUMENTS = 4
_TOKENS = 128  # of each
_EXACT = 1e-5  # of the largest logit, where everything is float32
_ROUNDING = 3  # times what the model's own two kernels differ by, where it is not


@torch.no_grad()
def check_packing(trainee: Trainee, batch: Batch) -> None:
    """Refuse to train packed when the logits of `batch`'s documents depend on being packed."""
    documents = [] if batch.documents is None else _pieces(batch)
    if len(documents) < 2:
        return
    mode = trainee.training
    trainee.eval()
    with trainee.arithmetic(batch.ids.device):
        packed = _packed_logits(trainee, documents)
        own = _separate_logits(trainee, documents, "eager")
        error, allowed = _distance(packed, own), _EXACT
        if packed.dtype != torch.float32 or trainee.compute is not None:
            allowed = max(
                _ROUNDING * _distance(_separate_logits(trainee, documents, "sdpa"), own),
                torch.finfo(trainee.compute or packed.dtype).eps,
            )
    trainee.train(mode)
    if not error <= allowed:
        kind = trainee.language_model.config.model_type
        raise EnvironmentProblem(
            f"batching.packing=true: a model of kind {kind} gives other logits when documents are packed "
            f"(relative difference {error:.1e}, allowed {allowed:.1e}), so it would be trained wrongly. "
            "Set batching.packing=false."
        )


def _pieces(batch: Batch) -> list[Tensor]:
    """The beginnings of the first documents; what fills up the bin is none."""
    documents = batch.ids[0].split([*batch.lengths, batch.ids.shape[1] - sum(batch.lengths)])
    return [document[:_TOKENS] for document in documents[: len(batch.lengths)][:_DOCUMENTS]]


def _packed_logits(trainee: Trainee, documents: Sequence[Tensor]) -> Tensor:
    lengths, device = [len(d) for d in documents], documents[0].device
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])
    hidden = trainee.language_model.base_model(
        input_ids=torch.cat(list(documents))[None],
        position_ids=positions[None],
        use_cache=False,
        documents=Documents.of(lengths, places=len(lengths) + 2).to(
            device
        ),  # with empty ones, as in training
    )[0]
    return trainee.head(hidden[0])


def _separate_logits(trainee: Trainee, documents: Sequence[Tensor], attention: str) -> Tensor:
    lm: Any = trainee.language_model
    lm.set_attn_implementation(attention)
    try:
        return torch.cat([lm(input_ids=d[None], use_cache=False).logits[0] for d in documents])
    finally:
        lm.set_attn_implementation(NAME)


def _distance(left: Tensor, right: Tensor) -> float:
    """The largest difference, as a part of the largest logit."""
    return float((left.float() - right.float()).abs().max() / right.float().abs().max())
