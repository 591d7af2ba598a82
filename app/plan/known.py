"""What was made for one plan and serves others."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from app.plan.passes import Evaluation, Passes
from app.plan.share import Division

Made = TypeVar("Made")


class Shared(Generic[Made]):
    """By all that it depends on, which is compared, not hashed: configs can be changed."""

    def __init__(self) -> None:
        self._found: list[tuple[tuple[Any, ...], Made]] = []

    def of(self, make: Callable[[], Made], *what: Any) -> Made:
        """Made where nothing is known of it."""
        for known, made in self._found:
            if known == what:
                return made
        self._found.append((what, make()))
        return self._found[-1][1]


@dataclass(frozen=True, slots=True)
class Known:
    """Of several plans."""

    bases: Shared[Any] = field(default_factory=Shared)  # networks on meta, of all layers
    passes: Shared[Passes] = field(default_factory=Shared)
    evaluations: Shared[Evaluation] = field(default_factory=Shared)
    divisions: Shared[Division] = field(default_factory=Shared)
