"""Proof, before a packed run, that documents do not see each other and attention is the model's own.

A look for leaks alone would pass models that are wrong without leaking, so packed documents are compared with each
document by itself through the model's own plain attention: the logits, and the gradient that reaches the embeddings
through every layer.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from app.batch import Batch, PackedSequences
from app.errors import EnvironmentProblem
from app.model.attention import NAME, right_own
from app.model.proof import Proof
from app.model.trainee import Trainee

_DOCUMENTS = 4
_TOKENS = 128  # of each
_EXACT = {"logits": 1e-5, "gradient": 1e-4}  # relative, where everything is float32
_ROUNDING = 3  # times what the model's own kernels differ by, where it is not


@dataclass(frozen=True, slots=True)
class _Outcome:
    logits: Tensor  # [tokens, vocabulary]
    gradient: Tensor  # [tokens, hidden]

    def distances(self, other: "_Outcome") -> dict[str, float]:
        """The largest difference of logits as a part of the largest logit, and of gradients by their norm."""
        logits, theirs = self.logits.float(), other.logits.float()
        gradient, its = self.gradient.double(), other.gradient.double()
        return {
            "logits": float((logits - theirs).abs().max() / theirs.abs().max()),
            "gradient": float((gradient - its).norm() / its.norm()),
        }


def check_packing(trainee: Trainee, batch: Batch) -> list[Proof]:
    """Refuse to train packed when `batch`'s documents give anything else for being packed."""
    documents = [] if batch.documents is None else _pieces(batch)
    if len(documents) < 2:
        return []
    mode = trainee.training
    trainee.eval()
    with trainee.arithmetic(batch.ids.device):
        own = _separate(trainee, documents, "eager")
        found = _packed(trainee, documents).distances(own)
        allowed = _EXACT if _is_exact(trainee, own) else _rounding(trainee, documents, own)
    trainee.train(mode)
    proofs = [
        Proof(f"{what} of packed documents against separate ones", error, allowed[what])
        for what, error in found.items()
    ]
    for what, proof in zip(found, proofs, strict=True):
        if not proof.holds:
            kind = trainee.language_model.config.model_type
            raise EnvironmentProblem(
                f"batching.packing=true: a model of kind {kind} gives another {what} when documents are packed "
                f"(relative difference {proof.difference:.1e}, allowed {proof.allowed:.1e}), so it would be trained "
                "wrongly. Set batching.packing=false."
            )
    return proofs


def _pieces(batch: Batch) -> list[Tensor]:
    """The beginnings of the first documents; what fills up bins and rows is none."""
    if batch.ids.shape[0] > 1:
        documents = [batch.ids[row, :n] for row, n in enumerate(batch.lengths)]
    else:
        documents = list(batch.ids[0, : sum(batch.lengths)].split(batch.lengths))
    return [document[:_TOKENS] for document in documents[:_DOCUMENTS]]


def _packed(trainee: Trainee, documents: Sequence[Tensor]) -> _Outcome:
    lengths, device = [len(d) for d in documents], documents[0].device
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])
    packed = PackedSequences.from_lengths(
        lengths, max_documents=len(lengths) + 2
    )  # with empty ones, as in training
    return _outcome(
        trainee,
        torch.cat(list(documents))[None],
        position_ids=positions[None] + trainee.first_position,
        documents=packed.to(device),
    )


def _separate(trainee: Trainee, documents: Sequence[Tensor], attention: str, noise: float = 0.0) -> _Outcome:
    """By the model's own attention, and positions of its own counting."""
    lm: Any = trainee.language_model
    lm.set_attn_implementation(attention)
    try:
        parts = [_outcome(trainee, document[None], noise=noise) for document in documents]
    finally:
        lm.set_attn_implementation(NAME)
    return _Outcome(torch.cat([p.logits for p in parts]), torch.cat([p.gradient for p in parts]))


def _outcome(trainee: Trainee, ids: Tensor, noise: float = 0.0, **given: Any) -> _Outcome:
    lm: Any = trainee.language_model
    with torch.enable_grad(), _as_leaf(lm.get_input_embeddings(), noise) as leaves:
        hidden = lm.base_model(input_ids=ids, use_cache=False, **given)[0][0]
        gradient = torch.autograd.grad((hidden.float() * _pattern(ids, hidden)).sum(), leaves)[0]
    with torch.no_grad():
        return _Outcome(trainee.head(hidden.detach()), gradient[0])


def _pattern(ids: Tensor, hidden: Tensor) -> Tensor:
    """What hidden states are weighed with: it follows from token and place within the vector, not from the layout."""
    places = torch.arange(hidden.shape[-1], device=hidden.device)
    return torch.cos(ids[0, :, None].float() + places)


@contextlib.contextmanager
def _as_leaf(embedding: Any, noise: float) -> Iterator[list[Tensor]]:
    """Collects the embeddings of the next forward as leaves of its graph, moved by up to `noise` of themselves."""
    leaves: list[Tensor] = []

    def cut(_module: Any, _args: Any, out: Tensor) -> Tensor:
        leaf = out.detach()
        if noise:
            leaf = leaf * (
                1 + noise * torch.cos(torch.arange(leaf.numel(), device=leaf.device)).view_as(leaf)
            )
        leaves.append(leaf.to(out.dtype).requires_grad_())
        return leaves[-1]

    handle = embedding.register_forward_hook(cut)
    try:
        yield leaves
    finally:
        handle.remove()


def _is_exact(trainee: Trainee, own: _Outcome) -> bool:
    """Whether float32 is computed with all its digits."""
    whole = torch.get_float32_matmul_precision() == "highest"
    return whole and own.logits.dtype == torch.float32 and trainee.compute is None


def _rounding(trainee: Trainee, documents: Sequence[Tensor], own: _Outcome) -> dict[str, float]:
    """What the model's own two kernels differ by; where it has but one, what one rounding of its embeddings does."""
    kernel = right_own(trainee.language_model)
    digits = torch.finfo(trainee.compute or own.logits.dtype).eps
    noise = digits / 2 if kernel == "eager" else 0.0
    apart = _separate(trainee, documents, kernel, noise).distances(own)
    return {what: max(_ROUNDING * apart[what], digits) for what in apart}
