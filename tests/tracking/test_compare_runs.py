"""Differences of two runs: provenance and metrics."""

import json
import math
from typing import Any

import pytest

from app.tracking.compare_runs import compare_content, compare_lines, compare_programs

THEN: dict[str, Any] = {
    "python": "3.11.9",
    "program": {"version": "0.1", "git": {"commit": "a" * 40, "dirty": False}},
    "packages": {"torch": "2.13.0", "peft": "0.21.2"},
    "hardware": {"device": "cpu", "gpu": None, "cpu": "AVX2"},
    "hashes": {"train": "1" * 64, "eval": None, "tokenizer": "3" * 64},
}


def test_compare_equal_manifests() -> None:
    assert compare_programs(THEN, dict(THEN)) == []
    assert compare_content(THEN, dict(THEN)) == []


def test_compare_programs_names_differences() -> None:
    now = {
        "python": "3.12.1",
        "program": {"version": "0.1", "git": {"commit": "a" * 40, "dirty": True}},
        "packages": {"torch": "2.14.0", "wandb": "0.20"},
        "hardware": {"device": "cuda", "gpu": "a card", "cpu": "AVX2"},
    }
    assert [str(difference) for difference in compare_programs(THEN, now)] == [
        "python: 3.11.9 then, 3.12.1 now",
        "torch: 2.13.0 then, 2.14.0 now",
        "peft: 0.21.2 then, none now",
        "wandb: none then, 0.20 now",
        f"commit: {'a' * 12} then, {'a' * 12} with uncommitted changes now",
        "device: cpu then, cuda now",
        "gpu: none then, a card now",
    ]
    installed = {**THEN, "program": {"version": "0.2", "git": None}}
    assert [difference.name for difference in compare_programs(THEN, installed)] == ["program", "commit"]


def test_compare_content_names_differences() -> None:
    now = {"hashes": {"train": "2" * 64, "eval": "9" * 64, "tokenizer": "3" * 64, "base": "4" * 64}}
    assert [str(difference) for difference in compare_content(THEN, now)] == [
        f"training data: {'1' * 12} then, {'2' * 12} now",
        f"eval data: none then, {'9' * 12} now",
    ]
    with_base = {"hashes": {"base": "5" * 64}}
    assert [difference.name for difference in compare_content(with_base, now)] == ["weights of the base"]


def line(step: int, loss: float | None, **more: float) -> dict[str, Any]:
    return {"step": step, "loss": loss, "lr": 0.1, "grad_norm": 2.0, "tokens_per_second": 3.0, **more}


def test_compare_lines_ignores_clocks_and_missing_lines() -> None:
    then = [line(1, 7.0), line(2, 6.0), {"step": 2, "eval_loss": 5.0}, line(3, None)]
    now = [line(1, 7.0, tokens_per_second=9.0), {"step": 2, "eval_loss": 5.0}, line(3, None), line(4, 1.0)]
    comparison = compare_lines(then, now)
    assert (comparison.lines, comparison.last_step, comparison.first, comparison.largest) == (3, 3, None, None)
    assert comparison.summary() == "3 lines up to step 3, bit-identical"


def test_compare_lines_first_and_largest() -> None:
    then = [line(1, 8.0), line(2, 6.0), {"step": 2, "eval_loss": 5.0}]
    comparison = compare_lines(then, [line(1, 8.0), line(2, 6.0, grad_norm=2.002), {"step": 2, "eval_loss": 4.0}])
    assert comparison.first is not None
    assert comparison.largest is not None
    assert (comparison.first.step, comparison.first.name) == (2, "grad_norm")
    assert comparison.first.relative == pytest.approx(1e-3, rel=1e-2)
    assert (comparison.largest.name, comparison.largest.then, comparison.largest.now) == ("eval_loss", 5.0, 4.0)
    assert comparison.largest.relative == pytest.approx(0.2)
    assert "first:   grad_norm at step 2: 2.0 then, 2.002 now (relative difference 1.0e-03)" in comparison.summary()


def test_compare_lines_missing_number_is_infinite() -> None:
    comparison = compare_lines([line(1, None)], [line(1, 3.0)])
    assert comparison.largest is not None
    assert comparison.largest.relative == math.inf
    assert json.dumps(comparison.largest.as_dict(), allow_nan=False)
