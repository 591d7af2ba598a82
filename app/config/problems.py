"""Problems of a classification: what a label is, as facts that the data, the model and messages share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

THRESHOLD = 0.5  # a label of several is given where it is at least so likely


@dataclass(frozen=True, slots=True)
class Problem:
    """How the outputs of a model with one head for each label are read."""

    problem_type: str  # of config.json
    values: str  # what `app.generate` writes of each output, for its files
    answer: Callable[[Mapping[str, float]], Any]  # from the value of each output
    least_labels: int  # that a model must have
    named: bool = True  # whether outputs are classes by their names, which may have weights


def text_of(answer: Any) -> str:
    """An answer for people."""
    if isinstance(answer, Mapping):
        return ", ".join(f"{name} {value:.4g}" for name, value in answer.items())
    if isinstance(answer, list):
        return ", ".join(answer) or "none"
    return answer if isinstance(answer, str) else f"{answer:.4g}"


def _likeliest(values: Mapping[str, float]) -> str:
    return max(values, key=lambda name: values[name])


def _likely(values: Mapping[str, float]) -> list[str]:
    return [name for name, value in values.items() if value >= THRESHOLD]


def _numbers(values: Mapping[str, float]) -> float | dict[str, float]:
    return dict(values) if len(values) > 1 else next(iter(values.values()))


PROBLEMS: dict[str, Problem] = {
    "single": Problem("single_label_classification", "probabilities", _likeliest, 2),
    "multi": Problem("multi_label_classification", "probabilities", _likely, 1),
    "regression": Problem("regression", "values", _numbers, 1, named=False),
}
