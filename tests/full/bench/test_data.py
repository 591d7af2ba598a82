"""What the benchmark of preparation compares: our rows are those of transformers' own masks; its verdict is right."""

import json
from pathlib import Path

import pytest

from scripts.bench import data
from tests.marks import requires_trl


@requires_trl
def test_all_make_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.jsonl"
    monkeypatch.setattr("sys.argv", ["data", "--rows", "50", "--rounds", "1", "--out", str(out)])
    assert data.main() == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["framework"] for line in lines] == ["ours", "ours", "trl", "trl_parallel"]
    assert all(line["versions"]["torch"] for line in lines)
