"""Trackers (wandb, TensorBoard, MLflow and others) through Accelerate's classes.

Trackers get the configuration without secrets, and the metrics: no code, no output, and as little about the machine
as each tracker allows. The package of a tracker is imported only if it is selected.
"""

import math
import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any

from app.config.overrides import flat
from app.config.schema import TrackerConfig
from app.errors import EnvironmentProblem
from app.files import report_write_errors, write_text


@dataclass(frozen=True, slots=True)
class RunStart:
    """Facts about the start of a run for its tracker."""

    project: str
    name: str
    folder: Path
    run_id: str | None  # from an earlier start
    step: int  # of the checkpoint, -1 for a new run


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerKind:
    """A tracker class of Accelerate and its use in this program."""

    name: str
    arguments: Callable[[RunStart], dict[str, Any]]
    run_id: str | None = None  # attribute with the id for the next start
    location: Callable[[Any], str] | None = None  # where the user finds the run
    config_of: Callable[[Mapping[str, Any]], dict[str, Any]] = dict
    finish: Callable[[Any, bool], None] = lambda tracker, _failed: tracker.finish()
    check: Callable[[], list[str]] = list


class Tracker:
    """An open tracker. The caller catches its exceptions, which must not end a run."""

    def __init__(self, kind: TrackerKind, tracker: Any) -> None:
        self._kind = kind
        self._tracker = tracker

    @property
    def location(self) -> str:
        """URL, command or name to find the run."""
        if self._kind.location:
            return self._kind.location(self._tracker)
        return f"{self._kind.name} run {self.run_id or self._tracker.init_kwargs['dir']}"

    @property
    def run_id(self) -> str | None:
        """Run id of the tracker."""
        return str(attrgetter(self._kind.run_id)(self._tracker)) if self._kind.run_id else None

    def log(self, values: Mapping[str, Any]) -> None:
        """Send the metrics of a step or an evaluation; `step` is among them."""
        numbers = {key: value for key, value in values.items() if isinstance(value, int | float)}
        metrics = {key: value for key, value in numbers.items() if key != "step" and not math.isnan(value)}
        self._tracker.log(metrics, step=values["step"])

    def close(self, *, failed: bool) -> None:
        self._kind.finish(self._tracker, failed)


def check(config: TrackerConfig) -> list[str]:
    """Return problems with the selected tracker: a missing package or login."""
    kind = TRACKERS[config.kind]
    if kind is None:
        return []
    if find_spec(kind.name) is None:
        return [
            f"tracker={config.kind} needs the package {kind.name}, which is not installed: "
            f"pip install {kind.name}, or choose tracker=none"
        ]
    return kind.check()


def open_tracker(config: TrackerConfig, folder: Path, run: Mapping[str, Any], step: int) -> Tracker | None:
    """Open the selected tracker. `run` is the configuration without secrets."""
    kind = TRACKERS[config.kind]
    if kind is None:
        return None
    home = folder / config.kind
    id_file = home / "run-id"
    is_new = not home.exists()
    run_id = id_file.read_text(encoding="utf-8") if id_file.exists() else None
    start = RunStart(config.project, config.name or folder.name, folder, run_id, step)
    try:
        tracker = Tracker(kind, _started(kind, start, run))
        new_id = tracker.run_id
    except Exception as fault:  # every tracker raises other exceptions
        if is_new:
            shutil.rmtree(home, ignore_errors=True)
        remedy = "set WANDB_MODE=offline to log without a server, or " if config.kind == "wandb" else ""
        raise EnvironmentProblem(
            f"tracker={config.kind}: {' '.join(str(fault).split())}; {remedy}choose tracker=none"
        ) from fault
    if new_id and new_id != run_id:
        with report_write_errors(home):
            home.mkdir(exist_ok=True)
        write_text(id_file, new_id)
    return tracker


def _started(kind: TrackerKind, start: RunStart, run: Mapping[str, Any]) -> Any:
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    tracker = LOGGER_TYPE_TO_CLASS[kind.name](**kind.arguments(start))
    tracker.start()
    config = None if start.run_id else kind.config_of(run)
    if config:
        tracker.store_init_configuration(config)
    return tracker


def _wandb(start: RunStart) -> dict[str, Any]:
    import wandb

    quiet = wandb.Settings(silent=True, console="off", x_disable_meta=True, disable_git=True, disable_code=True)
    return {
        "run_name": start.project,
        "name": start.name,
        "id": start.run_id,
        "resume": "allow",
        "dir": str(start.folder),
        "settings": quiet,
    }


def _wandb_location(tracker: Any) -> str:
    """Return the URL of the run, or the command to upload it later."""
    run = tracker.run
    if run.offline:
        return f"wandb is offline. Upload later: wandb sync {Path(run.dir).parent}"
    return str(run.url)


