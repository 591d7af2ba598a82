"""A run of Weights & Biases, kept in the output folder, online or not."""

import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from app.config.schema import TrackerConfig
from app.errors import EnvironmentProblem
from app.record.files import write_text, writing
from app.record.folder import RunFolder
from app.record.tracker import TrackerError
from app.record.wandb_login import is_offline


class WandbRun:
    """Nothing of the program's own output, command line or source is sent: it could hold secrets."""

    def __init__(self, config: TrackerConfig, folder: RunFolder, run: Mapping[str, Any]) -> None:
        import wandb

        self._faults = (wandb.Error, OSError)
        self._offline = is_offline(os.environ)
        settings = wandb.Settings(
            silent=True, console="off", x_disable_meta=True, disable_git=True, disable_code=True
        )
        home = folder.path / "wandb"
        is_new = not home.exists()
        try:
            self._run = wandb.init(
                project=config.project,
                name=config.name or folder.path.name,
                id=_run_id(home / "run-id"),
                resume=None if self._offline else "allow",
                dir=str(folder.path),
                config=dict(run),
                settings=settings,
            )
        except wandb.Error as fault:
            if is_new:
                shutil.rmtree(home, ignore_errors=True)
            reason = " ".join(str(fault).split())
            raise EnvironmentProblem(
                f"tracker=wandb: {reason}; set WANDB_MODE=offline to record without a server, "
                "or choose tracker=none"
            ) from fault
        # Not wandb's own step, which may never go back as a resumed run does.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    @property
    def place(self) -> str | None:
        """The page, or the command that sends it later."""
        if self._offline:
            return f"wandb sync {Path(self._run.dir).parent}"
        return str(self._run.url)

    def log(self, values: Mapping[str, Any], /) -> None:
        """As they are."""
        self._do(lambda: self._run.log(dict(values)))

    def rewind(self, step: int, /) -> None:
        """Points are placed by `step`, so repeated ones fall on each other."""

    def close(self, status: str, /) -> None:
        """Waits until all is sent."""
        self._do(lambda: self._run.finish(exit_code=int(status == "failed")))

    def _do(self, action: Callable[[], object]) -> None:
        try:
            action()
        except self._faults as fault:
            raise TrackerError(f"wandb stopped working ({fault})") from fault


def _run_id(path: Path) -> str:
    """The same for every start in this folder, so that a continued run is one run."""
    if not path.exists():
        with writing(path.parent):
            path.parent.mkdir(exist_ok=True)
        write_text(path, secrets.token_hex(4))
    return path.read_text(encoding="utf-8")
