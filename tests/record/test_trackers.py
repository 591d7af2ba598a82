import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from app.config.groups import choices_by_group
from app.config.schema import TrackerConfig
from app.errors import EnvironmentProblem
from app.record import trackers
from app.record.event_file import EventFile
from app.record.folder import RunFolder
from app.record.trackers import TRACKERS, check, open_tracker
from app.record.wandb_login import can_log_in
from tests.record.child import run

WANDB = """
import os, signal, sys
from pathlib import Path
from app.config.schema import TrackerConfig
from app.record.folder import RunFolder
from app.record.tracker import TrackerError
from app.record.trackers import check, open_tracker
config = TrackerConfig(kind="wandb", project="p", name="n")
print(check(config))
folder = RunFolder(Path(sys.argv[1]))
tracker = open_tracker(config, folder, {"optimizer": {"lr": 0.1}})
tracker.log({"step": 1, "loss": 2.0})
"""


@pytest.fixture
def nobody(tmp_path: Path) -> dict[str, str]:
    """An environment without any login, and without the warnings of wandb's own imports."""
    kept = {name: "" for name in os.environ if name.startswith("WANDB")}
    return {**kept, "HOME": str(tmp_path / "home"), "WANDB_MODE": "offline", "PYTHONWARNINGS": "default"}


def test_the_table_and_conf_have_the_same_kinds() -> None:
    assert set(TRACKERS) == set(choices_by_group()["tracker"])


def test_none_does_nothing(tmp_path: Path) -> None:
    config = TrackerConfig(kind="none")
    assert check(config) == []
    tracker = open_tracker(config, RunFolder(tmp_path), {})
    tracker.log({"step": 1, "loss": 1.0})
    tracker.rewind(1)
    tracker.close("finished")
    assert tracker.place is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["wandb", "tensorboard"])
def test_a_package_that_is_absent_is_said(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda _name: None)
    (problem,) = check(TrackerConfig(kind=kind))
    for part in (f"tracker={kind}", f"pip install {kind}", "tracker=none"):
        assert part in problem


