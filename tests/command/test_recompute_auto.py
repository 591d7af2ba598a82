"""training.recompute=auto in a run: found before the weights are loaded, told, written down, kept."""

import json
from pathlib import Path
from typing import Any

import yaml

from tests.runs import SMALL, Zygote, same_ending

AUTO = "training.recompute=auto"


def on(zygote: Zygote, folder: Path, memory: float, *words: str, code: int = 0) -> str:
    """What a run on a machine of so many GB said."""
    given = {"module": "tests.small_machine", "MEMORY_BYTES": str(int(memory * 1e9))}
    ended = zygote.run(folder, *SMALL, "training.max_steps=4", *words, **given)
    assert ended.code == code, ended.stderr
    return ended.stdout


def settings(run: Path) -> Any:
    return yaml.safe_load((run / "run.yaml").read_text())["training"]["recompute"]


def test_where_there_is_memory_nothing_is_recomputed(zygote: Zygote, tmp_path: Path) -> None:
    said = on(zygote, tmp_path, 8, AUTO, "output_dir=run")
    assert "training.recompute=auto: 0 of 2 layers, which needs" in said
    assert settings(tmp_path / "run") == 0
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["choices"]["recompute"] == 0


def test_a_continued_run_keeps_to_what_was_found(zygote: Zygote, tmp_path: Path) -> None:
    words = (AUTO, "output_dir=run", "resume=auto")
    said = on(zygote, tmp_path, 0.001, *words, "training.stop_after=2", code=75)
    assert "training.recompute=auto: all 2 layers, and the plan does not fit even so" in said
    said = on(zygote, tmp_path, 8, *words)
    assert AUTO not in said
    assert settings(tmp_path / "run") == 2
    on(zygote, tmp_path, 8, "training.recompute=2", "output_dir=told")
    same_ending(tmp_path / "told", tmp_path / "run")
