"""The live view of a run: remaining time, newest metrics, and whether a resume helps."""

from pathlib import Path

import pytest

from app.web.live import live_view
from app.web.rows import last_values, seconds_left
from app.web.runs import Runs
from tests.pages.folders import lines_of, made_run, step


def test_seconds_left_follows_the_speed_of_recent_steps() -> None:
    lines = [step(number, 2.0, seconds=100.0 if number <= 10 else 4.0) for number in range(2, 200, 2)]
    assert seconds_left(lines, 298) == pytest.approx(200.0), "two seconds a step"
    assert seconds_left([*lines, {"step": 198, "eval_loss": 2.0}], 298) == pytest.approx(200.0)
    assert seconds_left(lines[:1], 298) is None
    assert seconds_left(lines, 198) is None
    assert seconds_left(lines_of([3.0, 2.0]), 298) is None, "no times"


def test_live_view_shows_newest_metrics(tmp_path: Path) -> None:
    lines = [*lines_of([3.0, 2.0]), {"step": 2, "eval_loss": 2.5}, step(25, None, lr=5e-4)]
    view = live_view(made_run(tmp_path / "mine", lines, result={}), "1")
    assert dict(view.tiles) == {
        "loss": "NaN",
        "eval loss": "2.5",
        "learning rate": "5.00e-04",
        "gradient norm": "1.25",
        "tokens/s": "5.2k",
        "peak process memory": "548 MB",
    }
    assert [line.name for line in view.charts[0].series] == ["train", "eval"]
    assert last_values(lines_of([4.0, 3.0, 2.0, 1.0]))["loss"] == 1.5, "smoothed, as in the report"


@pytest.mark.parametrize(
    ("error", "helps"),
    [
        ("error: Stopped: 9 consecutive steps with NaN/Inf gradients (last: step 10). Try a lower optimizer.lr", False),
        ("error: the disk is full", True),
    ],
)
def test_live_view_of_failed_run_tells_whether_a_resume_helps(tmp_path: Path, error: str, helps: bool) -> None:
    view = live_view(made_run(tmp_path / "mine", result={"status": "failed", "error": error}), "1")
    assert (view.resume_helps, view.error) == (helps, error.removeprefix("error: "))
    assert Runs(tmp_path).row("mine")["action"] == ("resume" if helps else None)
