"""Memory of this process and of others on a GPU, utilization and clocks, by a driver with known answers."""

import os
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from app.distributed.process_group import HostGroup
from app.memory.estimate import machine_of
from app.training import gpu_usage
from app.training.gpu_usage import (
    MAX_CONTEXT_BYTES,
    GpuMonitor,
    Reading,
    Taken,
    read_clocks,
    read_driver,
    read_gpu,
    read_samples,
    taken_by_others,
    usage_of,
)

PID, ALONE = os.getpid(), HostGroup(0, 1)
GB, MB = 10**9, 10**6
CONTEXT, WORKSPACES = 650 * MB, 67 * MB
Processes = Sequence[tuple[int, int | None]]


class NVMLError(Exception):
    pass


def unsupported(*_: Any) -> Any:
    raise NVMLError


def driver(used: int, processes: Processes, **queries: Any) -> Any:
    """NVML of a GPU of 80 GB, of which the driver reserves one."""
    running = [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in processes]
    answers = {
        "NVMLError": NVMLError,
        "nvmlMemory_v2": 2,
        "nvmlDeviceGetMemoryInfo": lambda _gpu, version: SimpleNamespace(total=80 * GB, reserved=GB, used=used),
        "nvmlDeviceGetComputeRunningProcesses": lambda _gpu: running,
    }
    return SimpleNamespace(**(answers | queries))


def reading(used: int, processes: Processes, reserved: int = 0) -> Reading:
    return read_driver(driver(used, processes), "gpu", reserved, reserved)


@pytest.mark.parametrize(
    ("processes", "in_use", "is_estimated", "listed", "count"),
    [
        pytest.param([(PID, 12 * GB), (7, 8 * GB)], 12 * GB, False, ((7, 8 * GB),), 1, id="listed with sizes"),
        pytest.param([(PID, None), (7, None)], 11 * GB, True, ((7, None),), 1, id="listed without sizes: MIG"),
        pytest.param([(PID, 0)], 11 * GB, True, (), 0, id="listed with 0 bytes: container"),
        pytest.param([(PID, GB)], 11 * GB, True, (), 0, id="listed with less than allocated: container"),
        pytest.param([(90, 12 * GB), (7, 8 * GB)], 11 * GB, True, (), 1, id="by another pid: container"),
        pytest.param([], 11 * GB, True, (), 0, id="not listed: container"),
    ],
)
def test_usage_splits_the_device_between_this_process_and_others(
    processes: Processes, in_use: int, is_estimated: bool, listed: Processes, count: int
) -> None:
    usage = usage_of(reading(20 * GB, processes, reserved=10 * GB), PID, unlisted_bytes=GB)
    assert (usage.bytes, usage.is_estimated) == (in_use, is_estimated)
    everything = in_use if is_estimated else in_use + GB
    assert usage.others == Taken(79 * GB, 20 * GB - everything, tuple(listed), count)


def test_usage_before_the_first_allocation_is_of_others_alone() -> None:
    usage = usage_of(reading(20 * GB, [(7, 19 * GB)]), PID)
    assert (usage.bytes, usage.is_estimated) == (0, False)
    assert usage.others == Taken(79 * GB, 20 * GB, ((7, 19 * GB),), 1)
    assert usage.others.words == "20.0 of 79.0 GB of GPU memory (pid 7: 19.0 GB)"


def test_usage_without_a_process_list_is_estimated() -> None:
    nvml = driver(20 * GB, [], nvmlDeviceGetComputeRunningProcesses=unsupported)  # WSL
    usage = usage_of(read_driver(nvml, "gpu", 10 * GB), PID, unlisted_bytes=GB)
    assert (usage.bytes, usage.is_estimated, usage.others.bytes) == (11 * GB, True, 9 * GB)


def test_usage_read_from_cuda_assumes_the_largest_context() -> None:
    usage = usage_of(Reading(80 * GB, 20 * GB, {}, reserved=10 * GB, by_driver=False), PID, unlisted_bytes=5)
    assert usage.others.bytes == 20 * GB - usage.bytes == 10 * GB - MAX_CONTEXT_BYTES


def run_of(*readings: Reading, samples: Callable[[int], list[tuple[int, int]]] = lambda _: []) -> GpuMonitor:
    """A run whose start, context, weights, first step, line and end have these readings."""
    coming = iter(readings)
    gpu = GpuMonitor(lambda: next(coming), samples)
    assert [gpu.note_stage(name) for name in ("context", "weights", "first_step", "weights")] == [True] * 3 + [False]
    return gpu


