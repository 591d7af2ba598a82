"""Ranges, lists and multiples of a search space."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.config.load import compose_run
from app.sweeps.search_space import Dimension, Range, dimensions_in, multiply_out


def dimension(key: str, given: Any) -> Dimension:
    (found,), problems = dimensions_in({key: given})
    assert problems == []
    return found


def problem(key: str, given: Any) -> str:
    found, (only,) = dimensions_in({key: given})
    assert found == []
    return only


@pytest.mark.parametrize(
    ("key", "given", "expected"),
    [
        ("optimizer.lr", {"low": "1e-5", "high": 1e-3, "log": True}, Range("optimizer.lr", 1e-5, 1e-3, log=True)),
        ("optimizer.lr", {"low": "0.1x", "high": "10x"}, Range("optimizer.lr", 0.1, 10.0, is_relative=True)),
        ("adapter.r", {"low": 4, "high": 64, "log": True}, Range("adapter.r", 4, 64, log=True, is_whole=True)),
        ("adapter.r", {"low": "0.5x", "high": "2x"}, Range("adapter.r", 0.5, 2.0, is_relative=True)),
        ("adapter.dropout", {"low": 0, "high": 0.3, "step": 0.1}, Range("adapter.dropout", 0.0, 0.3, step=0.1)),
        (
            "training.max_steps",
            {"low": 1, "high": 9, "step": 4},
            Range("training.max_steps", 1, 9, step=4, is_whole=True),
        ),
    ],
)
def test_range_parsed(key: str, given: dict[str, Any], expected: Range) -> None:
    assert dimension(key, given) == expected


@pytest.mark.parametrize(
    ("key", "values", "texts"),
    [
        ("adapter.r", [8, 16], ["8", "16"]),
        ("optimizer.lr", ["1e-3", 0.01], ["0.001", "0.01"]),
        ("optimizer.lr", ["0.5x", "1X", "2.5e1x"], ["0.5x", "1X", "2.5e1x"]),
        ("recipe", ["lora", "full"], ["lora", "full"]),
        ("adapter.targets", [["q_proj", "v_proj"], ["all-linear"]], ["[q_proj,v_proj]", "[all-linear]"]),
        ("training.max_steps", [None, 5], ["null", "5"]),
        ("batching.packing", [True, False], ["True", "False"]),
        ("dataset.path", ["a, b.jsonl", "c's"], ["'a, b.jsonl'", "'c\\'s'"]),
        ("dataset.columns", [{"text": "a b"}, {"text": "c"}], ["{text:'a b'}", "{text:c}"]),
        ("adapter.r", [8], ["8"]),
    ],
)
def test_list_parsed(key: str, values: list[Any], texts: list[str]) -> None:
    found = dimension(key, values).texts
    assert [text.replace(": ", ":") for text in found] == [f"{key}={text}" for text in texts]


WRONG = [
    ("optimizer.lr", {"low": 2, "high": 1}, "low must be below high."),
    ("optimizer.lr", {"low": 0, "high": 1, "log": True}, "low must be above 0 for log."),
    ("optimizer.lr", {"low": 0.1, "high": "inf"}, "low and high must be numbers"),
    ("optimizer.lr", {"low": 0.1, "high": "10x"}, "low and high must be numbers, or both multiples"),
    ("optimizer.lr", {"low": 1, "high": 2, "step": 0}, "step must be a number above 0, and does not go with log."),
    ("optimizer.lr", {"low": 1, "high": 2, "step": "x"}, "step must be a number above 0, and does not go with log."),
    (
        "optimizer.lr",
        {"low": 1, "high": 2, "step": 0.5, "log": True},
        "step must be a number above 0, and does not go with log.",
    ),
    ("optimizer.lr", {"low": 1, "high": 2, "log": "no"}, "log must be true or false."),
    ("adapter.r", {"low": 1, "high": 2.5}, "expected whole numbers."),
    ("optimizer.lr", {"low": 1}, "expected low: and high:,"),
    ("optimizer.lr", {"low": 1, "high": 2, "lg": True}, "expected low: and high:, with log: true or step: if wanted."),
    ("model.path", {"low": 1, "high": 2}, "model.path takes no numbers. Give a list of values."),
    ("recipe", {"low": 1, "high": 2}, "recipe takes no numbers."),
    ("optimiser.lr", {"low": 1, "high": 2}, "optimiser.lr is not a key. Did you mean optimizer.lr?"),
    ("optimiser.lr", ["1x", "2x"], "optimiser.lr is not a key. Did you mean optimizer.lr?"),
    ("adapter.r", [], "expected values, [a, b], or a range"),
    ("adapter.r", 8, "expected values, [a, b], or a range"),
]


@pytest.mark.parametrize(("key", "given", "message"), WRONG, ids=[f"{key}={given}" for key, given, _ in WRONG])
def test_dimension_invalid_refused(key: str, given: Any, message: str) -> None:
    assert message in problem(key, given)


@given(st.floats(1e-9, 1e9), st.floats(1.001, 1e6), st.floats(0, 1))
def test_range_rounded_stays_inside(low: float, ratio: float, place: float) -> None:
    each = Range("optimizer.lr", low, low * ratio)
    number = min(low + (low * ratio - low) * place, each.high)
    near = each.rounded(number)
    assert each.has(near)
    assert near == pytest.approx(number, rel=1e-3)
    assert float(each.text(near).partition("=")[2]) == near
    assert [float(text.partition("=")[2]) for text in each.texts] == [each.low, each.high]


def test_range_numbers() -> None:
    steps = Range("adapter.dropout", 0.0, 0.35, step=0.1)
    assert [steps.number(place) for place in range(int(steps.count))] == [0.0, 0.1, 0.2, 0.3]
    assert [steps.has(number) for number in (0.3, 0.25, 0.35, -0.1)] == [True, False, False, False]
    whole = Range("adapter.r", 2, 5, is_whole=True)
    assert (whole.count, whole.number(3), whole.has(3)) == (4, 5, True)
    assert Range("optimizer.lr", 0.1, 0.2).count == math.inf


def test_multiply_out_by_own_value() -> None:
    found = multiply_out(
        [("recipe=full", "optimizer.lr=2x"), ("recipe=lora", "adapter.r=8", "optimizer.lr=2x", "adapter.r=0.4x")],
        {"optimizer.lr", "adapter.r"},
    )
    full, lora = (compose_run([f"recipe={recipe}"]).optimizer.lr for recipe in ("full", "lora"))
    assert found == [
        ("recipe=full", f"optimizer.lr={2 * full:.4g}"),
        ("recipe=lora", f"optimizer.lr={2 * lora:.4g}", "adapter.r=3"),
    ]
