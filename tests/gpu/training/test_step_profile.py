"""Kernels of a profiled step, by the operations that launched them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from app.model.build import build_training_model, choose_loss_head
from app.tasks.table import loss_of
from app.tracking.output_dir import RunFolder
from app.training.setup import stepper_of
from tests.training.conftest import MakeLoop, sections_of, small_run
from tests.training.test_trainer import QUIET


def test_profile_of_a_gpu_counts_its_kernels(make_loop: MakeLoop, tmp_path: Path) -> None:
    run = small_run("recipe=lora", "training.profile_step=3", *QUIET)
    loop, notebook = make_loop(run, 4)
    notebook.folder = RunFolder(tmp_path)
    device = loop.parts.runtime.device
    model = build_training_model(sections_of(run), loss_of(run), device, run.seed, "nowhere")
    choose_loss_head(model, loop.parts.loader.with_most_rows().to(device))
    loop.parts = replace(loop.parts, stepper=stepper_of(model, run, loop.parts.runtime, run.precision.kind))
    for _ in range(3):
        loop.take_step()
    facts = json.loads((tmp_path / "profile.json").read_text())
    assert facts["device"] == "cuda"
    assert sum(facts["kinds"].values()) == pytest.approx(facts["seconds"])
    assert facts["kinds"]["contractions"] > 0
    assert any(each["name"] == "app_kernels::loss_and_grad" for each in facts["operations"])
