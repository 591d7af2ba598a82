"""compile=blocks in real runs, with real code."""

import json
from pathlib import Path

from tests.runs import SMALL, Zygote

FEW = (*SMALL, "recipe=lora", "training.max_steps=4", "eval.samples=0", "record.every=1")


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def test_compile_refuses_padded_rows_early(zygote: Zygote, tmp_path: Path) -> None:
    ended = zygote.run(tmp_path, "compile=blocks", "batching.packing=false", f"output_dir={tmp_path / 'run'}")
    assert ended.code == 2
    assert "Set batching.packing=true, or compile=none" in ended.stderr
