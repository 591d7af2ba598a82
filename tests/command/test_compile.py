"""compile=blocks in real runs, with real code."""

import json
from pathlib import Path

import pytest

from tests.command.test_resume import SMALL
from tests.conftest import RunApp
from tests.runs import Zygote, result

FEW = (*SMALL, "recipe=lora", "training.max_steps=4", "eval.samples=0", "record.every=1")


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def test_padded_rows_are_refused_in_no_time(zygote: Zygote, tmp_path: Path) -> None:
    ended = zygote.run(tmp_path, "compile=blocks", "batching.packing=false", f"output_dir={tmp_path / 'run'}")
    assert ended.code == 2
    assert "Set batching.packing=true, or compile=none" in ended.stderr


@pytest.mark.slow
def test_a_compiled_run_has_the_losses_of_one_that_is_not(run_app: RunApp, tmp_path: Path) -> None:
    """The second one finds the graphs of the first. Processes of their own: torch settles early where it keeps them."""
    cache = f"cache_dir={tmp_path / 'cache'}"
    plain, *compiled = (tmp_path / name for name in ("plain", "first", "second"))
    ended = run_app(*FEW, cache, f"output_dir={plain}")
    assert (ended.returncode, ended.stderr) == (0, "")
    for run in compiled:
        ended = run_app(*FEW, cache, "compile=blocks", f"output_dir={run}")
        assert (ended.returncode, ended.stderr) == (0, "")
        assert losses(run) == pytest.approx(losses(plain), rel=1e-5)
        text = (run / "log.txt").read_text()
        assert "2 layers are 2 graphs" in text
        assert "loss and gradient of compiled layers" in (run / "manifest.json").read_text()
        assert result(run)["memory_measured_bytes"] is None
    assert any((tmp_path / "cache" / "inductor").iterdir())
