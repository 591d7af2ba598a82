"""The sample data that ships: small, and no question that is held out is trained on."""

import json
from typing import Any

from app.assets import ROOT


def shipped(name: str) -> list[list[dict[str, Any]]]:
    lines = (ROOT / "sample" / name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["messages"] for line in lines]


def first_questions(name: str) -> set[str]:
    return {next(m["content"] for m in messages if m["role"] == "user") for messages in shipped(name)}


def test_assets_stay_small() -> None:
    assert sum(path.stat().st_size for path in ROOT.rglob("*") if path.is_file()) < 6_000_000
    assert (ROOT / "sample" / "train.jsonl").stat().st_size < 1_200_000


def test_eval_questions_are_not_in_training() -> None:
    assert not first_questions("train.jsonl") & first_questions("eval.jsonl")
