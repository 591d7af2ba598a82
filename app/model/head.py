"""The head of a transformers model as a function: logits of hidden states by the model's own forward.

Its backbone is replaced by the states, so that whatever a kind does around its head (soft-capping, scaling, a
transform) stays right.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from app.batch import IGNORE

Head = Callable[[Tensor], Tensor]  # [n, hidden] -> [n, vocabulary]


def own_head(lm: Any) -> Head:
    """The head of a transformers model as a function of hidden states."""
    prefix: str = lm.base_model_prefix

    def head(rows: Tensor) -> Tensor:
        stub = BackboneStub(rows[None])
        lm.__dict__[prefix] = (
            stub  # setattr would refuse a non-module; an instance attribute wins over the module
        )
        try:
            logits: Tensor = lm(input_ids=None, use_cache=False).logits
        finally:
            del lm.__dict__[prefix]
        return logits[0]

    return head


class BackboneStub:
    """Stands in for the backbone and for its output: the hidden states it was made with, None for all else.

    Kinds ask for what the others do not have: router logits, cross attentions, a decoder inside the backbone.
    """

    def __init__(self, hidden: Tensor, pooled: Tensor | None = None) -> None:
        self.last_hidden_state = hidden
        self._parts = (hidden,) if pooled is None else (hidden, pooled)

    @property
    def decoder(self) -> "BackboneStub":
        """No attribute: a cycle would keep the rows until Python looks for cycles."""
        return self

    def __call__(self, *_args: Any, **_kwargs: Any) -> "BackboneStub":
        """Whatever it is asked."""
        return self

    def __getitem__(self, index: int) -> Tensor:
        return self._parts[index]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def in_backbone(lm: Any, name: str) -> bool:
    """Whether a module or weight of this name is no part of the head; a pooler inside the backbone is."""
    inside = f"{lm.base_model_prefix}."
    return name.startswith(inside) and name.removeprefix(inside).partition(".")[0] != "pooler"


def head_parameters(lm: Any) -> list[nn.Parameter]:
    """The trained parameters outside the backbone, each once; a head tied to the embedding counts."""
    named = lm.named_parameters(remove_duplicate=False)
    outside = {id(p): p for name, p in named if not in_backbone(lm, name) and p.requires_grad}
    return list(outside.values())


def pooled_head(lm: Any) -> Head:
    """The head of a transformers model as a function of the states that it pools, each a document of one token."""
    prefix: str = lm.base_model_prefix
    config = lm.config.get_text_config()

    def head(rows: Tensor) -> Tensor:
        states = rows[:, None]
        pooler = getattr(lm.base_model, "pooler", None)
        stub = BackboneStub(states, None if pooler is None else pooler(states))
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


def keep_head_in_fp32(lm: nn.Module) -> None:
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
    return not in_backbone(lm, name)


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
