"""Labels of rows: their classes and training targets. Token rows store labels as text."""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.data.rows import RowProblem, kind_of

FRACTION = re.compile(r"[-+]?(\d+\.\d*|\.\d+)([eE][-+]?\d+)?|[-+]?\d+[eE][-+]?\d+")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_MAX_LABEL_CHARS = 200  # a longer label is a text in the wrong column
_NOT_A_LABEL = "must be a label (a word or an integer), found"


@dataclass(frozen=True, slots=True)
class Labeling:
    """Interpretation of labels for one problem type."""

    classes: Callable[[str], Sequence[str]]  # of a label, repeated if the label has them repeatedly
    targets: Callable[[str, Sequence[str]], NDArray[Any]]  # from a label and all classes; one line per answer
    problem: Callable[[str], str]  # problem of a label, after the column name; empty if there is none
    # class weights from class counts and the number of rows
    balanced: Callable[[NDArray[np.float64], int], NDArray[np.float64]] | None = None
    named: bool = True  # whether labels are classes; otherwise numbers
    weighs_answers: bool = True  # whether class weights are weights of answers in the mean loss


@dataclass(frozen=True, slots=True)
class KnownLabels:
    """Label type and classes of a run; without classes, all classes of its rows."""

    labeling: str = "single"
    classes: tuple[str, ...] = ()


def as_text(label: Any) -> str:
    """Return a label as text, the same for CSV and Parquet; a list as JSON."""
    if isinstance(label, str):
        label = label.strip()
        if not label.startswith("["):
            return str(label)
        try:
            label = json.loads(label)
        except ValueError:
            return str(label)
    if isinstance(label, list):
        parts = [as_text(part) for part in label if not isinstance(part, list)]
        if len(parts) < len(label):
            raise RowProblem("has a nested list, which is not a label")
        return json.dumps(parts, ensure_ascii=False)
    if isinstance(label, bool | int):
        return str(label).lower()
    if isinstance(label, float) and math.isfinite(label):
        return repr(label)
    raise RowProblem(f"{_NOT_A_LABEL} {kind_of(label)}")


def tags_as_text(tags: list[Any]) -> str:
    """Return the word tags of a row as JSON; RowProblem if they mix names and numbers."""
    if len({isinstance(tag, bool | int | float) for tag in tags}) > 1:
        raise RowProblem("mixes numbers and names; use one of them in all rows")
    return as_text(tags)


def parts_of(label: str) -> list[str]:
    """Return the parts of a list label, or the label itself."""
    if not label.startswith("["):
        return [label]
    try:
        parts: list[str] = json.loads(label)
    except ValueError:
        return [label]
    return parts


def _single_problem(label: str) -> str:
    if label.startswith("[") and parts_of(label) != [label]:
        return (
            f"{_NOT_A_LABEL} a list: set task.problem=multi for several labels per row, or task.problem=regression for "
            "numbers"
        )
    if FRACTION.fullmatch(label):
        return (
            f"is {label}, but a label must be a word or an integer: set task.problem=regression for numbers, or name "
            "the classes ('low' and 'high', or 4 instead of 4.0)"
        )
    return _name_problem(label)


def _name_problem(label: str) -> str:
    if not label:
        return f"{_NOT_A_LABEL} empty"
    return f"has {len(label):,} characters: this is a text, not a label" if len(label) > _MAX_LABEL_CHARS else ""


def _parts_problem(label: str, fraction: str) -> str:
    """Return the problem of a label with several parts; `fraction` is the one of fractional numbers."""
    for part in dict.fromkeys(parts_of(label)):
        if FRACTION.fullmatch(part):
            return f"has {part}, but {fraction}"
        if problem := _name_problem(part):
            return problem
    return ""


_FRACTION_OF_SEVERAL = (
    "labels must be words or integers: set task.problem=regression for numbers, or replace a list of shares (0.0, 1.0) "
    "with the names of the labels that apply"
)


def _number_problem(label: str) -> str:
    parts = parts_of(label)
    words = [part for part in parts if not _NUMBER.fullmatch(part) or not math.isfinite(float(part))]
    if words or not parts:
        shown = repr(words[0][:_MAX_LABEL_CHARS]) if words else "empty"
        return f"must be a number, found {shown}: set task.problem=single for labels that are words"
    return ""


def _outputs(label: str) -> Sequence[str]:
    """Return the names of the numbers of a row."""
    count = len(parts_of(label))
    return ("value",) if count == 1 else tuple(f"value_{number}" for number in range(1, count + 1))


def _of_equal_sums(occurrences: NDArray[np.float64], _rows: int) -> NDArray[np.float64]:
    """Return weights with equal totals for all classes and a mean of 1, as `balanced` in scikit-learn."""
    return np.asarray(occurrences.sum() / (len(occurrences) * occurrences), np.float64)


def class_weights(labeling: str, classes: Sequence[str], counts: Mapping[str, int], rows: int) -> list[float]:
    """Return the weights of `task.class_weights=balanced`; ValueError names a class without a weight."""
    balanced = LABELINGS[labeling].balanced
    assert balanced is not None
    for name in classes:
        if not counts.get(name):
            raise ValueError(f"no training row has the label {name}")
    weights = balanced(np.array([counts[name] for name in classes], np.float64), rows)
    for name, weight in zip(classes, weights, strict=True):
        if weight <= 0:
            raise ValueError(f"every training row has the label {name}")
    return [float(f"{weight:.6g}") for weight in weights]


LABELINGS: dict[str, Labeling] = {
    "single": Labeling(
        lambda label: (label,),
        lambda label, classes: np.array([classes.index(label)], np.int32),
        _single_problem,
        _of_equal_sums,
    ),
    "multi": Labeling(
        lambda label: tuple(dict.fromkeys(parts_of(label))),
        lambda label, classes: np.isin(np.array(classes, object), parts_of(label)).astype(np.float32)[None],
        partial(_parts_problem, fraction=_FRACTION_OF_SEVERAL),
        # positives of a class weigh as much as its negatives: `pos_weight` of torch
        lambda occurrences, rows: np.asarray((rows - occurrences) / occurrences, np.float64),
        weighs_answers=False,
    ),
    "tokens": Labeling(
        parts_of,
        lambda label, classes: np.array([classes.index(part) for part in parts_of(label)], np.int32),
        partial(_parts_problem, fraction="a tag must be a name or an integer"),
        _of_equal_sums,
    ),
    "regression": Labeling(
        _outputs,
        lambda label, _classes: np.array([[float(part) for part in parts_of(label)]], np.float32),
        _number_problem,
        named=False,
    ),
}
