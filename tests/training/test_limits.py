"""Rows are no longer than the model has positions for, and that is said."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from app.training.limits import within_positions
from tests.training.conftest import small_run


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


@pytest.mark.parametrize("told", [{"pad_token_id": 1}, {}])
def test_places_that_roberta_leaves_unused_are_no_positions(tmp_path: Path, told: dict[str, int]) -> None:
    """Its padding token is 1 whether or not config.json says so."""
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    numbers = {"model_type": "roberta", "max_position_embeddings": 100, "vocab_size": 300, **sizes, **told}
    (tmp_path / "config.json").write_text(json.dumps(numbers))
    (tmp_path / "model.safetensors").touch()
    run = small_run()
    encoder = replace(run.model, path=str(tmp_path), weights="pretrained")
    run = replace(run, model=encoder, task=replace(run.task, kind="masked", mask_share=0.15))
    for length, kept in ((97, 97), (98, 98), (99, 98), (100, 98), (256, 98)):
        longer = replace(run, dataset=replace(run.dataset, max_length=length))
        assert within_positions(longer, lambda _note: None).dataset.max_length == kept


def test_enough_positions_change_nothing() -> None:
    run, said = small_run(), list[str]()
    assert within_positions(run, said.append) is run
    assert said == []
