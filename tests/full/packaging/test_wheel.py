"""What `pip install .` gives: a wheel that holds everything a run needs, and nothing else."""

import subprocess
import sys
import zipfile
from pathlib import Path


def test_installed_wheel_composes_its_configuration_from_any_folder(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    asked = subprocess.run(
        [sys.executable, "-m", "app.train", "dry_run=true", f"output_dir={tmp_path / 'run'}"],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert asked.returncode == 0, asked.stdout + asked.stderr
