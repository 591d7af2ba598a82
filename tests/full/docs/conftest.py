"""A folder in which commands can be typed: programs that are there at once, and what a document begins with."""

import os
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.conftest import REPO
from tests.full.docs.stand_ins import finished_run, lay_out


@dataclass
class Shell:
    """Where commands are typed. `prepared` has what a document may begin with."""

    folder: Path
    env: dict[str, str]
    prepared: Path | None = None

    def type(self, command: str) -> subprocess.CompletedProcess[str]:
        """As a user would, in bash."""
        if self.prepared:
            finished_run(self.prepared, self.folder, command)
        return subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )


@pytest.fixture(scope="session")
def forked(quick_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a `python` that is at once in the middle of a command of ours, which it cuts short."""
    place = tmp_path_factory.mktemp("forked")
    python = place / "python"
    python.write_text(
        "#!/usr/bin/env bash\n"
        '[[ ${1-} == -m && ${2-} == app?(.*) ]] || { echo "python $*: not a command of ours" >&2; exit 99; }\n'
        f'shift; exec "{quick_python}" -m tests.full.docs.quickly "$@"\n'
    )
    finetune = place / "finetune"
    finetune.write_text('#!/usr/bin/env bash\nexec "${0%/*}/python" -m app "$@"\n')
    for file in (python, finetune):
        file.chmod(0o755)
    return place


def shell_in(folder: Path, forked: Path, env: dict[str, str]) -> Shell:
    """A checkout as far as commands can tell: scripts/, .venv/bin/python, and the files that documents speak of."""
    (folder / "scripts").mkdir(parents=True)
    for name in ("scripts/train", "scripts/setup", "finetune"):
        shutil.copy(REPO / name, folder / name)
    (folder / ".venv").mkdir()
    (folder / ".venv" / "bin").symlink_to(forked)
    lay_out(folder)
    path = f"{forked}{os.pathsep}{env['PATH']}"
    return Shell(folder, env | {"PATH": path, "APP_PYTHON": str(forked / "python")})


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("docs")


@pytest.fixture
def environment(app_env: dict[str, str], shared: Path) -> dict[str, str]:
    return app_env | {"XDG_CACHE_HOME": str(shared / "cache")}


@pytest.fixture
def prepared(forked: Path, environment: dict[str, str], shared: Path) -> Path:
    """A folder with a finished run, and with a model that is a folder of its own; made once."""
    place = shared / "prepared"
    if not place.exists():
        shell = shell_in(place, forked, environment)
        _made_by(shell, "finetune train output_dir=runs/mine")
        _made_by(shell, "finetune train recipe=full output_dir=runs/whole")
        (place / "models").mkdir()
        (place / "runs" / "whole" / "final").rename(place / "models" / "mine")
    return place


def _made_by(shell: Shell, command: str) -> None:
    ended = shell.type(command)
    assert ended.returncode == 0, ended.stderr


@pytest.fixture
def shell(tmp_path: Path, forked: Path, environment: dict[str, str], prepared: Path) -> Shell:
    """For one document."""
    return replace(shell_in(tmp_path / "checkout", forked, environment), prepared=prepared)
