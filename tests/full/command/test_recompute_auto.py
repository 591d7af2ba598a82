"""training.recompute=auto in a run: found before the weights are loaded, told, written down, kept."""

from pathlib import Path

from tests.command.test_recompute_auto import AUTO, on, settings
from tests.runs import Zygote, same_ending


def test_resumed_run_keeps_recomputed_layers(zygote: Zygote, tmp_path: Path) -> None:
    words = (AUTO, "output_dir=run", "resume=auto")
    said = on(zygote, tmp_path, 0.001, *words, "training.stop_after=2", code=75)
    assert "training.recompute=auto: all 2 layers, and the plan does not fit even so" in said
    said = on(zygote, tmp_path, 8, *words)
    assert AUTO not in said
    assert settings(tmp_path / "run") == 2
    on(zygote, tmp_path, 8, "training.recompute=2", "output_dir=told")
    same_ending(tmp_path / "told", tmp_path / "run")
