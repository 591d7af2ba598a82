"""Models that give one answer for a document: which modules answer, and what they say to one pooled state each."""

import inspect
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from app.batch import IGNORE
from app.model.head import Given, Head, is_of_backbone


def pooled_head(lm: Any) -> Head:
    """The head of a transformers model as a function of the states that it pools, each a document of one token."""
    prefix: str = lm.base_model_prefix
    config = lm.config.get_text_config()

    def head(rows: Tensor) -> Tensor:
        states = rows[:, None]
        pooler = getattr(lm.base_model, "pooler", None)
        stub = Given(states, None if pooler is None else pooler(states))
        padding = config.pad_token_id
        lm.__dict__[prefix] = stub  # as in model.head
        config.pad_token_id = 0 if padding is None else padding  # without one, kinds refuse several documents
        try:
            ids = torch.zeros(states.shape[:2], dtype=torch.long, device=rows.device)
            logits: Tensor = lm(input_ids=ids).logits
        finally:
            del lm.__dict__[prefix]
            config.pad_token_id = padding
        return logits

    return head


def head_modules(lm: nn.Module) -> list[str]:
    """What answers, whole modules: all beside the backbone, and a pooler inside it."""
    names = [name for name, module in lm.named_children() if _has_weights(module)]
    inside = f"{lm.base_model_prefix}.pooler"
    pooler = [name for name, module in lm.named_modules() if name == inside and _has_weights(module)]
    return [name for name in names if name != lm.base_model_prefix] + pooler


def keep_exact(lm: nn.Module) -> None:
    """The head in fp32, in place, whatever the backbone is in: it is trained in any case."""
    for name in head_modules(lm):
        lm.get_submodule(name).float()


def takes_segments(lm: Any) -> bool:
    """Whether the backbone is told of the two sides of a pair."""
    return "token_type_ids" in inspect.signature(lm.base_model.forward).parameters


def class_loss_sum(head: Head, rows: Tensor, targets: Tensor) -> Tensor:
    """The sum over all documents that are not IGNORE, in float32; one graph: classes are few."""
    return F.cross_entropy(head(rows).float(), targets, ignore_index=IGNORE, reduction="sum")


@torch.no_grad()
def class_scores(head: Head, rows: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Of each document its loss and the likeliest class."""
    logits = head(rows).float()
    return F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="none"), logits.argmax(-1)


def is_of_head(lm: nn.Module, name: str) -> bool:
    """Whether a weight belongs to what answers."""
    return not is_of_backbone(lm, name)


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