def _check_wandb() -> list[str]:
    import wandb

    ways = (
        "run `wandb login` or set WANDB_API_KEY, "
        "set WANDB_MODE=offline to log without an account, or choose tracker=none"
    )
    if wandb.setup(wandb.Settings(silent=True)).settings.mode in {"offline", "dryrun", "disabled"}:
        return []
    try:
        logged_in = wandb.login(prompt=False, verify=False)
    except wandb.Error as fault:
        return [f"tracker=wandb: {' '.join(str(fault).split())}; {ways}"]
    return [] if logged_in else [f"tracker=wandb: not logged in; {ways}"]


def _tensorboard(start: RunStart) -> dict[str, Any]:
    """Return arguments for TensorBoard, which drops steps that a resumed run repeats."""
    return {"run_name": "tensorboard", "logging_dir": start.folder, "purge_step": start.step + 1}


def _mlflow(start: RunStart) -> dict[str, Any]:
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    return {"experiment_name": start.project, "run_name": start.name, "run_id": start.run_id}


def _mlflow_location(_tracker: Any) -> str:
    """Return the command that shows the run; the default MLflow database is in the current folder."""
    import mlflow

    uri = mlflow.get_tracking_uri()
    file = uri.removeprefix("sqlite:///")
    place = uri if file == uri else f"sqlite:///{Path(file).absolute()}"
    return f"mlflow ui --backend-store-uri {place}"


def _finish_mlflow(_tracker: Any, failed: bool) -> None:
    import mlflow

    mlflow.end_run("FAILED" if failed else "FINISHED")


def _comet(start: RunStart) -> dict[str, Any]:
    from comet_ml import ExperimentConfig

    off = ("code", "graph", "git_metadata", "git_patch", "env_details")
    quiet: dict[str, Any] = {f"log_{name}": False for name in off}
    quiet |= {f"auto_{name}": False for name in ("output_logging", "param_logging", "metric_logging", "log_co2")}
    folder = str(start.folder / "comet")
    config = ExperimentConfig(
        name=start.name, parse_args=False, display_summary_level=0, offline_directory=folder, **quiet
    )
    return {"run_name": start.project, "experiment_key": start.run_id, "experiment_config": config}


def _trackio(start: RunStart) -> dict[str, Any]:
    """Return arguments for trackio, which identifies runs by name."""
    name = start.run_id or f"{start.name}-{secrets.token_hex(3)}"
    quiet: dict[str, Any] = dict.fromkeys(("embed", "auto_log_gpu", "auto_log_cpu"), False)
    return {"run_name": start.project, "name": name, "resume": "allow", **quiet}


def _swanlab(start: RunStart) -> dict[str, Any]:
    from swanlab import Settings

    off = dict.fromkeys(("hardware", "runtime", "requirements", "conda", "git", "monitor"), False)
    terminal = Settings.Terminal(proxy_type="none")
    return {
        "run_name": start.project,
        "name": start.name,
        "id": start.run_id,
        "resume": "allow" if start.run_id else "never",
        "log_dir": str(start.folder / "swanlab"),
        "settings": Settings(interactive=False, probe=Settings.Probe(**off), terminal=terminal),
    }


def _aim(start: RunStart) -> dict[str, Any]:
    names = {"run_name": start.name, "experiment": start.project, "run_hash": start.run_id}
    return {**names, "force_resume": True, "system_tracking_interval": None, "capture_terminal_logs": False}


def _dvclive(start: RunStart) -> dict[str, Any]:
    folder = str(start.folder / "dvclive")
    return {"dir": folder, "resume": start.step >= 0, "save_dvc_exp": False, "dvcyaml": None}


TRACKERS: dict[str, TrackerKind | None] = {
    "none": None,
    "wandb": TrackerKind(
        name="wandb",
        arguments=_wandb,
        run_id="run.id",
        location=_wandb_location,
        finish=lambda tracker, failed: tracker.run.finish(exit_code=int(failed)),
        check=_check_wandb,
    ),
    "tensorboard": TrackerKind(
        name="tensorboard",
        arguments=_tensorboard,
        location=lambda tracker: f"tensorboard --logdir {tracker.logging_dir}",
        config_of=lambda _run: {},  # TensorBoard would show it as another run
    ),
    "mlflow": TrackerKind(
        name="mlflow",
        arguments=_mlflow,
        run_id="active_run.info.run_id",
        location=_mlflow_location,
        config_of=lambda run: dict(flat("", run)),
        finish=_finish_mlflow,
    ),
    "comet": TrackerKind(name="comet_ml", arguments=_comet, run_id="writer.id"),
    "trackio": TrackerKind(name="trackio", arguments=_trackio, run_id="run.name"),
    "swanlab": TrackerKind(name="swanlab", arguments=_swanlab, run_id="run.id"),
    "aim": TrackerKind(name="aim", arguments=_aim, run_id="writer.hash"),
    "dvclive": TrackerKind(name="dvclive", arguments=_dvclive),
}
