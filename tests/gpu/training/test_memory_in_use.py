"""Memory of this process and of others, utilization and clocks of a real GPU."""

import os
import subprocess
import sys
import time

import pytest
import torch

from app.config.finished_run import read_manifest
from app.training import gpu_usage
from app.training.gpu_usage import Usage, gpu_samples, read_gpu, usage_of
from tests.conftest import RunApp
from tests.harness.runs import SMALL, metrics, result

CONTEXT_BYTES = (100_000_000, 2_000_000_000)


def usage() -> Usage:
    reading = read_gpu()
    assert reading is not None
    return usage_of(reading, os.getpid(), unlisted_bytes=700_000_000)


@pytest.mark.alone
def test_another_process_is_counted_as_such() -> None:
    """Its process may be invisible in a container; its memory is not."""
    words = "import torch; kept = torch.zeros(1 << 30, device='cuda'); print('there', flush=True); input()"
    torch.zeros(1, device="cuda")
    before = usage()
    with subprocess.Popen(
        [sys.executable, "-c", words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "there\n"
        during = usage()
        other.communicate("\n")
    assert during.others.total == before.others.total
    assert 4.2e9 < during.others.bytes - before.others.bytes < 7e9
    assert during.bytes == pytest.approx(before.bytes, abs=1e8)


@pytest.mark.alone
def test_memory_of_this_process_follows_its_tensors() -> None:
    torch.zeros(1, device="cuda")
    before = usage()
    tensor = torch.zeros(1 << 28, device="cuda")
    after = usage()
    assert after.bytes - before.bytes == pytest.approx(tensor.nbytes, rel=0.05)
    assert after.others.bytes == pytest.approx(before.others.bytes, abs=1e8)
    assert torch.cuda.memory_reserved() < after.bytes < torch.cuda.get_device_properties(0).total_memory


def test_workspaces_of_cublas_are_freed_once() -> None:
    matrix = torch.ones(256, 256, device="cuda")
    (matrix @ matrix).sum().item()
    assert 1 << 20 < gpu_usage.free_workspaces() < 1 << 28
    assert gpu_usage.free_workspaces() == 0


@pytest.mark.alone
def test_utilization_of_a_busy_gpu_is_high() -> None:
    matrix = torch.ones(8192, 8192, device="cuda", dtype=torch.bfloat16)
    newest, end = time.time_ns() // 1000, time.monotonic() + 4
    while time.monotonic() < end:
        (matrix @ matrix)[0, 0].item()
    samples = gpu_samples(newest)
    if not samples:
        pytest.skip("the driver takes no samples of this GPU")
    percents = [percent for _, percent in samples]
    assert len(percents) >= 3
    assert max(percents) > 50
    assert all(0 <= percent <= 100 for percent in percents)


def test_clocks_of_a_real_driver() -> None:
    clocks = gpu_usage.clocks()
    assert clocks
    assert all(value > 0 for value in clocks.values())


@pytest.mark.alone
def test_run_reports_its_memory_by_stage(run_app: RunApp) -> None:
    folder = run_app.folder / "run"
    run_app(*SMALL, "recipe=lora", f"output_dir={folder}", code=0)
    stages, outcome = read_manifest(folder / "manifest.json")["device_used_bytes"], result(folder)
    assert stages["start"] == 0
    assert CONTEXT_BYTES[0] < stages["context"] < CONTEXT_BYTES[1]
    assert stages["context"] < stages["weights"] <= stages["first_step"] <= outcome["device_used_bytes"]
    assert outcome["peak_memory_bytes"] < outcome["device_used_bytes"]
    assert 0 < outcome["workspace_bytes"] < outcome["peak_memory_bytes"]
    assert outcome["other_processes"]["bytes"] < 1e9
    lines = [line for line in metrics(folder) if "loss" in line]
    assert all(0 < line["device_used_bytes"] <= outcome["device_used_bytes"] for line in lines)
