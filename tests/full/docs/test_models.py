"""The table of docs/models.md is that of today's plans."""

import pytest

from app.base.base_model import BaseModel
from app.config.load import compose_run
from app.config.tasks import task_of
from scripts.make_models import PAGE, row_of


@pytest.mark.parametrize("name", ["qwen3_0_6b", "qwen3_30b_a3b", "gemma3_1b"])
def test_row_is_as_it_would_be_made(name: str) -> None:
    assert row_of(name) in PAGE.read_text().splitlines()


@pytest.mark.parametrize(
    ("name", "billions"),
    [("lfm2_1_2b", 1.17), ("lfm2_2_6b", 2.57), ("lfm2_8b_a1b", 8.3), ("nemotron3_5_lightning", 31.6)],
)
def test_preset_has_the_published_number_of_parameters(name: str, billions: float) -> None:
    run = compose_run([f"model={name}", "model.weights=random"])
    count = sum(weight.numel() for weight in BaseModel(run.model, task_of(run.task)).on_meta().parameters())
    assert count / 1e9 == pytest.approx(billions, rel=0.01)
