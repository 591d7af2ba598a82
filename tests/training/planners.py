"""A planner with answers of its own."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from app.training.auto_settings import Savings
from app.training.memory import Predicted


@dataclass(frozen=True)
class FixedPlanner:
    """A `RunPlanner` of functions of any arguments."""

    recompute: Callable[..., tuple[Savings, str]] = lambda *_: (Savings(0, 0.6, 0), "")
    bin_tokens: Callable[..., tuple[int, str]] = lambda *_: (512, "so")
    parallel: Callable[..., tuple[str, str]] = lambda *_: ("fsdp", "because")
    predict: Callable[..., Predicted] = lambda *_: Predicted(0, "backward", {})


def planner(**answers: Any) -> Any:
    """A planner with these answers, or functions that give them."""
    methods = {
        name: answer if callable(answer) else (lambda *_, answer=answer: answer) for name, answer in answers.items()
    }
    return FixedPlanner(**methods)
