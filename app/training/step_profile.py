"""Time of one step by kind of operation, measured by torch's profiler."""

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from app.distributed.process_group import Runtime
from app.files import report_write_errors, write_json
from app.tracking.formatting import align_columns
from app.tracking.recorder import Recorder
from app.training.train_step import StepResult

# Parts of the names of operations; the first kind that has one of them counts. Inductor's names say pointwise (poi),
# reduction (red, per) or template of a product (tem).
KINDS = {
    "own kernels": "app_kernels::",
    "collectives": "c10d:: nccl gloo fsdp::",
    "contractions": "::mm addmm bmm _mm matmul gemm gemv ::linear attention conv _tem_",
    "normalisations": "_norm softmax logsumexp cross_entropy nll_loss _red_ _per_ ::mean ::sum ::var ::amax",
    "element-wise": "add sub mul div neg pow sqrt lerp ::exp ::log ::sin ::cos where masked_fill clamp silu gelu relu "
    "sigmoid tanh dropout bernoulli _poi_ cpp_fused _fused_ optimizer_update quantize",
    "copies": "copy ::cat stack clone fill_ zero_ index gather scatter embedding slice_",
}
OTHER = "other"
BETWEEN = "between operations"  # Python on a CPU; a GPU that waits
_SHOWN_NAMES = 3  # of a kind


def kind_of(name: str) -> str:
    """The kind of an operation by its name."""
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts.split())), OTHER)


def profiled(
    number: int, step: Callable[[], StepResult], runtime: Runtime, recorder: Recorder
) -> tuple[StepResult, float]:
    """Run a step under the profiler, and record what its time goes to; the seconds of all that are returned too.

    The kinds add up to the time of the step.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it writes to stderr as it begins and ends
    wait: Callable[[], object] = torch.cuda.synchronize if runtime.device.type == "cuda" else lambda: None
    wait()  # the steps before are no part of this one
    started = time.perf_counter()
    with runtime.accelerator.profile() as profiler:
        begun = time.perf_counter()
        result = step()
        wait()
        seconds = time.perf_counter() - begun
    operations = operations_of(profiler, on_gpu=runtime.device.type == "cuda")
    kinds = {kind: sum(each["seconds"] for each in operations if each["kind"] == kind) for kind in (*KINDS, OTHER)}
    busy = sum(kinds.values())  # more than the step where threads or streams run side by side
    kinds[BETWEEN] = max(0.0, seconds - busy)
    facts = {"seconds": busy + kinds[BETWEEN], "kinds": kinds, "operations": operations}
    write_json(recorder.folder.profile, {"step": number, "device": runtime.device.type, **facts})
    trace = recorder.folder.trace
    with report_write_errors(trace):
        partial = trace.with_name(f".{trace.name}.partial")
        profiler.export_chrome_trace(str(partial))
        partial.replace(trace)
    recorder.message(_table(f"profile of step {number}", facts))
    return result, time.perf_counter() - started


def operations_of(profiler: Any, *, on_gpu: bool) -> list[dict[str, Any]]:
    """What operations took without those that they called, on a GPU its kernels; the slowest first."""
    found, of_device = list[tuple[str, int, float]](), 0.0
    for each in profiler.key_averages():
        if each.device_type.name == "CPU":
            found.append((each.key, each.count, each.self_device_time_total if on_gpu else each.self_cpu_time_total))
        elif not each.is_user_annotation:
            of_device += each.self_device_time_total
    if on_gpu:
        found.append(("launched by no operation", 1, of_device - sum(took for *_, took in found)))
    return [
        {"name": name, "kind": kind_of(name), "calls": calls, "seconds": took / 1e6}
        for name, calls, took in sorted(found, key=lambda each: -each[2])
        if took > 0
    ]


def _table(title: str, facts: Mapping[str, Any]) -> str:
    rows = [(title, "seconds", "share", "most of it")]
    for kind, seconds in sorted(facts["kinds"].items(), key=lambda each: -each[1]):
        names = [each["name"].removeprefix("aten::") for each in facts["operations"] if each["kind"] == kind]
        if seconds:
            rows.append((kind, f"{seconds:.4f}", f"{seconds / facts['seconds']:.1%}", ", ".join(names[:_SHOWN_NAMES])))
    return align_columns([*rows, ("all", f"{facts['seconds']:.4f}", "", "")])
