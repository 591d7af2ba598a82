"""The rest of what a GGUF file says: how text is split, what else the proof sees, quantized weights."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from app.assets import ROOT
from app.exports import gguf
from app.exports.gguf_model import PRE_TOKENIZERS
from tests.conftest import REPO
from tests.exports.small_gguf import Small
from tests.exports.test_gguf import spoilt
from tests.harness.runs import Zygote

pytest.importorskip("xllamacpp")


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS.values()))
def test_text_is_split_as_llama_cpp_splits_it(tmp_path: Path, pre: str) -> None:
    small = Small("qwen2", tmp_path, pre=pre)
    assert small.vocabulary.pre == pre
    assert small.proof().failure is None


@pytest.mark.parametrize(("kind", "trap"), [("llama", "rope factors"), ("mistral", "a blank before")])
def test_proof_fails_with_another_trap_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, trap: str
) -> None:
    small = Small(kind, tmp_path)
    spoilt(small, trap, monkeypatch)
    assert not small.proof().passed


@pytest.mark.parametrize("quant", [quant for quant in gguf.QUANTS if quant != "bf16"])
def test_quantized_weights_compute_as_dequantized_ones(tmp_path: Path, quant: str) -> None:
    """llama.cpp rounds what it multiplies them by to eight bits."""
    small = Small("llama", tmp_path, quant)
    found = small.proof()
    assert found.passed, found.lines()
    assert found.loss_difference is not None
    assert found.loss_difference < 0.05


def answers(code: str, file: Path, questions: list[str], place: Path) -> list[str]:
    """Of a GGUF file, by the code that the guide shows."""
    (place / "ask.py").write_text(code)
    asked = [sys.executable, "ask.py", str(file), *questions]
    done = subprocess.run(asked, cwd=place, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_small_model_answers_in_llama_cpp_as_here(quick_zygote: Zygote, tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    # few rows, learned by heart: the likeliest token leads by more than what llama.cpp rounds otherwise
    few = ("dataset.max_rows=64", "dataset.eval_max_rows=16", "eval.samples=0", "launch.threads=1")
    words = ("training.epochs=30", "training.max_steps=100", f"output_dir={run}")
    ended = quick_zygote.run(tmp_path, *words, *few)
    assert ended.code == 0, ended.stderr
    ended = quick_zygote.run(tmp_path, f"run={run}", "kind=gguf", f"to={out}", module="app.export")
    assert ended.code == 0, ended.stdout + ended.stderr
    report = json.loads((out / "export.json").read_text())
    assert report["loss_difference"] < 0.02
    rows = [json.loads(line)["messages"] for line in (ROOT / "sample" / "train.jsonl").read_text().splitlines()[:64]]
    questions = [row[0]["content"] for row in rows if len(row) == 2][::8][:6]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps({"prompt": each}) + "\n" for each in questions))
    words = (f"run={run}", "prompts=asked.jsonl", "output=said.jsonl")
    assert quick_zygote.run(tmp_path, *words, module="app.generate").code == 0
    ours = [json.loads(line)["answer"] for line in (tmp_path / "said.jsonl").read_text().splitlines()]
    guide = (REPO / "docs" / "use.md").read_text()
    code = guide.partition("```python\n# ask.py\n")[2].partition("```")[0]
    assert answers(code, out / "model-bf16.gguf", questions, tmp_path) == ours
    assert len(set(ours)) > 1
