"""Layers that are given the same rows, such as q, k and v of attention: which they are, and how one call serves all.

A model calls them one after another. The first of them computes for all, and the others hand out what is there, if they
are given the very same tensor. That happens inside one call of their parent, and nothing outlives it.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from app.model.fused.adapted import Adapted, together

Forward = Callable[..., Any]


class Shared:
    """What the first of several layers computed for the others, while their parent's forward runs."""

    def __init__(self, layers: tuple[Adapted, ...]) -> None:
        self.layers = layers
        self._inside = False
        self._given: tuple[Any, ...] = ()
        self._left: dict[int, Tensor] = {}

    def parent(self, own: Forward) -> Forward:
        """The forward of their parent, inside of which they are served."""

        @wraps(own)
        def forward(*args: Any, **kwargs: Any) -> Any:
            self._inside = True
            try:
                return own(*args, **kwargs)
            finally:
                self._inside = False
                self._forget()

        return forward

    def member(self, place: int, alone: Forward, usable: Callable[[], bool]) -> Forward:
        """The forward of one of them; `alone` is what it computes by itself, `usable` asks after all of them."""

        @wraps(alone)
        def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            inside = self._inside and not x.is_inference()  # such a tensor does not tell when it is changed
            if args or kwargs or not inside or not usable():
                return alone(x, *args, **kwargs)
            return self._of(place, x)

        return forward

    def _of(self, place: int, x: Tensor) -> Tensor:
        given = (x, x._version, torch.is_grad_enabled())
        there = place in self._left and self._given[0] is x and self._given[1:] == given[1:]
        if not there:
            self._given, self._left = given, dict(enumerate(together(x, self.layers)))
        out = self._left.pop(place)
        if not self._left:
            self._forget()
        return out

    def _forget(self) -> None:
        self._given, self._left = (), {}


def same_rows(
    network: nn.Module, members: Iterable[nn.Module], run: Callable[[], Any]
) -> list[tuple[nn.Module, list[nn.Module]]]:
    """Which of `members` their parent gives one and the same tensor, each once, as seen while it runs."""
    wanted = set(members)
    seen: dict[nn.Module, list[list[nn.Module]]] = {}
    hooks: list[RemovableHandle] = []
    for parent in network.modules():
        children = [child for child in parent.children() if child in wanted]
        if len(children) > 1:
            hooks.extend(_watch(parent, children, seen))
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return [(parent, group) for parent, groups in seen.items() for group in groups]


def _watch(
    parent: nn.Module, children: list[nn.Module], seen: dict[nn.Module, list[list[nn.Module]]]
) -> Iterator[RemovableHandle]:
    calls: list[tuple[nn.Module, Any]] = []  # tensors are kept until it is settled which are the same

    def settle(*_of_parent: Any) -> None:
        once = [(child, x) for child, x in calls if [other for other, _ in calls].count(child) == 1]
        by_rows: dict[int, list[nn.Module]] = {}
        for child, x in once:
            by_rows.setdefault(id(x), []).append(child)
        found = [group for group in by_rows.values() if len(group) > 1]
        seen[parent] = [group for group in seen.get(parent, found) if group in found]
        calls.clear()

    for child in children:
        yield child.register_forward_pre_hook(
            lambda module, given: calls.append((module, given[0] if len(given) == 1 else given))
        )
    yield parent.register_forward_hook(settle)
