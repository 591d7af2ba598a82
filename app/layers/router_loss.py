"""The load-balancing loss of a mixture's routers, of each document by itself: no split of rows changes it.

On one document it is transformers' own `load_balancing_loss_func`, which else depends on the batch and its padding.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from app.batch import IGNORE, Batch
from app.config.schema import AdapterConfig, TaskConfig
from app.errors import ConfigError

_MOST = 0.01  # of `auto`: the files of gpt-oss say 0.9, which would outweigh the loss of the tokens


def coefficient_of(task: TaskConfig, adapter: AdapterConfig, lm: Any) -> float:
    """What the loss is multiplied with: of `auto` that of config.json where experts or routers are trained, but at most
    0.01; else 0.
    """
    numbers = lm.config.get_text_config()
    has_loss = bool(_routers(lm)) and getattr(numbers, "num_experts_per_tok", None) is not None
    known = getattr(numbers, "router_aux_loss_coef", None) if has_loss else None
    if task.router_loss == "auto":
        return min(known or 0.0, _MOST) if adapter.kind == "none" or adapter.experts else 0.0
    if known is None and task.router_loss:
        raise ConfigError(
            f"task.router_loss={task.router_loss:g}: a model of kind {lm.config.model_type} has no router that "
            "transformers has a load-balancing loss for. Set task.router_loss=0."
        )
    return float(task.router_loss)


def _routers(network: nn.Module) -> list[tuple[nn.Module, int]]:
    """The modules that give router logits, by transformers' own table, and which of their outputs these are."""
    kinds: dict[Any, int] = {}
    for module in network.modules():
        found = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits", ())
        kinds |= {each.target_class: each.index for each in (found if isinstance(found, (list, tuple)) else [found])}
    return [(module, kinds[type(module)]) for module in network.modules() if type(module) in kinds]


class RouterLoss:
    """Reads the logits of all routers of a training pass."""

    def __init__(self, lm: Any, coefficient: float) -> None:
        self.coefficient = coefficient
        self.sum = torch.zeros(())  # of the last pass, without its gradient
        self._chosen = int(lm.config.get_text_config().num_experts_per_tok)
        self._logits: list[Tensor] | None = None  # None: not a training pass, or one that recomputes a layer
        for module, index in _routers(lm):
            module.register_forward_hook(partial(self._note, index))

    def _note(self, index: int, _router: nn.Module, _arguments: Any, output: Any) -> None:
        if self._logits is not None:
            self._logits.append(output[index].flatten(0, -2))

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Context of the pass of which the loss is taken."""
        self._logits = []
        try:
            yield
        finally:
            self._logits = None

    def of(self, batch: Batch) -> Tensor:
        """The sum over documents, each times the weight of its labels, as the loss is: inside `reading`."""
        assert self._logits, "no router was called"
        size, experts = len(batch.lengths), self._logits[0].shape[-1]
        owner, lengths = _document_of_token(batch)  # `size` of padding
        chosen = torch.zeros((size + 1) * experts, device=owner.device)
        likely = torch.zeros(size + 1, experts, device=owner.device)
        for logits in self._logits:
            shares = logits.float().softmax(-1)
            places = owner[:, None] * experts + shares.topk(self._chosen, dim=-1).indices
            chosen = chosen.index_add(0, places.flatten(), torch.ones_like(places.flatten(), dtype=torch.float32))
            likely = likely.index_add(0, owner, shares)
        balance = experts * (chosen.view(size + 1, experts) * likely).sum(-1)[:-1]
        balance = balance / (lengths * len(self._logits)).square()
        weights = (batch.targets != IGNORE).float()
        if batch.weights is not None:
            weights = weights * batch.weights.per_target
        weight = torch.zeros(size + 1, device=owner.device).index_add(0, owner[batch.label_rows], weights)[:-1]
        total = (balance * weight).sum()  # no product of vectors, which autocast would compute in 16 bits
        self.sum = total.detach()
        return total


def _document_of_token(batch: Batch) -> tuple[Tensor, Tensor]:
    """The number of each position's document, and the documents' lengths: on the device, for which nothing waits."""
    device, size = batch.ids.device, len(batch.lengths)
    starts, lengths = (torch.tensor(each).to(device, non_blocking=True) for each in (batch.starts, batch.lengths))
    places = torch.arange(batch.ids.numel(), device=device)
    if not size:  # fills up a step
        return torch.zeros_like(places), lengths
    owner = torch.searchsorted(starts, places, right=True) - 1
    return torch.where(places - starts[owner] < lengths[owner], owner, size), lengths
