"""The wheel of `pip install .`, and `finetune` in a folder that has an app/ of its own."""

import zipfile
from pathlib import Path

import pytest

from tests.harness.python import printed_by, python
from tests.harness.runs import losses, result
from tests.packaging.test_packaging import wheel

__all__ = ["wheel"]  # a fixture


def test_installed_wheel_composes_its_configuration_from_any_folder(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    assert printed_by("-m", "app.train", "dry_run=true", f"output_dir={tmp_path / 'run'}", cwd=tmp_path, env=env)


TINY = ("debug=fast", "training.max_steps=2", "launch.threads=1")


@pytest.fixture
def finetune(tmp_path: Path) -> list[str]:
    """The console script as pip writes it, beside a package of the same name as ours."""
    (tmp_path / "app").mkdir()
    for name in ("__init__.py", "train.py"):
        (tmp_path / "app" / name).write_text("raise SystemExit('another program')")
    script = tmp_path / "bin" / "finetune"
    script.parent.mkdir()
    script.write_text("import sys\nfrom app.main import main\nsys.exit(main())\n")
    return [str(script)]


def test_console_script_trains_and_prints_its_own_commands(finetune: list[str], tmp_path: Path) -> None:
    run = python(*finetune, "train", *TINY, "launch.num_processes=2", "output_dir=run", cwd=tmp_path)
    assert (run.returncode, run.stderr) == (0, "")
    assert "Try it: finetune generate run=" in run.stdout
    assert "python -m app." not in run.stdout
    assert result(tmp_path / "run")["status"] == "finished"
    assert len(losses(tmp_path / "run")) == 2


def test_console_script_runs_a_sweep(finetune: list[str], tmp_path: Path) -> None:
    run = python(*finetune, "train", "-m", *TINY, "seed=1,2", "output_dir=sweep", cwd=tmp_path)
    assert (run.returncode, run.stderr) == (0, "")
    trials = sorted((tmp_path / "sweep").glob("*-seed=?"))
    assert [result(folder)["status"] for folder in trials] == ["finished", "finished"]


def test_console_script_refuses_as_it_was_started(finetune: list[str], tmp_path: Path) -> None:
    run = python(*finetune, "train", "sweep=lr", cwd=tmp_path)
    assert (run.returncode, "finetune train -m sweep=lr" in run.stderr) == (2, True), run.stderr
    run = python(*finetune, "trian", cwd=tmp_path)
    assert (run.returncode, run.stderr[:48]) == (2, "error: Unknown command 'trian'. Did you mean tra")
    run = python(*finetune, "check", "--help", cwd=tmp_path)
    assert run.stdout.count("finetune check") > 5
    assert "python -m" not in run.stdout
