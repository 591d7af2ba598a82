"""manifest.json: provenance of a run (versions, commit, command line, machine), read without heavy imports."""

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import app
from app.config.finished_run import read_manifest
from app.errors import CheckpointError
from app.files import write_json
from app.safe_text import redact
from app.tracking.trackers import TRACKERS

PACKAGES = (
    "torch",
    "transformers",
    "peft",
    "accelerate",
    "bitsandbytes",
    "datasets",
    "tokenizers",
    "safetensors",
    "hydra-core",
    "omegaconf",
    "numpy",
    "rich",
    *(kind.name for kind in TRACKERS.values() if kind),
)


class Manifest:
    """manifest.json of this start; `starts` lists the earlier starts of the run too."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.problem = ""  # of the file of earlier starts
        try:
            before = read_manifest(path)
        except CheckpointError as fault:
            before, self.problem = {}, f"{fault} It is written anew, without its earlier starts"
        here = program_here()
        start = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "command_line": sys.orig_argv,
            "folder": str(Path.cwd()),
            "host": platform.node(),
            "process": os.getpid(),
            "git": here["program"]["git"],
        }
        created = before.get("created", start["time"])
        self._content = {"created": created, **here, "starts": [*before.get("starts", []), start]}

    def add(self, facts: Mapping[str, Any]) -> None:
        """Add facts and write the file; a mapping is merged into that of the same name."""
        for name, value in facts.items():
            old = self._content.get(name)
            self._content[name] = value
            if isinstance(old, dict) and isinstance(value, Mapping):
                self._content[name] = {**old, **value}
        write_json(self._path, redact(self._content))


def versions() -> dict[str, str]:
    """Versions of the installed packages."""
    from importlib.metadata import PackageNotFoundError, version  # 15 ms that a misspelt key should not cost

    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def git_state(package: Path) -> dict[str, Any] | None:
    """Commit of the checkout with `package`, and whether files differ; None for an installed package."""
    if not (package.parent / ".git").exists():
        return None
    commit = _git(package.parent, "rev-parse", "HEAD")
    changes = _git(package.parent, "status", "--porcelain", "--untracked-files=no")
    if commit is None or changes is None:
        return None
    return {"commit": commit, "dirty": bool(changes)}


def _git(folder: Path, *arguments: str) -> str | None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), "--no-optional-locks", *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
            env=environment,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def program_here() -> dict[str, Any]:
    """The program, packages and machine of this process."""
    return {
        "program": {"version": app.__version__, "git": git_state(Path(app.__file__).parent)},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": len(os.sched_getaffinity(0)),
        "packages": versions(),
    }
