"""Clock, power and temperature during the measured steps. The GPU's driver is a stand-in with NVML's functions."""

import os
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scripts.bench.gauge import Gauge

CUDA = torch.device("cuda")
OTHERS = 5_000_000_000
MEASURED = ("sm_mhz", "watts", "celsius")


def driver() -> Any:
    clocks = iter([1980, 1500, *[1740] * 1000])
    return SimpleNamespace(
        NVMLError=ZeroDivisionError,
        NVML_CLOCK_SM=1,
        NVML_TEMPERATURE_GPU=0,
        nvmlMemory_v2=2,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: {"GPU-7": "gpu"}[uuid],
        nvmlDeviceGetMemoryInfo=lambda gpu, version: SimpleNamespace(used=OTHERS),
        nvmlDeviceGetClockInfo=lambda gpu, clock: next(clocks),
        nvmlDeviceGetPowerUsage=lambda gpu: 700_000,
        nvmlDeviceGetTemperature=lambda gpu, sensor: 61,
        nvmlDeviceGetComputeRunningProcesses=lambda gpu: [
            SimpleNamespace(pid=1, usedGpuMemory=5),
            SimpleNamespace(pid=os.getpid(), usedGpuMemory=9),
        ],
    )


@pytest.fixture
def gauge(monkeypatch: pytest.MonkeyPatch) -> Gauge:
    monkeypatch.setitem(sys.modules, "pynvml", driver())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(uuid="7"))
    return Gauge(CUDA)


def test_gauge_samples_until_it_is_stopped(gauge: Gauge) -> None:
    gauge.start()
    time.sleep(0.25)
    gauge.stop()
    facts = gauge.facts()
    time.sleep(0.15)
    assert gauge.facts() == facts
    assert facts["samples"] >= 2
    assert facts["sm_mhz"] == pytest.approx((1980 + 1500 + 1740 * (facts["samples"] - 2)) / facts["samples"], abs=0.1)
    assert (facts["watts"], facts["celsius"]) == (700, 61)
    assert (facts["others_bytes"], facts["alone"]) == (OTHERS, False)
    assert gauge.own_bytes() == 9


def test_gauge_without_driver_reports_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    for device in (CUDA, torch.device("cpu")):
        gauge = Gauge(device)
        gauge.start()
        gauge.stop()
        assert all(value is None for key, value in gauge.facts().items() if key != "samples")
        assert gauge.own_bytes() is None
