"""Several sources: shares that are exact, rows that never change sides, numbers that add up."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.config.schema import DatasetConfig, MixSource
from app.data.data_report import RowCounts
from app.data.prepare import Data, prepare, total
from app.data.token_dataset import TokenRows
from app.errors import DataError
from tests.data.small import config, greetings, locations, tokenizer, write_chats, write_jsonl


def mixed(folder: Path, mix: dict[str, dict[str, Any]], **changes: Any) -> Data:
    return prepare(config_of(folder, mix, **changes), tokenizer(), str(folder / "cache"))


def config_of(folder: Path, mix: dict[str, dict[str, Any]], **changes: Any) -> DatasetConfig:
    parts = {name: MixSource(path=str(folder / f"{name}.jsonl"), **part) for name, part in mix.items()}
    return replace(config("unused", **changes), path=None, mix=parts)


def answers(rows: TokenRows | None) -> Counter[str]:
    made = tokenizer()
    return Counter() if rows is None else Counter(made.decode(rows.ids(i)) for i in range(len(rows)))


@pytest.fixture
def two(tmp_path: Path) -> Path:
    write_chats(tmp_path / "a.jsonl", *greetings(40))
    write_chats(tmp_path / "b.jsonl", *greetings(20, start=100))
    return tmp_path


@pytest.mark.parametrize(
    ("weight", "each"), [(1, {1: 20}), (3, {3: 20}), (0.25, {1: 5}), (2.5, {2: 10, 3: 10}), (0.01, {})]
)
def test_mix_weight_repeats_rows(two: Path, weight: float, each: dict[int, int]) -> None:
    data = mixed(two, {"a": {}, "b": {"weight": weight}})
    times = Counter(locations(data.train))
    assert {times[f"a.jsonl:{n}"] for n in range(1, 41)} == {1}
    assert Counter(n for place, n in times.items() if place.startswith("b")) == each
    share = data.report.shares["b"]
    assert (share.samples, share.drawn) == (20, sum(n * rows for n, rows in each.items()))
    assert data.report.train.samples == len(data.train) == 40 + share.drawn
    assert data.report.train.tokens == data.train.lengths.sum()
    assert share.tokens + data.report.shares["a"].tokens == data.report.train.tokens
    assert data.report.sources["b"].samples == 20


def test_mix_fraction_is_stable(two: Path) -> None:
    def drawn() -> set[str]:
        return set(answers(mixed(two, {"a": {}, "b": {"weight": 0.5}}).train)) - all_of_a

    all_of_a = set(answers(mixed(two, {"a": {}}).train))
    before = drawn()
    assert drawn() == before
    write_chats(two / "b.jsonl", *greetings(24, start=100))
    after = drawn()
    assert (len(before), len(after)) == (10, 12)
    assert len(before & after) >= 8


def test_mix_weight_zero_not_read(two: Path) -> None:
    (two / "b.jsonl").unlink()
    data = mixed(two, {"a": {}, "b": {"weight": 0}})
    assert list(data.report.sources) == ["a"]
    assert len(data.train) == 40


def test_mix_weight_keeps_cache(two: Path) -> None:
    for weight in (1, 2, 0.5):
        mixed(two, {"a": {}, "b": {"weight": weight}})
    prepare(config(two / "a.jsonl"), tokenizer(), str(two / "cache"))  # nor does taking a source alone
    assert len(list((two / "cache" / "tokens").iterdir())) == 2


def test_mix_settings_of_each_source(two: Path) -> None:
    write_jsonl(two / "c.jsonl", [{"q": "two ", "a": f" and {n}"} for n in range(9)])
    own = {"format": "prompt_completion", "columns": {"prompt": "q", "completion": "a"}, "max_rows": 4}
    data = mixed(two, {"a": {"max_rows": 5}, "b": {}, "c": own}, max_rows=6)
    assert Counter(place.partition(":")[0] for place in locations(data.train)) == {
        "a.jsonl": 5,
        "b.jsonl": 6,
        "c.jsonl": 4,
    }
    assert {name: counts.rows_read for name, counts in data.report.sources.items()} == {"a": 5, "b": 6, "c": 4}
    assert data.report.train.rows_read == 15
    assert "two  and 3" in " ".join(answers(data.train))


def test_mix_problem_names_source(two: Path) -> None:
    write_jsonl(two / "c.jsonl", [])
    with pytest.raises(DataError, match=r"dataset\.mix\.c\.path=.*c\.jsonl: has no rows"):
        mixed(two, {"a": {}, "c": {}})
    with pytest.raises(DataError, match=r"dataset\.mix\.d\.path=.*d\.jsonl: no such file"):
        mixed(two, {"a": {}, "d": {}})


def test_mix_duplicates_counted_or_dropped(tmp_path: Path) -> None:
    write_chats(tmp_path / "a.jsonl", *greetings(10), *greetings(3))
    write_chats(tmp_path / "b.jsonl", *greetings(5, start=8))
    plain = mixed(tmp_path, {"a": {}, "b": {}})
    assert [counts.duplicates for counts in plain.report.sources.values()] == [3, 2]
    assert (len(plain.train), plain.report.train.duplicates_dropped) == (18, 0)
    assert any("2 duplicate samples: kept" in line for line in plain.report.lines())
    data = mixed(tmp_path, {"a": {}, "b": {}}, deduplicate=True)
    assert set(answers(data.train).values()) == {1}
    assert locations(data.train) == [f"a.jsonl:{n}" for n in range(1, 11)] + [f"b.jsonl:{n}" for n in (3, 4, 5)]
    assert [counts.duplicates_dropped for counts in data.report.sources.values()] == [3, 2]
    assert "train b: 2 duplicate samples: dropped" in data.report.lines()


def test_duplicate_other_loss_mask_is_none(tmp_path: Path) -> None:
    rows = [{"prompt": "two", "completion": " and two"}, {"prompt": "two and", "completion": " two"}]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    data = prepare(config(path, "prompt_completion", deduplicate=True), tokenizer(), str(tmp_path / "cache"))
    assert np.array_equal(data.train.ids(0), data.train.ids(1))
    assert len(data.train) == 2


def test_mix_row_stays_in_its_split(two: Path) -> None:
    """Not when rows are added, repeated, weighted, deduplicated, or come in another mix."""
    sides: dict[str, str] = {}

    def check(data: Data) -> None:
        for side, rows in (("train", data.train), ("eval", data.eval)):
            for text in answers(rows):
                assert sides.setdefault(text, side) == side

    more = {"eval_fraction": 0.3}
    check(mixed(two, {"a": {}, "b": {}}, **more))
    write_chats(two / "a.jsonl", *greetings(30, start=500), *greetings(40), *greetings(40))
    check(mixed(two, {"a": {}}, **more))
    check(mixed(two, {"b": {"weight": 3}, "a": {"weight": 0.5}}, **more))
    check(mixed(two, {"a": {}, "b": {}}, deduplicate=True, **more))
    assert set(sides.values()) == {"train", "eval"}
    assert len(sides) == 90


def test_mix_weight_ignored_in_eval(two: Path) -> None:
    plain, weighted = (mixed(two, {"a": {"weight": w}, "b": {"weight": w}}, eval_fraction=0.3) for w in (1, 4))
    assert plain.eval is not None
    assert weighted.eval is not None
    assert plain.eval.fingerprint == weighted.eval.fingerprint
    assert len(weighted.train) == 4 * len(plain.train)
    held = [counts.held_out for counts in weighted.report.sources.values()]
    assert sum(held) == len(weighted.eval) == weighted.report.train.held_out
    assert [c.samples + h for c, h in zip(weighted.report.sources.values(), held, strict=True)] == [40, 20]


def test_mix_report_lines(two: Path) -> None:
    report = mixed(two, {"a": {}, "b": {"weight": 2}}).report
    assert report.lines()[:5] == [
        "train a: 40 rows, 830 tokens, 310 trained (37%)",
        "train a: weight 1, 40 samples per epoch, 48.5% of the tokens",
        "train b: 20 rows, 440 tokens, 180 trained (41%)",
        "train b: weight 2, 40 samples per epoch, 51.5% of the tokens",
        "train: 80 samples, 1,710 tokens, 670 trained per epoch",
    ]


@given(st.lists(st.integers(0, 9), min_size=3, max_size=3), st.lists(st.text(max_size=3), max_size=5))
def test_counts_total_adds_up(numbers: list[int], reasons: list[str]) -> None:
    parts = [RowCounts(source="x", rows_read=n, longest=n) for n in numbers]
    for reason in reasons:
        parts[len(reason) % 3].bad("place", reason)
    summed = total(parts)
    assert (summed.rows_read, summed.longest) == (sum(numbers), max(numbers))
    assert (summed.bad_rows, summed.source) == (len(reasons), "x + x + x")
    assert sum(summed.bad_by_reason.values()) == len(reasons)
