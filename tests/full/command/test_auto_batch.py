"""batching.tokens=auto and training.recompute=auto: found before the weights are loaded, printed, kept."""

import json
from pathlib import Path
from typing import Any

import yaml

from tests.harness.runs import SMALL, Zygote, same_ending

AUTO_TOKENS, AUTO_LAYERS = "batching.tokens=auto", "training.recompute=auto"


def on(zygote: Zygote, folder: Path, memory: float, *words: str, code: int = 0) -> str:
    """What a run on a machine with `memory` GB prints."""
    given = {"module": "tests.harness.scarcity", "MEMORY_BYTES": str(int(memory * 1e9))}
    ended = zygote.run(folder, *SMALL, "training.max_steps=3", *words, **given, code=code)
    return ended.stdout


def settings(run: Path, section: str) -> Any:
    return yaml.safe_load((run / "run.yaml").read_text())[section]


def test_resumed_run_keeps_recomputed_layers(zygote: Zygote, tmp_path: Path) -> None:
    words = (AUTO_LAYERS, "output_dir=run", "resume=auto")
    said = on(zygote, tmp_path, 0.001, *words, "training.stop_after=2", code=75)
    assert "training.recompute=auto: 2 of 2 layers, and the run still does not fit" in said
    said = on(zygote, tmp_path, 8, *words)
    assert AUTO_LAYERS not in said
    assert settings(tmp_path / "run", "training")["recompute"] == 2
    on(zygote, tmp_path, 8, "training.recompute=2", "output_dir=told")
    same_ending(tmp_path / "told", tmp_path / "run")


def test_resumed_run_keeps_its_bins(zygote: Zygote, tmp_path: Path) -> None:
    words = (AUTO_TOKENS, "output_dir=run", "resume=auto")
    said = on(zygote, tmp_path, 0.001, *words, "training.stop_after=1", code=75)
    assert "batching.tokens=auto: 64 tokens, 8 micro-batches per step, the smallest bins, and the run" in said
    said = on(zygote, tmp_path, 8, *words)
    assert AUTO_TOKENS not in said
    assert settings(tmp_path / "run", "batching") == {
        "packing": True,
        "tokens": 64,
        "rows": 4,
        "order": "random",
        "accumulation": 8,
    }
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["choices"]["tokens"] == 64
    on(zygote, tmp_path, 8, "batching.tokens=64", "batching.accumulation=8", "output_dir=told")
    same_ending(tmp_path / "told", tmp_path / "run")


def test_auto_with_enough_memory_is_the_suggestion(zygote: Zygote, tmp_path: Path) -> None:
    said = on(zygote, tmp_path, 8, AUTO_TOKENS, "output_dir=run", "dry_run=true")
    assert "batching.tokens=auto: 256 tokens, 2 micro-batches per step, which need" in said
    assert "of 8.0 GB of this machine; larger bins are no faster on a CPU" in said
    said = on(zygote, tmp_path, 8, AUTO_LAYERS, "output_dir=run", "dry_run=true")
    assert "training.recompute=auto: 0 of 2 layers, which needs" in said
