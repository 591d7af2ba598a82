"""What torchao logs when it is imported."""

from pathlib import Path

from tests.harness.python import python
from tests.harness.runs import SMALL


def test_screen_has_no_lines_of_torchao(tmp_path: Path, app_env: dict[str, str]) -> None:
    """In a process of its own: those of other tests have imported it before."""
    words = (*SMALL, "recipe=full", "quantization=qat", "dry_run=true", f"output_dir={tmp_path / 'run'}")
    ended = python("-m", "app.train", *words, cwd=tmp_path, env=app_env)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "torchao" not in ended.stdout
