"""Time of one step by kind of operation, measured by torch's profiler."""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from app.distributed.process_group import Runtime
from app.files import report_write_errors
from app.tracking.formatting import align_columns
from app.training.train_step import StepResult

OTHER = "other"
BETWEEN = "between operations"  # Python on a CPU; a GPU that waits
# Parts of the names of operations; the first kind that has one of them counts. Inductor's names say pointwise (poi),
# reduction (red, per) or template of a product (tem).
KINDS = {
    "own kernels": ("app_kernels::",),
    "collectives": ("c10d::", "nccl", "gloo", "fsdp::"),
    "contractions": ("::mm", "addmm", "bmm", "_mm", "matmul", "gemm", "gemv", "::linear", "attention", "conv", "_tem_"),
    "normalisations": (
        *("_norm", "softmax", "logsumexp", "cross_entropy", "nll_loss", "_red_", "_per_"),
        *("aten::mean", "aten::sum", "aten::var", "aten::amax"),
    ),
    "element-wise": (
        *("add", "sub", "mul", "div", "neg", "pow", "sqrt", "lerp", "::exp", "::log", "where", "masked_fill", "clamp"),
        *("silu", "gelu", "relu", "sigmoid", "tanh", "::sin", "::cos", "dropout", "bernoulli", "_poi_", "cpp_fused"),
        *("_fused_", "optimizer_update", "quantize"),
    ),
    "copies": (
        "copy",
        "::cat",
        "stack",
        "clone",
        "fill_",
        "zero_",
        "index",
        "gather",
        "scatter",
        "embedding",
        "slice_",
    ),
}
_SHOWN_NAMES = 3  # of a kind
_QUIET = "6"  # above every level of Kineto, which else writes to stderr as it begins and as it ends


def kind_of(name: str) -> str:
    """The kind of an operation by its name."""
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), OTHER)


def profiled(step: Callable[[], StepResult], runtime: Runtime, trace: Path) -> tuple[StepResult, dict[str, Any]]:
    """Run a step under the profiler and write its trace; returns its `seconds`, its `kinds` and `operations` too.

    The seconds of all kinds add up to those of the step. No earlier work may wait on the device.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", _QUIET)
    on_gpu = runtime.device.type == "cuda"
    with runtime.accelerator.profile() as profiler:
        begun = time.perf_counter()
        result = step()
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begun
    with report_write_errors(trace):
        partial = trace.with_name(f".{trace.name}.partial")
        profiler.export_chrome_trace(str(partial))
        partial.replace(trace)
    operations = _operations(profiler, on_gpu=on_gpu)
    kinds = dict.fromkeys((*KINDS, OTHER), 0.0)
    for each in operations:
        kinds[each["kind"]] += each["seconds"]
    busy = sum(kinds.values())  # more than the step where threads or streams run side by side
    kinds[BETWEEN] = max(0.0, seconds - busy)
    return result, {"seconds": busy + kinds[BETWEEN], "kinds": kinds, "operations": operations}


def _operations(profiler: Any, *, on_gpu: bool) -> list[dict[str, Any]]:
    """What operations took without those that they called, on a GPU its kernels; the slowest first."""
    found, of_device = list[tuple[str, int, float]](), 0.0
    for each in profiler.key_averages():
        if each.device_type == torch.autograd.DeviceType.CPU:
            took = each.self_device_time_total if on_gpu else each.self_cpu_time_total
            found.append((each.key, each.count, took))
        elif not each.is_user_annotation:
            of_device += each.self_device_time_total
    if on_gpu:
        found.append(("launched by no operation", 1, of_device - sum(took for *_, took in found)))
    operations = [
        {"name": name, "kind": kind_of(name), "calls": calls, "seconds": took / 1e6}
        for name, calls, took in found
        if took > 0
    ]
    return sorted(operations, key=lambda each: -each["seconds"])


def profile_table(step: int, device: str, facts: Mapping[str, Any]) -> str:
    """The seconds of each kind as text, with its slowest operations."""
    rows = [(f"profile of step {step}", "seconds", "share", "most of it")]
    for kind, seconds in sorted(facts["kinds"].items(), key=lambda each: -each[1]):
        names = [each["name"].removeprefix("aten::") for each in facts["operations"] if each["kind"] == kind]
        if seconds:
            rows.append((kind, f"{seconds:.4f}", f"{seconds / facts['seconds']:.1%}", ", ".join(names[:_SHOWN_NAMES])))
    return align_columns([*rows, (f"all, on {device}", f"{facts['seconds']:.4f}", "", "")])
