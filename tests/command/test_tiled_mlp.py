"""A run with tiled MLPs has the losses of an untiled one, and the memory of its estimate."""

import json
from pathlib import Path

import pytest

from tests.conftest import RunApp
from tests.harness.runs import SMALL, losses, result


def test_losses_of_run_with_tiles_equal_those_without(run_app: RunApp, tmp_path: Path) -> None:
    words = (*SMALL, "recipe=lora", "training.max_steps=5", "eval.every=5", "training.recompute=true")
    runs = {tile: tmp_path / str(tile) for tile in (0, 24)}  # three tiles of a micro-batch
    for tile, run in runs.items():
        run_app(*words, f"training.tile={tile}", f"output_dir={run}", code=0)
    whole, tiled = (losses(run) for run in runs.values())
    assert len(whole) == 5
    assert tiled == pytest.approx(whole, rel=1e-5)
    ends = [result(run)["final_metrics"]["eval_loss"] for run in runs.values()]
    assert ends[1] == pytest.approx(ends[0], rel=1e-5)
    assert json.loads((runs[24] / "manifest.json").read_text())["choices"]["tile"] == 24
    memory = [result(runs[24])[f"memory_{name}_bytes"] for name in ("predicted", "measured")]
    assert memory[1] == pytest.approx(memory[0], rel=0.02)
