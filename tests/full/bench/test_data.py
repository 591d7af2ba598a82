"""What the benchmark of preparation compares: our rows are those of transformers' own masks; its verdict is right."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from app.assets import ROOT
from scripts.bench import data
from tests.harness.marks import requires_trl

ROWS = 40


def by_transformers(chats: Path) -> Iterator[data.Row]:
    """By the marks that the shipped template has for it."""
    tokenizer = AutoTokenizer.from_pretrained(str(ROOT / "tiny"))
    for line in chats.read_text().splitlines():
        made: Any = tokenizer.apply_chat_template(
            json.loads(line)["messages"], return_dict=True, return_assistant_tokens_mask=True
        )
        yield np.asarray(made["input_ids"], np.int32), np.asarray(made["assistant_masks"], np.bool_)


def test_prepared_rows_equal_marks_of_template(tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    data.write_chats(chats, ROWS)
    found = data.ours(chats, tmp_path)
    assert found["digest"] == data.digest(by_transformers(chats))
    assert found["seconds"] > found["seconds_cached"] > 0
    assert found["loader_tokens_per_second"] > 0
    other = tmp_path / "again.jsonl"
    data.write_chats(other, ROWS)
    assert other.read_bytes() == chats.read_bytes()


@pytest.mark.parametrize(("digest", "code"), [("a", 0), ("b", 1)])
def test_verdict_of_different_rows_fails(digest: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    facts = {"seconds_cached": 0.1, "loader_tokens_per_second": 1.0}
    lines = [
        {"framework": "ours", "rows": 10, "seconds": 1.0, "digest": "few", **facts},
        {"framework": "ours", "rows": 50, "seconds": 1.0, "digest": "a", **facts},
        {"framework": "trl", "rows": 50, "seconds": 2.0, "digest": digest},
        {"framework": "trl_parallel", "rows": 50, "seconds": 4.0, "digest": "a"},
    ]
    assert data.verdict(lines) == code
    said = capsys.readouterr().out
    assert "ours 2.00x" in said
    assert "ours 4.00x" in said


@requires_trl
def test_all_contenders_prepare_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.jsonl"
    monkeypatch.setattr("sys.argv", ["data", "--rows", "50", "--rounds", "1", "--out", str(out)])
    assert data.main() == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["framework"] for line in lines] == ["ours", "ours", "trl", "trl_parallel"]
    assert all(line["versions"]["torch"] for line in lines)
