"""What `pip install .` gives: a wheel that holds everything a run needs, and nothing else."""

import zipfile
from pathlib import Path

from tests.harness.python import printed_by
from tests.packaging.test_wheel import wheel

__all__ = ["wheel"]  # a fixture


def test_installed_wheel_composes_its_configuration_from_any_folder(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    assert printed_by("-m", "app.train", "dry_run=true", f"output_dir={tmp_path / 'run'}", cwd=tmp_path, env=env)
