"""scripts/bench/train.py: the same work for all, a line for each measurement, nothing silent."""

import subprocess
import sys
from typing import Any

import pytest

from scripts.bench.table import allowed_at, furthest
from scripts.bench.train import DIFFER, INCOMPLETE, in_turn, verdict
from tests.bench.test_bench import CONTEST
from tests.conftest import REPO
from tests.full.bench.conftest import Bench
from tests.harness.marks import requires_trl

SHORT = ("--steps", "2", "--warm-up", "1", "--rounds", "1")
PROMISED = {
    *("framework", "model", "method", "device", "tokens_per_second", "nonpad_tokens", "trained_tokens"),
    *("seconds", "peak_memory_bytes", "mfu", "losses", "versions", "commit"),
    *("hardware", "peak_reserved_bytes", "first_step_seconds", "step_seconds"),
}

ROUNDED = 0.000_06  # seconds are written with four digits


def test_contenders_do_same_work(bench: Bench) -> None:
    padded = "ours:batching.packing=false"
    names = ["ours", padded, "bare", "plain"]
    options = ("--steps", "2", "--warm-up", "8", "--rounds", "1", "--tokens-per-step", "100")
    bench.train("--frameworks", ",".join(names), *options)
    lines = bench.lines
    assert [line["framework"] for line in lines] == names
    assert all(line.keys() >= PROMISED for line in lines)
    for same in ("workload", "trained_weights", "matrix_weights", "nonpad_tokens", "trained_tokens", "commit"):
        assert len({line[same] for line in lines}) == 1, same
    assert all(len(line["losses"]) == 10 for line in lines)
    assert lines[0]["losses"][-1] != lines[0]["losses"][0], "nothing was trained"
    for line in lines:
        fewest, most = (line["nonpad_tokens"] / (line["seconds"] + way * ROUNDED) for way in (1, -1))
        assert fewest - 0.01 <= line["tokens_per_second"] <= most + 0.01
    assert {line["layout"] for line in lines} == {"bins", "packed", "padded"}
    fill = {line["framework"]: line["fill"] for line in lines}
    assert fill["plain"] == 1 >= fill["ours"] > fill[padded]


def test_contenders_take_turns() -> None:
    turns = [(each.framework, each.turn) for each in in_turn(CONTEST, ["ours", "trl"], 2)]
    assert turns == [("ours", 0), ("trl", 0), ("ours", 1), ("trl", 1)]


@pytest.mark.parametrize("method", ["qlora", "full"])
def test_contenders_do_same_work_in_every_method(method: str, bench: Bench) -> None:
    bench.train("--frameworks", "ours,plain", "--method", method, *SHORT)
    weights = {line["trained_weights"] for line in bench.lines}
    assert len(weights) == 1
    assert (weights.pop() > 2e6) == (method == "full")
    assert {line["matrix_weights"] for line in bench.lines} == {4 * (4 * 192**2 + 3 * 192 * 512) + 192 * 1536}


def test_contenders_take_accumulation_recomputation_and_settings(bench: Bench) -> None:
    names = "ours,plain,ours:training.clip=1.5,optimizer.weight_decay=0"
    bench.train("--frameworks", names, "--accumulation", "2", "--recompute", *SHORT, "--peak-tflops", "1")
    assert len(bench.lines) == 3
    first = bench.lines[0]
    assert first["mfu"] == pytest.approx(4 * first["matrix_weights"] * first["tokens_per_second"] / 1e12, rel=1e-3)


def test_contender_that_does_not_start_is_reported(bench: Bench) -> None:
    ended = bench.train("--frameworks", "unsloth,ours:attention=varlen,ours", *SHORT, code=INCOMPLETE)
    missing, crashed, whole = bench.lines
    assert missing["missing"]
    assert "the package unsloth" in missing["error"]
    assert "attention=varlen needs" in crashed["error"]
    assert "error" not in whole
    assert "not measured: unsloth: needs a GPU" in ended.stderr
    assert "not measured: ours:attention=varlen" in ended.stderr


def test_parent_process_loads_no_torch() -> None:
    """Its memory would be counted as its children's peak."""
    code = "import sys, scripts.bench.train; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPO).returncode == 0


def _line(framework: str, *losses: float | None) -> dict[str, Any]:
    return {"framework": framework, "tokens_per_second": 1.0, "losses": losses}


def test_verdict_of_different_losses_fails(capsys: pytest.CaptureFixture[str]) -> None:
    same, other = _line("ours", 7.0, 6.0), _line("plain", 7.0, 6.0 * (1 + 2e-3))
    assert verdict([same, _line("plain", 7.0, 6.0 * (1 + 5e-4))], "fp32") == 0
    assert verdict([same, other], "fp32") == DIFFER
    assert "losses differ: plain by 2.0e-03 (at most 1e-03)" in capsys.readouterr().err
    assert verdict([same, other], "bf16") == 0
    assert verdict([same, _line("plain", 7.0, None)], "bf16") == DIFFER
    assert verdict([same, {"framework": "trl", "error": "crashed"}], "fp32") == INCOMPLETE


def test_furthest_compares_first_ten_losses() -> None:
    ours, theirs = [1.0] * 12, [1.0] * 10 + [2.0] * 2
    assert furthest({"ours": ours, "plain": theirs}) == {"plain": 0.0}
    assert furthest({"ours": ours, "plain": [*theirs[1:], 1.0]})["plain"] > allowed_at("bf16")


@requires_trl
def test_trl_does_same_work(bench: Bench) -> None:
    names = "ours,trl_default,trl_fair"
    bench.env.update(APP_PYTHON=sys.executable, PYTHONPATH=":".join(sys.path))
    bench.train("--frameworks", names, *SHORT, "--accumulation", "2")
    assert len(bench.lines) == 3
