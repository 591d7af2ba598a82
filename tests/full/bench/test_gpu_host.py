"""scripts/bench/gpu_host.sh: every stage, with tiny shapes on a CPU, so that a GPU needs no editing."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from app.sweeps.preset import read_preset
from scripts.bench.stages import STAGES, Item, Setting, run
from tests.conftest import REPO
from tests.full.bench.conftest import Bench, lines_of

SCRIPT = str(REPO / "scripts" / "bench" / "gpu_host.sh")


def stage(bench: Bench, name: str, *options: str, **env: str) -> list[dict[str, Any]]:
    ended = bench.run(["bash", SCRIPT, "out", "--device", "cpu", "--tiny", *options, name], **env)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return lines_of(bench.folder / "out" / f"{name}.jsonl")


def ends(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if line.get("end")]


def test_stage_micro_measures_all_operations(bench: Bench) -> None:
    lines = stage(bench, "micro")
    assert [(line["item"], line["returncode"]) for line in ends(lines)] == [
        (item, 0) for item in ("attention", "gemm", "nf4", "head", "rounding")
    ]
    found = [line for line in lines if "end" not in line]
    wrong = {line["name"]: line["error"] for line in found if "error" in line}
    assert wrong.keys() <= {"varlen", "flash"}, wrong
    assert all("needs an NVIDIA GPU" in error for error in wrong.values())
    assert all(line.keys() >= {"hardware", "versions", "commit"} for line in found)
    attention = {line["name"]: line for line in found if line["item"] == "attention" and "error" not in line}
    assert all(line["difference"] < 1e-5 > line["gradient_difference"] for line in attention.values())
    assert {line["numbers"] for line in found if line["item"] == "gemm"} == {"run", "fp8", "fp8 slow sums"}
    ways = {(line["item"], line["way"]): line for line in found if line["item"] in ("nf4", "head")}
    timed = {way for (_, way), line in ways.items() if line["milliseconds"] is not None}
    assert timed == {"unpack", "product alone", "unpack and product", "at once", "chunks"}


def test_stage_measures_training(bench: Bench) -> None:
    """Other stages have items of the same making; their contenders are in test_train.py."""
    lines = stage(bench, "headline")
    items = STAGES["headline"](Setting("cpu", tiny=True, out=Path()))
    assert [line["item"] for line in ends(lines)] == [item.name for item in items]
    assert all("error" not in line for line in ends(lines))
    measured = [line for line in lines if "end" not in line]
    assert {"ours"} <= {line["framework"].partition(":")[0] for line in measured if "error" not in line}
    unable = {line["framework"]: line["error"] for line in measured if "error" in line}
    assert not [name for name in unable if name == "bare" or name.startswith("plain")], unable
    assert all("needs" in error for error in unable.values()), unable
    profiled = [line for line in measured if line.get("profile")]
    assert profiled
    assert all(line["operations"] and line["planned_memory_bytes"] for line in profiled)


def test_failed_preflight_ends_the_call(bench: Bench) -> None:
    ended = bench.run(["bash", SCRIPT, "out", "--seconds", "60", "preflight", "tests"], CUDA_VISIBLE_DEVICES="")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    lines = lines_of(bench.folder / "out" / "preflight.jsonl")
    assert "torch sees no GPU" in lines[0]["said"]
    assert not (bench.folder / "out" / "tests.jsonl").exists()


def test_stage_of_a_ladder_runs_rungs_until_the_deadline(bench: Bench) -> None:
    lines = stage(bench, "single_gpu", "--seconds", "60")
    *rungs, end = lines
    assert (end["item"], end["returncode"]) == ("single_gpu", 0)
    assert [line["item"] for line in rungs] == list(read_preset(["sweep=single_gpu"]).config.rungs)
    assert all(line.keys() >= {"hardware", "versions", "commit"} for line in rungs)
    statuses = [line["rung"]["status"] for line in rungs]
    assert statuses[0] == "finished"
    assert {*statuses} <= {"finished", "refused", "stopped", "pending"}
    assert [line["item"] for line in rungs if "error" in line] == [
        line["item"] for line, status in zip(rungs, statuses, strict=True) if status in ("stopped", "pending")
    ]
    assert (bench.folder / "out" / "single_gpu" / "ladder.md").read_text().startswith("# single_gpu")


def test_crashed_item_is_reported(tmp_path: Path) -> None:
    code = "import sys; print('before'); sys.exit('out of memory')"
    found = run(Item("a", [sys.executable, "-c", code]), 60, tmp_path / "log")
    assert found == {"returncode": 1, "error": "exit code 1: out of memory", "said": "out of memory"}
    assert run(Item("a", ["true"], known=(0, 3)), 60, tmp_path / "log")["returncode"] == 0


def test_slow_item_is_killed_with_its_children(tmp_path: Path) -> None:
    child = f"{sys.executable} -c 'import time; time.sleep(60)' & echo $! >{tmp_path / 'pid'}; wait"
    begun = time.monotonic()
    found = run(Item("a", ["bash", "-c", f"echo begun; {child}"]), 1.0, tmp_path / "log")
    assert found == {"error": "stopped after 1 s", "said": "begun"}
    assert time.monotonic() - begun < 10
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 5
    while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():
        assert time.monotonic() < deadline, "it goes on"
        time.sleep(0.02)


def test_items_without_time_are_reported(bench: Bench) -> None:
    lines = stage(bench, "70b", "--seconds", "5")
    assert {line["error"] for line in lines} == {"no time was left for it"}
    assert len(lines) == 2


@pytest.mark.parametrize(
    "arguments", [(), ("out",), ("out", "everything"), ("out", "--tiny"), ("out", "micro", "--seconds")]
)
def test_wrong_arguments_print_usage(arguments: tuple[str, ...], tmp_path: Path) -> None:
    ended = subprocess.run(["bash", SCRIPT, *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 2
    assert "gpu_host.sh OUT_DIR STAGE..." in ended.stderr
