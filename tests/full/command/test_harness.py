"""Tasks of lm-evaluation-harness: what is refused without it, and that it is asked the model of the run."""

import json
from pathlib import Path

import pytest

from tests.command.test_harness import FEW, share_chosen, write_tasks
from tests.conftest import RunApp
from tests.marks import requires_harness
from tests.runs import Zygote


@requires_harness
def test_its_tasks_are_asked_of_the_run_and_of_its_base(
    zygote: Zygote, run_app: RunApp, tmp_path: Path
) -> None:
    ended = zygote.run(tmp_path, *FEW, "recipe=lora", "optimizer.lr=5e-2", "output_dir=run")
    assert ended.code == 0, ended.stderr
    write_tasks(tmp_path)
    done = run_app(
        "run=run", "harness=choose.yaml,write.yaml", "weights=both", module="app.evaluate", timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "run" / "harness.json").read_text())
    for side, adapter in (("tuned", True), ("base", False)):
        assert found[side]["choose"]["acc"] == pytest.approx(share_chosen(tmp_path / "run", adapter=adapter))
        assert 0.0 <= found[side]["write"]["exact_match"] <= 1.0
    assert found["tuned"] != found["base"]
    assert (found["limit"], found["chat"], found["run"]) == (None, False, "run")
    assert "choose" in done.stdout

    unknown = run_app("run=run", "harness=hellaswg", module="app.evaluate", timeout=300)
    assert unknown.returncode == 2
    assert (
        "harness=hellaswg: there is no such task and no such file. Did you mean hellaswag?" in unknown.stderr
    )
    offline = run_app("run=run", "harness=arc_easy", module="app.evaluate", timeout=300)
    assert offline.returncode == 2
    assert "harness=arc_easy: the rows of a task cannot be read" in offline.stderr
