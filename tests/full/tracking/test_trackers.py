"""wandb: failures never end a run that has begun, and a resumed run joins it."""

import json
from pathlib import Path

import pytest

from tests.harness.child import run
from tests.tracking.test_trackers import WANDB, no_login

__all__ = ["no_login"]  # a fixture

KILL = """        recorder.step({"step": step, "loss": step / 4, "lr": None})
        if step == 1:
            import os, signal, time
            from pathlib import Path
            for child in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split():
                os.kill(int(child), signal.SIGKILL)
            time.sleep(0.5)
"""


def test_wandb_killed_reported_once(tmp_path: Path, no_login: dict[str, str]) -> None:
    first, _, last = WANDB.partition('        recorder.step({"step": step, "loss": step / 4, "lr": None})\n')
    returncode, out, err = run(first + KILL + last, str(tmp_path / "run"), "1,2,3", env=no_login)
    assert returncode == 0, err
    assert out.count("tracker failed (") == 1
    assert json.loads((tmp_path / "run" / "result.json").read_text())["steps"] == 3


@pytest.mark.parametrize(("begun", "code"), [(False, 1), (True, 0)])
def test_wandb_unreachable_stops_new_run_only(begun: bool, code: int, tmp_path: Path, no_login: dict[str, str]) -> None:
    nowhere = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "0" * 40, "WANDB_INIT_TIMEOUT": "2"}
    environment = {**no_login, **nowhere, "WANDB_MODE": "online"}
    returncode, out, err = run(WANDB, str(tmp_path / "run"), "5,6" if begun else "0", env=environment)
    assert returncode == code, err
    said = out if begun else err
    assert "tracker=wandb: " in said
    assert "set WANDB_MODE=offline" in said
    if begun:
        assert out.count("continuing without a tracker") == 1
        assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "finished"
    else:
        assert not (tmp_path / "run").exists(), "nothing is left of it"


def test_wandb_offline_resumed_run_joins(tmp_path: Path, no_login: dict[str, str]) -> None:
    home = tmp_path / "run" / "wandb"
    for steps in ("1,2,3", "3,4"):
        secret = {"HF_TOKEN": "correct-horse-battery"}
        words = ("+some_token=geheimnis",) if steps == "1,2,3" else ()
        returncode, out, err = run(
            WANDB, str(tmp_path / "run"), steps, *words, cwd=tmp_path, env={**no_login, **secret}
        )
        assert returncode == 0, err
        place = Path(out.splitlines()[0].removeprefix("tracker: wandb is offline. Upload later: wandb sync "))
        assert place.parent == home
        assert place.name.endswith(f"-{(home / 'run-id').read_text()}"), "both starts are one run"
        assert list(place.glob("*.wandb"))
    assert len(list(home.glob("offline-run-*"))) == 2
    assert {entry.name for entry in tmp_path.iterdir()} <= {"run", "home"}
    written = b"".join(path.read_bytes() for path in home.rglob("*") if path.is_file())
    assert b"loss" in written
    assert b"geheimnis" not in written
    assert b"correct-horse-battery" not in written
