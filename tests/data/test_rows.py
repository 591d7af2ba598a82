"""Rows that were written come back as they were, and nothing can change them."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.data.rows import TokenRows
from app.data.storage import RowWriter, open_rows

ROWS = [("a.jsonl:1", [5, 6, 7], [0, 1, 1]), ("b ü.jsonl:2", [9], [0]), ("a.jsonl:3", [5, 6, 7], [0, 0, 1])]


def written(folder: Path, rows: list[tuple[str, list[int], list[int]]]) -> TokenRows:
    folder.mkdir(exist_ok=True)
    writer = RowWriter(folder, str(folder))
    for place, ids, trained in rows:
        writer.add(place, np.array(ids, np.int32), np.array(trained, np.bool_), side=len(ids))
    writer.finish({"n": len(rows)})
    found = open_rows(folder)
    assert found is not None
    assert found[1] == {"n": len(rows)}
    return found[0]


def test_rows_come_back(tmp_path: Path) -> None:
    rows = written(tmp_path, ROWS)
    assert len(rows) == 3
    assert rows.lengths.tolist() == [3, 1, 3]
    assert rows.lengths.dtype == np.int32
    for i, (place, ids, trained) in enumerate(ROWS):
        assert rows.place(i) == place
        assert rows.ids(i).tolist() == ids
        assert rows.ids(i).dtype == np.int32
        assert rows.trained(i).tolist() == [bool(t) for t in trained]
        assert rows.trained(i).dtype == np.bool_
    assert rows.num_trained == 3


def test_rows_cannot_be_changed(tmp_path: Path) -> None:
    rows = written(tmp_path, ROWS)
    for values in (rows.ids(0), rows.trained(0), rows.lengths):
        with pytest.raises(ValueError, match="read-only"):
            values[0] = 1


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> TokenRows:
    return written(tmp_path_factory.mktemp("rows"), ROWS)


@given(chosen=st.lists(st.integers(0, 2)))
def test_a_selection_has_the_chosen_rows(three: TokenRows, chosen: list[int]) -> None:
    view = three.select([2, 1, 0]).select(chosen)
    assert [view.place(i) for i in range(len(view))] == [ROWS[2 - i][0] for i in chosen]
    assert [view.ids(i).tolist() for i in range(len(view))] == [ROWS[2 - i][1] for i in chosen]
    assert view.lengths.tolist() == [len(ROWS[2 - i][1]) for i in chosen]
    assert view.num_trained == sum(sum(ROWS[2 - i][2]) for i in chosen)


def test_the_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    rows = written(tmp_path / "a", ROWS)
    moved = [(f"elsewhere {place}", ids, trained) for place, ids, trained in ROWS]
    assert written(tmp_path / "b", moved).fingerprint == rows.fingerprint
    assert rows.select([0, 1, 2]).fingerprint == rows.fingerprint
    other_mask = [(ROWS[0][0], ROWS[0][1], [0, 1, 0]), *ROWS[1:]]
    others = [rows.select([0, 1]), rows.select([1, 0, 2]), written(tmp_path / "c", other_mask)]
    assert len({rows.fingerprint, *(other.fingerprint for other in others)}) == 4


def test_no_rows_at_all(tmp_path: Path) -> None:
    rows = written(tmp_path, [])
    assert len(rows) == 0
    assert rows.lengths.tolist() == []
    assert rows.num_trained == 0
