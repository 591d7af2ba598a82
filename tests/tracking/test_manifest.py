import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from app.config.finished_run import read_manifest
from app.config.schema import TrackerConfig
from app.errors import CheckpointError
from app.tracking.output_dir import RunFolder
from app.tracking.recorder import Manifest, Recorder, git_state
from tests.harness.child import run


def written(path: Path, **facts: Any) -> dict[str, Any]:
    Manifest(path / "manifest.json").add(facts)
    content: dict[str, Any] = json.loads((path / "manifest.json").read_text())
    return content


def test_manifest_content(tmp_path: Path) -> None:
    manifest = written(tmp_path, seed=7, choices={"attention": "sdpa"}, counts={"rows": 3}, hashes={"data": "3f"})
    assert manifest["packages"]["torch"] == version("torch")
    assert manifest["packages"]["hydra-core"] == version("hydra-core")
    assert (manifest["seed"], manifest["choices"], manifest["hashes"]) == (7, {"attention": "sdpa"}, {"data": "3f"})
    assert manifest["cpus"] >= 1
    assert manifest["created"] == manifest["starts"][0]["time"]
    assert manifest["starts"][0]["command_line"] == sys.orig_argv
    assert {"python", "platform", "program"} <= manifest.keys()


def test_manifest_redacts_command_line(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from app.tracking.recorder import Manifest\n"
        "Manifest(Path(sys.argv[1])).add({'overrides': sys.argv[2:], 'why': 'horse-battery'})"
    )
    path = tmp_path / "manifest.json"
    returncode, _, err = run(code, str(path), "+hub_token=geheim", "seed=3", env={"HF_TOKEN": "horse-battery"})
    assert (returncode, err) == (0, "")
    text = path.read_text()
    assert "seed=3" in text
    assert "hub_token=***" in text
    assert "geheim" not in text
    assert "horse-battery" not in text


def test_git_state_of_checkout_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    package = tmp_path / "app"
    package.mkdir()
    assert git_state(package) is None
    git("init", "-q")
    assert git_state(package) is None, "no commit yet"
    (package / "code.py").write_text("1")
    git("add", ".")
    git("commit", "-qm", "first")
    commit = git("rev-parse", "HEAD")
    assert git_state(package) == {"commit": commit, "dirty": False}
    (package / "code.py").write_text("2")
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    assert git_state(package) == {"commit": commit, "dirty": True}
    installed = tmp_path / ".venv" / "site-packages" / "app"
    installed.mkdir(parents=True)
    assert git_state(installed) is None, "a checkout around the installation is somebody else's"


def test_manifest_malformed_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"seed": ')
    with pytest.raises(CheckpointError, match=r"manifest\.json cannot be read"):
        read_manifest(tmp_path / "manifest.json")
    assert read_manifest(tmp_path / "none.json") == {}


@pytest.mark.parametrize("text", ['{"seed": ', "[]", "\0"])
def test_manifest_malformed_is_written_anew(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with RunFolder.claim(str(tmp_path), "auto") as folder:
        Recorder.open(folder, TrackerConfig(kind="none"), {}, {"seed": 7}).finish("stopped")
    manifest = read_manifest(tmp_path / "manifest.json")
    assert (manifest["seed"], len(manifest["starts"])) == (7, 1)
    log = (tmp_path / "log.txt").read_text()
    assert "manifest.json cannot be read" in log
    assert "Writing a new one without the earlier starts" in log
