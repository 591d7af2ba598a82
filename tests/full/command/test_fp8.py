"""A run on a base in fp8 and what follows it: an evaluation on that base, everything else on the ordinary one."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.harness.runs import FINISHED, SMALL, Zygote, numbers, result, same_ending

FP8 = ("recipe=lora", "quantization=fp8")


def told(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_fp8_run_trains_and_exports(zygote: Zygote, tmp_path: Path) -> None:
    run = tmp_path / "run"
    ended = zygote.run(tmp_path, *FINISHED["lora"], *FP8, f"output_dir={run}", code=0)
    assert "quantization=fp8: a CPU has no fp8" in " ".join((ended.stdout + ended.stderr).split())
    manifest = told(run / "manifest.json")
    proven = [proof["what"] for proof in manifest["proofs"] if proof["what"].startswith("fp8")]
    assert proven.count("fp8 product weight, 64 to 128, against float32") == 1

    for kind in ("adapter", "merged"):
        ended = zygote.run(tmp_path, f"run={run}", f"kind={kind}", f"to={tmp_path / kind}", module="app.export", code=0)
        found = told(tmp_path / kind / "export.json")
        assert found["passed"]
        assert found["training_loss"] != found["loss_before"]
        assert abs(found["training_loss"] - found["loss_before"]) < 0.05
        assert 1e-3 < found["training_difference"] < 0.3
        assert "on that of training the loss is" in " ".join((ended.stdout + ended.stderr).split())
        assert "BitsAndBytes" not in (tmp_path / kind / "README.md").read_text()

    zygote.run(tmp_path, f"run={run}", module="app.evaluate", code=0)
    scored = told(run / "evaluate.json")["eval_loss"]
    assert scored == pytest.approx(result(run)["eval_loss"], rel=1e-6), "as training held it"


def test_fp8_resumes_with_the_same_base(zygote: Zygote, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder, more in ((whole, ()), (parts, ("training.stop_after=7",)), (parts, ("resume=auto",))):
        ended = zygote.run(tmp_path, *SMALL, *FP8, f"output_dir={folder}", *more)
        assert ended.code in {0, 75}, ended.stderr
    same_ending(whole, parts)
    assert numbers(whole)


# A rate at which a run in another rounding takes the same way: at that of the recipe two such runs part by a tenth.
GATE = (
    *("recipe=lora", "precision=fp32", "optimizer.lr=3e-4", "batching.accumulation=4"),
    *("eval.samples=0", "training.max_steps=30", "launch.threads=1"),
)


def test_fp8_loss_is_close_to_bf16(zygote: Zygote, tmp_path: Path) -> None:
    """A third of an epoch of the small model; docs/fp8.md has the whole."""
    losses = {}
    for kind in ("none", "fp8"):
        run = tmp_path / kind
        zygote.run(tmp_path, *GATE, f"quantization={kind}", f"output_dir={run}", code=0)
        losses[kind] = result(run)["eval_loss"]
    assert losses["fp8"] == pytest.approx(losses["none"], rel=0.01)
