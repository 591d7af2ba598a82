"""A tracker that fails never ends a run that has begun."""

import json
from pathlib import Path

import pytest

from tests.tracking.child import run
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


def test_wandb_that_dies_is_told_once_and_the_run_goes_on(tmp_path: Path, no_login: dict[str, str]) -> None:
    first, _, last = WANDB.partition('        recorder.step({"step": step, "loss": step / 4, "lr": None})\n')
    returncode, out, err = run(first + KILL + last, str(tmp_path / "run"), "1,2,3", env=no_login)
    assert returncode == 0, err
    assert out.count("the tracker stopped working") == 1
    assert json.loads((tmp_path / "run" / "result.json").read_text())["steps"] == 3


@pytest.mark.parametrize(("begun", "code"), [(False, 1), (True, 0)])
def test_wandb_server_out_of_reach_stops_only_a_run_that_has_not_begun(
    begun: bool, code: int, tmp_path: Path, no_login: dict[str, str]
) -> None:
    nowhere = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "0" * 40, "WANDB_INIT_TIMEOUT": "2"}
    environment = {**no_login, **nowhere, "WANDB_MODE": "online"}
    returncode, out, err = run(WANDB, str(tmp_path / "run"), "5,6" if begun else "0", env=environment)
    assert returncode == code, err
    said = out if begun else err
    assert "tracker=wandb: " in said
    assert "set WANDB_MODE=offline" in said
    if begun:
        assert out.count("the run goes on without it") == 1
        assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "finished"
    else:
        assert not (tmp_path / "run").exists(), "nothing is left of it"
