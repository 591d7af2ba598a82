"""The head of a transformers model as a function: logits of hidden states, or of pooled ones, by its own forward.

The backbone is replaced by the states, so that whatever a kind does around its head (soft-capping, scaling, a
transform, a pooler) stays right.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Head = Callable[[Tensor], Tensor]  # [n, hidden] -> [n, vocabulary]


def own_head(lm: Any) -> Head:
    """The head as a function of hidden states."""
    prefix: str = lm.base_model_prefix

    def head(rows: Tensor) -> Tensor:
        own = vars(lm.base_model).items()
        stub = BackboneStub(rows[None], numbers={name: each for name, each in own if isinstance(each, int | float)})
        ids = torch.empty(1, len(rows), dtype=torch.long, device=rows.device)  # of which kinds read the shape
        lm.__dict__[prefix] = stub  # setattr refuses a non-module; an instance attribute hides the module
        try:
            logits: Tensor = lm(input_ids=ids, use_cache=False).logits
        finally:
            del lm.__dict__[prefix]
        return logits[0]

    return head


class BackboneStub:
    """Replaces the backbone and its output: the given hidden states, the backbone's numbers, None for everything else.

    Kinds read what others do not have: router logits, cross attentions, a decoder inside the backbone, a multiplier.
    """

    def __init__(
        self, hidden: Tensor, pooled: Tensor | None = None, numbers: Mapping[str, float] | None = None
    ) -> None:
        vars(self).update(numbers or {})
        self.last_hidden_state = hidden
        self._parts = (hidden,) if pooled is None else (hidden, pooled)

    @property
    def decoder(self) -> "BackboneStub":
        """A property, because an attribute would be a reference cycle that keeps the rows until the next collection."""
        return self

    def __call__(self, *_args: Any, **_kwargs: Any) -> "BackboneStub":
        return self

    def __getitem__(self, index: int) -> Tensor:
        return self._parts[index]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def in_backbone(lm: Any, name: str) -> bool:
    """Whether a module or weight belongs to the backbone; a pooler inside the backbone belongs to the head."""
    inside = f"{lm.base_model_prefix}."
    return name.startswith(inside) and not f"{name}.".startswith(f"{inside}pooler.")


def head_parameters(lm: Any) -> list[nn.Parameter]:
    """The trained parameters of the head, each once; those tied to the embedding included."""
    named = lm.named_parameters(remove_duplicate=False)
    outside = {id(p): p for name, p in named if not in_backbone(lm, name) and p.requires_grad}
    return list(outside.values())


def pooled_head(lm: Any) -> Head:
    """The head as a function of the states that it pools, each a document of one token."""
    prefix: str = lm.base_model_prefix
    config = lm.config.get_text_config()

    def head(rows: Tensor) -> Tensor:
        states = rows[:, None]
        pooler = getattr(lm.base_model, "pooler", None)
        activation = getattr(lm.base_model, "pooler_activation", None)  # beside a pooler that is one layer
        pooled = None if pooler is None else pooler(states) if activation is None else activation(pooler(rows))
        stub = BackboneStub(states, pooled)
        padding = config.pad_token_id
        lm.__dict__[prefix] = stub  # as above
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
    """Names of the modules that make up the head: all beside the backbone, and a pooler inside it."""
    names = [name for name, module in lm.named_children() if _has_weights(module)]
    inside = f"{lm.base_model_prefix}.pooler"
    pooler = [name for name, module in lm.named_modules() if name == inside and _has_weights(module)]
    return [name for name in names if name != lm.base_model_prefix] + pooler


def keep_head_in_fp32(lm: nn.Module) -> None:
    """Cast the head to fp32 in place, whatever the backbone's dtype: it is always trained."""
    for name in head_modules(lm):
        lm.get_submodule(name).float()


def takes_segments(lm: Any) -> bool:
    """Whether the backbone takes token types, which tell the two texts of a pair apart."""
    return "token_type_ids" in inspect.signature(lm.base_model.forward).parameters


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
