"""training.recompute=auto in a run: found before the weights are loaded, told, written down, kept."""

import json
from pathlib import Path
from typing import Any

import yaml

from tests.runs import SMALL, Zygote

AUTO = "training.recompute=auto"


def on(zygote: Zygote, folder: Path, memory: float, *words: str, code: int = 0) -> str:
    """What a run on a machine of so many GB said."""
    given = {"module": "tests.small_machine", "MEMORY_BYTES": str(int(memory * 1e9))}
    ended = zygote.run(folder, *SMALL, "training.max_steps=4", *words, **given)
    assert ended.code == code, ended.stderr
    return ended.stdout


def settings(run: Path) -> Any:
    return yaml.safe_load((run / "run.yaml").read_text())["training"]["recompute"]


def test_recompute_auto_with_enough_memory_is_zero(zygote: Zygote, tmp_path: Path) -> None:
    said = on(zygote, tmp_path, 8, AUTO, "output_dir=run")
    assert "training.recompute=auto: 0 of 2 layers, which needs" in said
    assert settings(tmp_path / "run") == 0
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["choices"]["recompute"] == 0
