"""scripts/bench/ladder.py: rungs in order until the deadline."""

from app.sweeps.search_space import read_preset
from tests.conftest import REPO
from tests.full.bench.conftest import Bench


def test_ladder_runs_rungs_until_the_deadline(bench: Bench) -> None:
    options = ["--device", "cpu", "--tiny", "--deadline", "55", "--out", str(bench.out)]
    command = [bench.env["APP_PYTHON"], "-m", "scripts.bench.ladder", "single_gpu", *options]
    ended = bench.run(command, PYTHONPATH=str(REPO))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rungs = bench.lines
    assert [line["item"] for line in rungs] == list(read_preset(["sweep=single_gpu"]).config.rungs)
    assert all(line.keys() >= {"hardware", "versions", "commit"} for line in rungs)
    statuses = [line["rung"]["status"] for line in rungs]
    assert statuses[0] == "finished"
    assert {*statuses} <= {"finished", "refused", "stopped", "pending"}
    assert [line["item"] for line in rungs if "error" in line] == [
        line["item"] for line, status in zip(rungs, statuses, strict=True) if status in ("stopped", "pending")
    ]
    assert (bench.out.with_suffix("") / "ladder.md").read_text().startswith("# single_gpu")
