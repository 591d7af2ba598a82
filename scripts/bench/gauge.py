"""GPU clock, power and temperature during the measured steps, and memory of other processes, read from NVML."""

import os
import threading
from contextlib import suppress
from statistics import mean
from typing import Any

import torch

_INTERVAL = 0.1  # seconds between two samples
_CONTEXTS_BYTES = 4 << 30  # above the empty CUDA contexts of this process and three waiting ones


class Gauge:
    """Sampler of one GPU, created before this process uses it; `start` and `stop` enclose the measured steps.

    Every value is None without an NVIDIA GPU, its driver or nvidia-ml-py.
    """

    def __init__(self, device: torch.device) -> None:
        self._nvml: Any = None
        self._gpu: Any = None
        self._samples: list[tuple[float, float, float]] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        if device.type == "cuda":
            with suppress(Exception):  # nvidia-ml-py may be missing or fail
                self._connect(device)
        self.others_bytes = self._used_bytes()

    def start(self) -> None:
        """Start sampling."""
        if self._gpu is not None:
            self._thread.start()

    def stop(self) -> None:
        """Stop sampling."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def facts(self) -> dict[str, Any]:
        """Return means over the samples, and whether this process was alone on the device."""
        means = [round(mean(values), 1) for values in zip(*self._samples, strict=True)] or [None, None, None]
        return {
            **dict(zip(("sm_mhz", "watts", "celsius"), means, strict=True)),
            "samples": len(self._samples),
            "others_bytes": self.others_bytes,
            "alone": None if self.others_bytes is None else self.others_bytes < _CONTEXTS_BYTES,
        }

    def own_bytes(self) -> int | None:
        """Return the device memory of this process; None if unknown to the driver, as in most containers."""
        with suppress(Exception):
            processes = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._gpu)
            return next((process.usedGpuMemory for process in processes if process.pid == os.getpid()), None)
        return None

    def _connect(self, device: torch.device) -> None:
        import pynvml

        pynvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(device).uuid
        self._nvml, self._gpu = pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")

    def _used_bytes(self) -> int | None:
        with suppress(Exception):  # version 2 excludes memory reserved by the driver
            return int(self._nvml.nvmlDeviceGetMemoryInfo(self._gpu, version=self._nvml.nvmlMemory_v2).used)
        return None

    def _sample(self) -> None:
        nvml, gpu = self._nvml, self._gpu
        while True:
            with suppress(nvml.NVMLError):
                clock = nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)
                watts = nvml.nvmlDeviceGetPowerUsage(gpu) / 1000
                celsius = nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)
                self._samples.append((clock, watts, celsius))
            if self._stopped.wait(_INTERVAL):
                return
