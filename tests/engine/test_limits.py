"""Rows are no longer than the model has positions for, and that is said."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from app.engine.limits import within_positions
from tests.engine.conftest import small_run


@pytest.mark.parametrize("key", ["max_position_embeddings", "n_positions"])
def test_a_folder_with_fewer_positions_shortens_the_rows(tmp_path: Path, key: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", key: 100}))
    (tmp_path / "model.safetensors").touch()
    run = small_run()
    run = replace(run, model=replace(run.model, path=str(tmp_path), weights="pretrained"))
    said: list[str] = []
    assert within_positions(run, said.append).dataset.max_length == 100
    assert said == ["note    dataset.max_length=256 -> 100: the model has no more positions"]
    assert run.dataset.max_length == 256, "what the caller has is left alone"


def test_enough_positions_change_nothing() -> None:
    run, said = small_run(), list[str]()
    assert within_positions(run, said.append) is run
    assert said == []
