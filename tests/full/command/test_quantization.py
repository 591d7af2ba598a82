"""A run on a base in 8 bits and what follows it: an evaluation on that base, everything else on the ordinary one."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.harness.runs import FINISHED, Zygote, result

ON_CPU = {  # what a run says
    "fp8": "quantization=fp8: a CPU has no fp8",
    "int8": "int8 base",
    "llm_int8": "quantization=llm_int8: on a CPU, int8 products are computed in float32",
}


def told(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text())
    return found


@pytest.mark.parametrize("base", ON_CPU)
def test_run_on_eight_bits_trains_and_exports(quick_zygote: Zygote, tmp_path: Path, base: str) -> None:
    run = tmp_path / "run"
    ended = quick_zygote.run(tmp_path, *FINISHED["lora"], f"quantization={base}", f"output_dir={run}", code=0)
    assert ON_CPU[base] in " ".join((ended.stdout + ended.stderr).split())
    manifest = told(run / "manifest.json")
    proven = [proof["what"] for proof in manifest["proofs"] if proof["what"].startswith("fp8")]
    assert proven.count("fp8 product weight, 64 to 128, against float32") == (base == "fp8")

    for kind in ("adapter", "merged"):
        ended = quick_zygote.run(
            tmp_path, f"run={run}", f"kind={kind}", f"to={tmp_path / kind}", module="app.export", code=0
        )
        found = told(tmp_path / kind / "export.json")
        assert found["passed"]
        assert found["training_loss"] != found["loss_before"]
        assert abs(found["training_loss"] - found["loss_before"]) < 0.05
        assert 1e-3 < found["training_difference"] < 0.3
        assert "on the training base the loss is" in " ".join((ended.stdout + ended.stderr).split())
        assert "BitsAndBytes" not in (tmp_path / kind / "README.md").read_text()

    quick_zygote.run(tmp_path, f"run={run}", module="app.evaluate", code=0)
    scored = told(run / "evaluate.json")["eval_loss"]
    assert scored == pytest.approx(result(run)["eval_loss"], rel=1e-6), "as training held it"


def test_run_on_fp4_exports_what_was_quantized_so(quick_zygote: Zygote, tmp_path: Path) -> None:
    run = tmp_path / "run"
    quick_zygote.run(tmp_path, *FINISHED["qlora in fp32"], "quantization=fp4", f"output_dir={run}", code=0)
    for kind in ("adapter", "merged"):
        quick_zygote.run(tmp_path, f"run={run}", f"kind={kind}", f"to={tmp_path / kind}", module="app.export", code=0)
        found = told(tmp_path / kind / "export.json")
        assert found["passed"]
    assert "bnb_4bit_quant_type='fp4'" in (tmp_path / "adapter" / "README.md").read_text()
