import importlib.util
import inspect
import os
import sys
from io import StringIO
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import cast

import pytest
from accelerate import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from app.config.schema import TrackerConfig
from app.tracking import trackers
from app.tracking.console import Console
from app.tracking.output_dir import RunFolder
from app.tracking.recorder import Recorder
from app.tracking.trackers import TRACKERS, RunStart, check
from tests.harness.child import run

WANDB = """
import sys
from accelerate import PartialState
from app.config.schema import TrackerConfig
from app.tracking.output_dir import RunFolder
from app.tracking.recorder import Recorder
PartialState(cpu=True)
steps = [int(step) for step in sys.argv[2].split(",")]
config = TrackerConfig(kind="wandb", project="p", name="n")
with (
    RunFolder.claim(sys.argv[1], "auto") as folder,
    Recorder.open(folder, config, {"optimizer": {"lr": 0.1}}, {}, step=steps[0] - 1) as recorder,
):
    for step in steps:
        recorder.step({"step": step, "loss": step / 4, "lr": None})
    recorder.finish("finished")
"""


@pytest.fixture
def no_login(tmp_path: Path) -> dict[str, str]:
    """An environment without any login, and without the warnings of wandb's own imports."""
    cleared = {name: "" for name in os.environ if name.startswith("WANDB")}
    return {**cleared, "HOME": str(tmp_path / "home"), "WANDB_MODE": "offline", "PYTHONWARNINGS": "default"}


@pytest.mark.parametrize("kind", sorted(TRACKERS.keys() - {"none"}))
def test_check_missing_package_reported(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda _name: None)
    (problem,) = check(TrackerConfig(kind=kind))
    assert problem.startswith(f"tracker={kind} needs the package {kind}")
    assert "not installed: pip install" in problem
    assert problem.endswith("or choose tracker=none")


def test_check_with_package_no_problem() -> None:
    assert importlib.util.find_spec("tensorboard") is not None
    assert check(TrackerConfig(kind="tensorboard")) == check(TrackerConfig(kind="none")) == []


def test_check_wandb_without_login_reported(tmp_path: Path, no_login: dict[str, str]) -> None:
    code = (
        "import os, wandb\n"
        "from app.config.schema import TrackerConfig\n"
        "from app.tracking.trackers import check\n"
        "for name, value in (('MODE', 'online'), ('MODE', 'offline'), ('API_KEY', '0' * 40), ('API_KEY', 'x')):\n"
        "    os.environ.pop('WANDB_MODE', None); os.environ[f'WANDB_{name}'] = value\n"
        "    print(check(TrackerConfig(kind='wandb'))); wandb.teardown()\n"
    )
    returncode, out, err = run(code, cwd=tmp_path, env=no_login)
    assert (returncode, err) == (0, "")
    nothing, offline, key, short_key = out.splitlines()
    assert offline == key == "[]"
    for part in ("tracker=wandb: not logged in", "`wandb login`", "WANDB_API_KEY", "tracker=none"):
        assert part in nothing
    assert "WANDB_API_KEY invalid" in short_key
    assert "WANDB_MODE=offline" in short_key


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def logged(path: Path, step: int, *steps: int) -> str:
    PartialState(cpu=True)
    screen = StringIO()
    config = TrackerConfig(kind="tensorboard")
    with Recorder.open(RunFolder(path), config, {}, {}, Console(screen), step) as recorder:
        for number in steps:
            values = {"step": number, "loss": number / 4, "epoch": 1, "nothing": None, "nan": float("nan")}
            recorder.step(values)
        recorder.finish("finished")
    return screen.getvalue()


def test_tensorboard_resumed_run_purges_later_steps(tmp_path: Path) -> None:
    printed = logged(tmp_path, -1, 1, 2, 3)
    assert printed.startswith(f"tracker: tensorboard --logdir {tmp_path / 'tensorboard'}\n")
    assert printed.endswith(f"tracker tensorboard --logdir {tmp_path / 'tensorboard'}\n")
    assert scalars(tmp_path, "loss") == [(1, 0.25), (2, 0.5), (3, 0.75)]
    logged(tmp_path, 1, 2)
    assert scalars(tmp_path, "loss") == [(1, 0.25), (2, 0.5)]
    tags = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Tags()
    assert sorted(tags["scalars"]) == ["epoch", "loss"]


def test_mlflow_says_where_its_file_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    uri = "sqlite:///mlflow.db"
    monkeypatch.setitem(sys.modules, "mlflow", cast(ModuleType, SimpleNamespace(get_tracking_uri=lambda: uri)))
    kind = TRACKERS["mlflow"]
    assert kind is not None
    assert kind.location is not None
    assert kind.location(None) == f"mlflow ui --backend-store-uri sqlite:///{tmp_path}/mlflow.db"
    uri = "http://127.0.0.1:5000"
    assert kind.location(None) == "mlflow ui --backend-store-uri http://127.0.0.1:5000"


@pytest.mark.parametrize("kind", ["tensorboard", "mlflow", "trackio", "aim", "dvclive"])
@pytest.mark.parametrize("run_id", [None, "abc"])
def test_trackers_arguments_match_accelerate(kind: str, run_id: str | None, tmp_path: Path) -> None:
    kind_of_tracker = TRACKERS[kind]
    assert kind_of_tracker is not None
    arguments = kind_of_tracker.arguments(RunStart("project", "name", tmp_path, run_id, step=-1))
    inspect.signature(LOGGER_TYPE_TO_CLASS[kind_of_tracker.name]).bind(**arguments)
    assert run_id is None or kind_of_tracker.run_id is None or run_id in arguments.values()