def test_tensorboard_has_everything_it_needs() -> None:
    assert importlib.util.find_spec("tensorboard") is not None
    assert check(TrackerConfig(kind="tensorboard")) == []


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"WANDB_MODE": "online"}, False),
        ({"WANDB_MODE": "offline"}, True),
        ({"WANDB_MODE": "disabled"}, True),
        ({"WANDB_API_KEY": "0" * 40}, True),
        ({"WANDB_IDENTITY_TOKEN_FILE": "/run/token"}, True),
        ({"NETRC": "mine"}, True),
        ({"NETRC": "mine", "WANDB_BASE_URL": "https://wandb.example.org"}, False),
        ({"NETRC": "broken"}, False),
        ({"WANDB_CONFIG_DIR": "settings_offline"}, True),
        ({"WANDB_CONFIG_DIR": "settings_offline", "WANDB_MODE": "online"}, False),
        ({"WANDB_CONFIG_DIR": "settings_broken"}, False),
    ],
)
def test_ways_to_log_in(
    environment: dict[str, str], expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").write_text("machine api.wandb.ai login user password x\n")
    (tmp_path / "broken").write_text("machine machine machine\n")
    for name, text in (
        ("settings_offline", "[default]\nmode = offline\n"),
        ("settings_broken", "mode = offline\n"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "settings").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert can_log_in(environment) is expected


def test_without_a_login_one_message_says_all_ways_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in list(os.environ):
        if name.startswith("WANDB") or name == "NETRC":
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (problem,) = check(TrackerConfig(kind="wandb"))
    for part in ("wandb login", "WANDB_API_KEY", "WANDB_MODE=offline", "tracker=none"):
        assert part in problem


def test_wandb_offline_needs_no_account_and_stays_in_the_folder(
    tmp_path: Path, nobody: dict[str, str]
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    code = WANDB + "print(tracker.place); tracker.close('finished')"
    secret = {"HF_TOKEN": "correct-horse-battery"}
    returncode, out, _ = run(
        code, str(folder), "+some_token=geheimnis", cwd=tmp_path, env={**nobody, **secret}
    )
    assert returncode == 0
    problems, place = out.splitlines()
    assert problems == "[]"
    kept = Path(place.removeprefix("wandb sync "))
    assert kept.is_relative_to(folder / "wandb")
    assert list(kept.glob("*.wandb"))
    assert {entry.name for entry in tmp_path.iterdir()} <= {"run", "home"}
    written = b"".join(path.read_bytes() for path in (folder / "wandb").rglob("*") if path.is_file())
    assert b"loss" in written
    assert b"geheimnis" not in written
    assert b"correct-horse-battery" not in written

    first_id = (folder / "wandb" / "run-id").read_text()
    assert first_id in kept.name
    assert run(code, str(folder), cwd=tmp_path, env=nobody)[0] == 0
    assert (folder / "wandb" / "run-id").read_text() == first_id


def test_a_wandb_that_dies_is_lost_but_not_the_run(tmp_path: Path, nobody: dict[str, str]) -> None:
    code = WANDB + (
        "for line in Path(f'/proc/{os.getpid()}/task/{os.getpid()}/children').read_text().split():\n"
        "    os.kill(int(line), signal.SIGKILL)\n"
        "import time; time.sleep(0.5)\n"
        "for action in (lambda: tracker.log({'step': 2}), lambda: tracker.close('finished')):\n"
        "    try: action()\n"
        "    except TrackerError as fault: print('lost', fault)\n"
    )
    returncode, out, _ = run(code, str(tmp_path), env=nobody)
    assert returncode == 0
    assert out.count("lost wandb stopped working") == 2


def test_a_wandb_server_that_cannot_be_reached_is_said_and_leaves_nothing(
    tmp_path: Path, nobody: dict[str, str]
) -> None:
    nowhere = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "0" * 40, "WANDB_INIT_TIMEOUT": "2"}
    folder = tmp_path / "run"
    folder.mkdir()
    returncode, _, err = run(WANDB, str(folder), env={**nobody, **nowhere, "WANDB_MODE": "online"})
    assert returncode == 1
    assert "EnvironmentProblem: tracker=wandb: " in err
    assert "WANDB_MODE=offline" in err
    assert list(folder.iterdir()) == []


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    return [(each.step, each.value) for each in events.Scalars(tag)]


def logged(folder: RunFolder, rewind: int | None, *steps: int) -> None:
    tracker = EventFile(folder)
    if rewind is not None:
        tracker.rewind(rewind)
    for step in steps:
        tracker.log(
            {"step": step, "loss": step / 4, "epoch": 1, "text": "x", "nothing": None, "nan": float("nan")}
        )
    tracker.close("finished")


def test_tensorboard_reads_what_was_logged(tmp_path: Path) -> None:
    logged(RunFolder(tmp_path), None, 1, 2, 3)
    assert scalars(tmp_path, "loss") == [(1, 0.25), (2, 0.5), (3, 0.75)]
    tags: Any = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Tags()
    assert sorted(tags["scalars"]) == ["epoch", "loss"]


def test_tensorboard_forgets_what_a_continued_run_does_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time", lambda: 1000.0)
    logged(RunFolder(tmp_path), None, 1, 2, 3)
    monkeypatch.setattr("time.time", lambda: 2000.0)
    logged(RunFolder(tmp_path), 1, 2)
    assert scalars(tmp_path, "loss") == [(1, 0.25), (2, 0.5)]


def test_tensorboard_is_written_without_tensorflow_and_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from app.record.folder import RunFolder\n"
        "from app.record.event_file import EventFile\n"
        "tracker = EventFile(RunFolder(Path(sys.argv[1]))); tracker.log({'step': 1, 'loss': 2.0})\n"
        "tracker.close('finished'); print({'torch', 'tensorflow'} & sys.modules.keys())\n"
    )
    assert run(code, str(tmp_path), env={"PYTHONWARNINGS": "default"})[:2] == (0, "set()\n")
    assert scalars(tmp_path, "loss") == [(1, 2.0)]


def test_tensorboard_in_a_folder_that_is_gone_is_the_users_to_mend(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match="output_dir"):
        EventFile(RunFolder(tmp_path / "gone"))
