"""Who is first, and what is shown of the rest."""

import io
import shlex
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from app.sweep.trials import Outcome, best, leaderboard, ranked


def outcome(number: int, objective: float | None, status: str = "finished", **more: Any) -> Outcome:
    swept = (f"++optimizer.lr={number}e-3", "recipe=lora")
    values = {"overrides": (*swept, "dataset.path=a b"), "swept": swept, "folder": f"s/{number}"}
    return Outcome(**{**values, "number": number, "objective": objective, "status": status, **more})


def shown(*outcomes: Outcome) -> list[list[str]]:
    text = io.StringIO()
    Console(file=text, width=200).print(leaderboard(outcomes))
    return [line.split() for line in text.getvalue().splitlines()]


@given(st.lists(st.none() | st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=8))
def test_the_lowest_is_first_and_what_has_none_is_last(objectives: list[float | None]) -> None:
    outcomes = [outcome(number, value) for number, value in enumerate(objectives, 1)]
    found = [each.objective for each in ranked(outcomes)]
    known = [value for value in objectives if value is not None]
    assert found == sorted(known) + [None] * (len(objectives) - len(known))
    winner = best(outcomes)
    assert (winner and winner["objective"]) == (min(known) if known else None)


def test_the_best_is_a_line_to_paste() -> None:
    winner = best([outcome(1, 3.0), outcome(2, 2.0), outcome(3, None, "failed")])
    assert winner is not None
    assert winner["line"] == "++optimizer.lr=2e-3 recipe=lora 'dataset.path=a b'"
    assert shlex.split(winner["line"]) == winner["overrides"]
    assert (winner["number"], winner["folder"]) == (2, "s/2")
    assert best([outcome(1, None, "dry_run")]) is None


def test_the_table_has_a_column_for_each_swept_setting() -> None:
    header, *rows = shown(
        outcome(1, 3.0, steps=40, tokens_per_second=5125.0),
        outcome(2, None, "failed", exit_code=2),
        outcome(3, 2.5, steps=1200, tokens_per_second=900.0),
        outcome(4, None, steps=7),
        outcome(5, None, "pending"),
    )
    assert header == ["rank", "trial", "objective", "steps", "tokens/s", "optimizer.lr", "recipe", "status"]
    assert rows == [
        ["1", "3", "2.5000", "1200", "900", "3e-3", "lora", "finished"],
        ["2", "1", "3.0000", "40", "5.1k", "1e-3", "lora", "finished"],
        ["-", "2", "-", "-", "-", "2e-3", "lora", "failed", "(2)"],
        ["-", "4", "-", "7", "-", "4e-3", "lora", "finished"],
        ["-", "5", "-", "-", "-", "5e-3", "lora", "pending"],
    ]


def test_nothing_has_begun() -> None:
    assert shown() == [["rank", "trial", "objective", "steps", "tokens/s", "status"]]


def test_a_sweep_without_swept_settings_has_a_table_too() -> None:
    header, row = shown(outcome(1, 3.0, swept=()))
    assert header[-1] == "status"
    assert row[-1] == "finished"
