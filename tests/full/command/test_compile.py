"""compile=blocks in real runs, with real code."""

import json
import re
from pathlib import Path

import pytest

from app.training.checkpoint import choices_of
from tests.conftest import RunApp
from tests.harness.runs import SMALL, Zygote, losses, result

FEW = (*SMALL, "recipe=lora", "training.max_steps=4", "eval.samples=0", "record.every=1")


def test_compiled_run_has_the_same_losses(zygote: Zygote, run_app: RunApp, tmp_path: Path) -> None:
    """The compiled run is a process of its own: torch settles early where it keeps its graphs."""
    zygote.run(tmp_path, *FEW, "output_dir=plain", code=0)
    compiled = run_app(*FEW, f"cache_dir={tmp_path / 'cache'}", "compile=blocks", "output_dir=compiled")
    assert (compiled.returncode, compiled.stderr) == (0, "")
    run = tmp_path / "compiled"
    assert losses(run) == pytest.approx(losses(tmp_path / "plain"), rel=1e-5)
    assert "2 layers compiled as 2 graphs" in (run / "log.txt").read_text()
    assert "error of compiled layers" in (run / "manifest.json").read_text()
    assert result(run)["memory_measured_bytes"] is None
    assert any((tmp_path / "cache" / "inductor").iterdir())


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_wrong_code_of_one_process_turns_compilation_off_on_all(parallel: str, zygote: Zygote, tmp_path: Path) -> None:
    words = (*FEW, f"parallel={parallel}", "training.recompute=auto")
    compiled = ("compile=blocks", "compile.backend=eager", "output_dir=wrong")
    zygote.finish_together(tmp_path, 2, *words, "output_dir=plain")
    zygote.finish_together(tmp_path, 2, *words, *compiled, module="tests.harness.miscompiled", RANKS="1")
    wrong = tmp_path / "wrong"
    assert losses(wrong) == pytest.approx(losses(tmp_path / "plain"), rel=1e-6)
    told = r"compiled layers disabled: layer \d, .*: error .* is .*x that of the uncompiled layer"
    assert re.search(told, (wrong / "log.txt").read_text())
    assert json.loads((wrong / "manifest.json").read_text())["choices"]["compile"] == "none"
    assert choices_of(wrong / "checkpoints" / "step-000003")["compile"] == "none"
