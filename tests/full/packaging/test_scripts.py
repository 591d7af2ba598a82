"""scripts/setup and scripts/train as a user meets them: wrong platform, wrong Python, any folder, stamps.

Nothing is installed here: the programs that they call are replaced by small ones on PATH.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import REPO

PYTHON = """#!/usr/bin/env bash
case "$*" in
  "-c import sys"*) ;;
  --version) echo "Python 3.11.0" ;;
  "-m venv "*) mkdir -p "$3/bin"; ln -s "$0" "$3/bin/python"; echo "version = 3.11.0" >"$3/pyvenv.cfg" ;;
  "-m pip install "*) echo "$*" >>"$PIP_CALLS"; {install} ;;
  "-m app train"*) shift 3; printf 'trained:%s\\n' "$PWD" "$@" ;;
esac
"""


def _tools(folder: Path) -> Path:
    """What the scripts call, and no Python: that of this machine must not be found."""
    folder.mkdir()
    for place in reversed(os.environ["PATH"].split(":")):
        for program in Path(place).glob("*"):
            if not program.name.startswith("python"):
                (folder / program.name).unlink(missing_ok=True)
                (folder / program.name).symlink_to(program)
    return folder


class Clone:
    """A copy of the scripts in a folder with a space, with a pretended Python 3.11."""

    def __init__(self, folder: Path, tools: Path) -> None:
        self.tools = tools
        self.root = folder / "my clone"
        self.bin = folder / "bin"
        self.calls = folder / "pip-calls"
        self.elsewhere = folder / "some where"
        for path in (self.root, self.bin, self.elsewhere):
            path.mkdir()
        shutil.copytree(REPO / "scripts", self.root / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "constraints.txt", "finetune"):
            shutil.copy(REPO / name, self.root)
        self.python("python3.11")
        for name in ("python3.12", "python3", "python"):
            self.program(name, "#!/bin/sh\nexit 127\n")

    def program(self, name: str, text: str) -> None:
        path = self.bin / name
        path.write_text(text)
        path.chmod(0o755)

    def python(self, name: str, *, install: str = "true") -> None:
        """What installs by `install`."""
        self.program(name, PYTHON.format(install=install))

    def start(self, script: str, *args: str, **env: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [str(self.root / "scripts" / script), *args],
            cwd=self.elsewhere,
            env={"PATH": f"{self.bin}:{self.tools}", "PIP_CALLS": str(self.calls), **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, script: str, *args: str, **env: str) -> tuple[int, str, str]:
        process = self.start(script, *args, **env)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def installations(self) -> list[str]:
        return self.calls.read_text().splitlines() if self.calls.exists() else []


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _tools(tmp_path_factory.mktemp("path") / "tools")


@pytest.fixture
def clone(tmp_path: Path, tools: Path) -> Clone:
    return Clone(tmp_path, tools)


def test_train_from_another_folder_passes_its_arguments_on(clone: Clone) -> None:
    code, out, err = clone.run("train", "recipe=full", "note=two words")
    assert code == 0, err
    assert out.splitlines() == [f"trained:{clone.elsewhere}", "trained:recipe=full", "trained:note=two words"]


def test_launcher_without_an_environment_names_the_scripts_that_make_it(clone: Clone) -> None:
    code, out, err = clone.run("../finetune", "train")
    assert (code, out) == (2, "")
    assert ".venv/bin/python not found. Install with scripts/setup, or with scripts/train, which then trains." in err
    _, _, err = clone.run("setup")
    assert err.endswith("source .venv/bin/activate (or use ./finetune)\n")
    code, out, err = clone.run("../finetune", "train", "seed=1")
    assert (code, out.splitlines()) == (0, [f"trained:{clone.elsewhere}", "trained:seed=1"]), err


def test_torch_comes_first_and_alone_then_the_rest_under_the_constraints(clone: Clone) -> None:
    clone.run("train")
    first, second = clone.installations()
    assert first.endswith(" torch==2.13.0")
    assert "-c " not in first
    assert "-c constraints.txt -e ." in second


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_changed_requirements_are_installed_again_in_place(clone: Clone, name: str) -> None:
    clone.run("train")
    with (clone.root / name).open("a") as file:
        file.write("# changed\n")
    _, _, err = clone.run("train")
    assert len(clone.installations()) == 4
    assert "creating" not in err


def test_tools_include_what_training_needs(clone: Clone) -> None:
    clone.run("setup", "dev")
    _torch, older, last = clone.installations()
    assert f"--target {clone.root}/.venv/transformers4 transformers==4." in older
    assert last.endswith("-e .[dev]")
    clone.run("train")
    assert len(clone.installations()) == 3


def test_failed_installation_shows_its_log_and_leaves_no_stamp(clone: Clone) -> None:
    clone.python("python3.11", install="echo no space left; exit 1")
    code, out, err = clone.run("train")
    assert code == 1
    assert out == ""
    assert "no space left" in err
    assert "install.log" in err
    assert not list(clone.root.glob(".venv/installed-*"))


def test_interrupted_installation_is_begun_anew_by_the_next_call(clone: Clone) -> None:
    clone.python("python3.11", install='echo "$$"; exec sleep 60')
    process = clone.start("setup")
    while not clone.installations():
        assert process.poll() is None
    process.terminate()
    _, err = process.communicate(timeout=10)
    assert process.returncode == 130
    assert "interrupted" in err
    clone.python("python3.11", install="true")
    code, _, err = clone.run("train")
    assert code == 0
    assert "creating" in err, "a half-copied package must not pass for a whole one"
    assert len(clone.installations()) == 3


def test_two_at_once_install_once(clone: Clone) -> None:
    clone.python("python3.11", install="sleep 0.5")
    both = [clone.start("train"), clone.start("train")]
    errors = [process.communicate(timeout=60)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert len(clone.installations()) == 2
    assert any("waiting for another installation" in err for err in errors)


def test_without_a_suitable_python_the_versions_are_named(clone: Clone) -> None:
    clone.program("python3.11", "#!/bin/sh\nexit 1\n")  # of another version
    code, _, err = clone.run("train")
    assert code == 1
    assert "error: Python 3.11, 3.12 or 3.13 is required" in err
    assert not (clone.root / ".venv/bin").exists()


@pytest.mark.parametrize(
    ("system", "machine", "said"),
    [
        ("Darwin", "arm64", "macOS is not supported"),
        ("MINGW64_NT-10.0", "x86_64", "install WSL 2"),
        ("FreeBSD", "amd64", "FreeBSD on amd64 is not supported"),
        ("Linux", "i686", "Linux on i686 is not supported"),
    ],
)
def test_other_platforms_are_refused_by_name(clone: Clone, system: str, machine: str, said: str) -> None:
    clone.program("uname", f'#!/bin/sh\n[ "$1" = -s ] && echo {system} || echo {machine}\n')
    code, _, err = clone.run("train")
    assert code == 1
    assert said in err
    assert not (clone.root / ".venv").exists()


def test_given_interpreter_is_used_as_it_is(clone: Clone) -> None:
    code, out, _ = clone.run("train", "a=1", APP_PYTHON="python3.11")
    assert code == 0
    assert "trained:a=1" in out
    assert not (clone.root / ".venv").exists()
    assert clone.run("train", APP_PYTHON="no-such-python")[0] == 1


@pytest.mark.parametrize("whole", [True, False], ids=["of-another-checkout", "that-leads-nowhere"])
def test_a_link_is_left_alone(clone: Clone, tmp_path: Path, whole: bool) -> None:
    """What it leads to is another checkout's, whose packages are not ours to replace."""
    theirs = tmp_path / "theirs"
    if whole:
        theirs.mkdir()
        (theirs / "pyvenv.cfg").write_text("version = 3.11.0\n")
        (theirs / "installed-core").write_text("of another checkout\n")
    before = {file: file.read_text() for file in theirs.glob("*")}
    (clone.root / ".venv").symlink_to(theirs)
    code, out, err = clone.run("train")
    assert (code, out) == (1, "")
    assert f"{clone.root / '.venv'} is a link: remove it, or set APP_PYTHON=" in err
    assert clone.installations() == []
    assert {file: file.read_text() for file in theirs.glob("*")} == before