@pytest.mark.parametrize("is_listed", [True, False], ids=["listed", "container"])
def test_monitor_separates_a_process_that_arrives_during_the_run(is_listed: bool) -> None:
    def state(reserved: int, others: int, context: int = CONTEXT) -> Reading:
        processes = [(PID, reserved + context)] * is_listed + [(8, others)] * (others > GB and is_listed)
        return reading(reserved + context + others, processes if context else [], reserved)

    gpu = run_of(
        *(state(0, GB, context=0), state(2 * MB, GB), state(4 * GB, GB)),
        *(state(5 * GB, GB, CONTEXT + WORKSPACES), state(5 * GB, 30 * GB, CONTEXT + WORKSPACES)),
        *[state(5 * GB, 20 * GB, CONTEXT + WORKSPACES)] * 2,
    )
    at_first = {"start": 0, "context": CONTEXT + 2 * MB, "weights": CONTEXT + 4 * GB}
    peak = 5 * GB + CONTEXT + WORKSPACES
    assert gpu.stages == {**at_first, "first_step": peak}
    assert gpu.line(ALONE) == {"device_used_bytes": peak, "other_processes_bytes": 30 * GB}
    assert gpu.result(ALONE) == {
        "device_used_bytes": peak,
        **({} if is_listed else {"device_is_estimated": True}),
        "other_processes": {"count": int(is_listed), "bytes": 30 * GB},
    }
    pids = " (pid 8: 30.0 GB)" if is_listed else ""
    assert gpu.note_others() == [f"other processes used up to 30.0 of 79.0 GB of GPU memory{pids}"]


def test_monitor_keeps_its_context_if_a_process_starts_meanwhile() -> None:
    gpu = run_of(
        *(
            reading(0, []),
            reading(CONTEXT, []),
            reading(CONTEXT + 40 * GB, [], GB),
            reading(CONTEXT + 2 * GB, [], 2 * GB),
        )
    )
    assert gpu.stages == {"start": 0, "context": CONTEXT, "weights": CONTEXT + GB, "first_step": CONTEXT + 2 * GB}


def test_monitor_peak_includes_memory_freed_before_the_reading() -> None:
    now = Reading(80 * GB, 6 * GB, {PID: 6 * GB}, reserved=5 * GB, peak_reserved=9 * GB)
    gpu = GpuMonitor(lambda: now, lambda _: [])
    result = gpu.result(ALONE)
    assert result == {"device_used_bytes": 10 * GB, "other_processes": {"count": 0, "bytes": 0}}
    assert gpu.note_others() == []


def test_monitor_averages_utilization_by_line_and_over_the_run() -> None:
    waiting = [[(1 << 60, 90), ((1 << 60) + 1, 100)], [], [((1 << 60) + 2, 20)]]
    asked: list[int] = []

    def samples(newest: int) -> list[tuple[int, int]]:
        asked.append(newest)
        return waiting.pop(0)

    gpu = GpuMonitor(lambda: reading(GB, [(PID, GB)]), samples)
    assert gpu.line(ALONE)["gpu_utilization"] == pytest.approx(0.95)
    assert "gpu_utilization" not in gpu.line(ALONE)
    assert gpu.result(ALONE)["gpu_utilization"] == pytest.approx(0.7)
    assert asked[1:] == [(1 << 60) + 1] * 2


def test_samples_of_the_driver_are_read_once() -> None:
    kept = [SimpleNamespace(timeStamp=at, sampleValue=SimpleNamespace(uiVal=at * 10)) for at in (0, 4, 5, 6)]
    nvml = SimpleNamespace(
        NVMLError=NVMLError, NVML_GPU_UTILIZATION_SAMPLES=1, nvmlDeviceGetSamples=lambda *_: (1, kept)
    )
    assert read_samples(nvml, "gpu", 4) == [(5, 50), (6, 60)]
    nvml.nvmlDeviceGetSamples = unsupported
    assert read_samples(nvml, "gpu", 4) == []


def test_clocks_without_support_of_one_query_has_the_others() -> None:
    nvml = SimpleNamespace(
        NVMLError=NVMLError,
        NVML_CLOCK_SM=1,
        NVML_CLOCK_MEM=2,
        nvmlDeviceGetClockInfo=lambda _gpu, clock: {1: 1665, 2: 9501}[clock],
        nvmlDeviceGetMaxClockInfo=unsupported,
        nvmlDeviceGetEnforcedPowerLimit=lambda _gpu: 350_000,
    )
    assert read_clocks(nvml, "gpu") == {"sm_mhz": 1665, "memory_mhz": 9501, "power_limit_watts": 350}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_gpu_nothing_is_in_use() -> None:
    taken_by_others.cache_clear()
    assert (taken_by_others(), read_gpu(), gpu_usage.clocks(), gpu_usage.gpu_samples(0)) == (None, None, None, [])
    gpu = GpuMonitor()
    assert (gpu.note_stage("context"), gpu.stages, gpu.note_others()) == (False, {}, [])


def test_memory_plan_counts_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(total_memory=80 << 30, major=8, minor=0)
    for name, value in (("is_available", True), ("get_device_name", "Some GPU"), ("get_device_properties", properties)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    full = Taken(80 << 30, 23 << 30, ((5, 22 << 30),))
    for module in ("app.training.gpu_usage", "app.memory.estimate"):
        monkeypatch.setattr(f"{module}.taken_by_others", lambda: full)
    assert machine_of(None).memory_bytes == 57 << 30
    assert machine_of(None).label == "Some GPU, 24.7 GB of it used by other processes"
    reserved = Taken(81 << 30, 1 << 30)  # by the driver, beyond what torch counts
    monkeypatch.setattr("app.memory.estimate.taken_by_others", lambda: reserved)
    assert machine_of(None).memory_bytes == 80 << 30
    assert gpu_usage.notes() == [f"other processes use {full.words}"]
    monkeypatch.setattr(gpu_usage, "taken_by_others", lambda: Taken(80 << 30, 100 << 20))
    assert gpu_usage.notes() == [], "a screen is nothing to speak of"
