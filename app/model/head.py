"""The head of a transformers model as a function: logits of hidden states by the model's own forward.

Its backbone is replaced by the states, so that whatever a kind does around its head (soft-capping, scaling, a
transform) stays right.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

Head = Callable[[Tensor], Tensor]  # [n, hidden] -> [n, vocabulary]


def own_head(lm: Any) -> Head:
    """The head of a transformers model as a function of hidden states."""
    prefix: str = lm.base_model_prefix

    def head(rows: Tensor) -> Tensor:
        stub = Given(rows[None])
        lm.__dict__[prefix] = (
            stub  # setattr would refuse a non-module; an instance attribute wins over the module
        )
        try:
            logits: Tensor = lm(input_ids=None, use_cache=False).logits
        finally:
            del lm.__dict__[prefix]
        return logits[0]

    return head


class Given:
    """Stands in for the backbone and for its output: the hidden states it was made with, None for all else.

    Kinds ask for what the others do not have: router logits, cross attentions, a decoder inside the backbone.
    """

    def __init__(self, hidden: Tensor, pooled: Tensor | None = None) -> None:
        self.last_hidden_state = hidden
        self._parts = (hidden,) if pooled is None else (hidden, pooled)

    @property
    def decoder(self) -> "Given":
        """No attribute: a cycle would keep the rows until Python looks for cycles."""
        return self

    def __call__(self, *_args: Any, **_kwargs: Any) -> "Given":
        """Whatever it is asked."""
        return self

    def __getitem__(self, index: int) -> Tensor:
        return self._parts[index]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def is_of_backbone(lm: Any, name: str) -> bool:
    """Whether a module or weight of this name is no part of the head; a pooler inside the backbone is."""
    inside = f"{lm.base_model_prefix}."
    return name.startswith(inside) and name.removeprefix(inside).partition(".")[0] != "pooler"


def head_parameters(lm: Any) -> list[nn.Parameter]:
    """The trained parameters outside the backbone, each once; a head tied to the embedding counts."""
    named = lm.named_parameters(remove_duplicate=False)
    outside = {id(p): p for name, p in named if not is_of_backbone(lm, name) and p.requires_grad}
    return list(outside.values())
