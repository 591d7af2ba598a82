"""Hardware, versions and commit of a measurement, and the clock of its steps."""

import platform
import resource
import time
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import app
from app.tracking.recorder import git_state, versions
from scripts.bench.contest import Contest
from scripts.bench.gauge import Gauge

_PEERS = ("trl", "liger-kernel", "unsloth", "triton", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "flash-attn")
# Dense bf16 from vendor data sheets, in 1e12 operations per second; the first key contained in the GPU name counts.
PEAK_TFLOPS = {"H200": 989.0, "H100": 989.0, "A100": 312.0, "L40S": 362.0, "L4": 121.0, "4090": 165.0}


def here(device: torch.device) -> dict[str, Any]:
    """Return the facts for each line."""
    git = git_state(Path(app.__file__).parent)
    return {
        "hardware": hardware(device),
        "versions": {"python": platform.python_version(), **versions(), **_installed(_PEERS)},
        "commit": None if git is None else git["commit"],
        "dirty": None if git is None else git["dirty"],
    }


def hardware(device: torch.device) -> dict[str, Any]:
    """Return the name and size of the device."""
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        return {"name": facts.name, "memory_bytes": facts.total_memory, "cuda": torch.version.cuda}
    return {"name": cpu_name(), "threads": torch.get_num_threads(), "kernels": torch.backends.cpu.get_cpu_capability()}


def cpu_name() -> str:
    """Return the CPU model name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")


def _installed(names: tuple[str, ...]) -> dict[str, str]:
    installed = {}
    for name in names:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    return installed


def peak_tflops(contest: Contest, device: torch.device) -> float | None:
    """Return the bf16 peak rate; None if unknown."""
    if contest.peak_tflops is not None:
        return contest.peak_tflops
    if device.type != "cuda" or contest.precision != "bf16":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)


def matrix_weights(network: nn.Module) -> int:
    """Return the number of weights multiplied per token: linear layers and head, quantized or not, no adapters."""
    return sum(
        layer.in_features * layer.out_features
        for name, layer in network.named_modules()
        if hasattr(layer, "in_features")
        and hasattr(layer, "out_features")
        and isinstance(getattr(layer, "weight", None), torch.Tensor)
        and not hasattr(layer, "base_layer")
        and "lora_" not in name
    )


def mfu(contest: Contest, weights: int, tokens_per_second: float, peak: float | None) -> float | None:
    """Return the MFU: 4 operations per frozen weight and token, 6 per trained one; recomputation does not count."""
    if peak is None:
        return None
    operations = (6 if contest.method == "full" else 4) * weights
    return operations * tokens_per_second / (peak * 1e12)


def process_peak_bytes() -> int:
    """Return the peak memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


class Clock:
    """Clock of a run: `begin`, then `mark` after each step. The first step, the warmup and a profiled step after the
    measured ones are counted separately.

    On a GPU the marks are events in the queue, read once at the end. The clock synchronizes twice before: after the
    first step, which may compile, and at the end of the warmup, where the peak memory is reset.
    """

    def __init__(
        self, device: torch.device, warm_up: int, steps: int, *, profile: bool = False, gauge: Gauge | None = None
    ) -> None:
        self.device = device
        self.gauge = gauge or Gauge(device)
        self.warm_up = warm_up
        self.steps = steps
        self.first_step = 0.0
        self.cpu_seconds = 0.0
        self.context_bytes: int | None = None  # GPU memory of this process outside torch's allocator
        self.profiler: Any = torch.profiler.profile(record_shapes=True) if profile else None
        self.peak_before = self.peak_measured = (0, 0)  # bytes allocated and reserved on a GPU
        self._losses: list[Tensor | float] = []
        self._marks: list[float | torch.cuda.Event] = []
        self._start = 0.0

    @property
    def on_gpu(self) -> bool:
        """Whether steps run asynchronously."""
        return self.device.type == "cuda"

    def begin(self) -> None:
        """Start the clock right before the first step."""
        self._wait()
        if self.on_gpu:
            torch.cuda.empty_cache()  # memory reserved during building does not count
        self._start = time.perf_counter()
        if self.warm_up == 0:
            self._start_measuring()

    def mark(self, loss: Tensor | float) -> None:
        """Record the end of a step, and its mean loss per token."""
        self._losses.append(loss.detach() if isinstance(loss, Tensor) else loss)
        done = len(self._losses)
        if done > self.warm_up + self.steps:
            self._end_profile()
            return
        if done == 1:
            self._wait()
            self.first_step = time.perf_counter() - self._start
        if done == self.warm_up:
            self._start_measuring()
        elif done > self.warm_up:
            self._mark()
        if done == self.warm_up + self.steps:
            self._end_measuring()

    @property
    def losses(self) -> list[float]:
        """Losses of all steps, including the warmup."""
        return [float(loss) for loss in self._losses]

    @property
    def step_seconds(self) -> list[float]:
        """Times of the measured steps."""
        return [_between(a, b) for a, b in pairwise(self._marks)]

    def _start_measuring(self) -> None:
        self._wait()
        if self.on_gpu:
            self.peak_before = (
                torch.cuda.max_memory_allocated(self.device),
                torch.cuda.max_memory_reserved(self.device),
            )
            torch.cuda.reset_peak_memory_stats(self.device)
        self.gauge.start()
        self.cpu_seconds = time.process_time()
        self._mark()

    def _end_measuring(self) -> None:
        self._wait()
        self.cpu_seconds = time.process_time() - self.cpu_seconds
        self.gauge.stop()
        used = self.gauge.own_bytes()
        if used is not None:
            self.context_bytes = used - torch.cuda.memory_reserved(self.device)
        if self.on_gpu:
            self.peak_measured = (
                torch.cuda.max_memory_allocated(self.device),
                torch.cuda.max_memory_reserved(self.device),
            )
        if self.profiler is not None:
            self.profiler.start()

    def _end_profile(self) -> None:
        self._wait()
        self.profiler.stop()

    def _mark(self) -> None:
        if not self.on_gpu:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def _wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)


def _between(a: "float | torch.cuda.Event", b: "float | torch.cuda.Event") -> float:
    if isinstance(a, torch.cuda.Event) and isinstance(b, torch.cuda.Event):
        return float(a.elapsed_time(b)) / 1e3
    assert isinstance(a, float)
    assert isinstance(b, float)
    return b - a
