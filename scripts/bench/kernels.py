"""Operations of a profiled step by class, and by name and input shapes."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from app.training.trainer import kind_of
from scripts.bench.contest import Contest

_ROWS = 200  # of operations
_KERNELS = 60
_NAME = 120  # characters; C++ template names are longer
_TRITON = {"_poi_": "element-wise", "_red_": "normalisations", "_per_": "normalisations"}
_IGNORED = "Command Buffer Full"  # an event of the profiler while the launch queue is full
UNATTRIBUTED = "launched by no operation"


def kernels_of(profiler: Any, contest: Contest, vocabulary: int) -> dict[str, Any]:
    """Return seconds by class, the slowest operations, and the slowest GPU kernels by their own names."""
    on_gpu = contest.device == "cuda"
    rows = list(_operations(profiler, contest, vocabulary, on_gpu))
    kernels = list(_kernels(profiler)) if on_gpu else []
    classes: Counter[str] = Counter()
    for row in rows:
        classes[row["class"]] += row["seconds"]
    if on_gpu:
        classes[UNATTRIBUTED] = sum(row["seconds"] for row in kernels) - classes.total()
    return {
        "classes": {name: round(seconds, 6) for name, seconds in classes.most_common()},
        "operations": _slowest(rows, _ROWS),
        "kernels": _slowest(kernels, _KERNELS),
    }


def class_of(name: str, shapes: Sequence[Any], rank: int, vocabulary: int) -> str:
    """Return the class of an operation; a dimension equal to the rank or the vocabulary decides between products."""
    if name.startswith("triton_") and "_tem_" not in name:
        return next((kind for part, kind in _TRITON.items() if part in name), "element-wise")
    if "attention" in name or "attn" in name:
        return "attention"
    if "quantize" in name:
        return "quantize"
    kind = kind_of(name)
    if kind != "contractions":
        return kind
    sizes = {size for shape in shapes for size in shape if isinstance(size, int)}
    if vocabulary in sizes:
        return "head products"
    return (
        "thin products" if sizes & {rank, 2 * rank, 3 * rank} else "base products"
    )  # two or three adapters may be stacked


def _operations(profiler: Any, contest: Contest, vocabulary: int, on_gpu: bool) -> Iterator[dict[str, Any]]:
    for event in profiler.key_averages(group_by_input_shape=True):
        took = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if event.device_type.name == "CPU" and took > 0 and event.key != _IGNORED:
            shapes = event.input_shapes or []
            kind = class_of(event.key, shapes, contest.rank, vocabulary)
            yield {"name": event.key[:_NAME], "shapes": _text(shapes), "class": kind, **_times(event.count, took)}


def _kernels(profiler: Any) -> Iterator[dict[str, Any]]:
    for event in profiler.key_averages():
        if event.device_type.name != "CPU" and not event.is_user_annotation and event.key != _IGNORED:
            yield {"name": event.key[:_NAME], **_times(event.count, event.self_device_time_total)}


def _times(calls: int, microseconds: float) -> dict[str, Any]:
    return {"calls": calls, "seconds": round(microseconds / 1e6, 7)}


def _text(shapes: Sequence[Any]) -> str:
    """Return shapes as `16384x4096 4096x16`; scalars are omitted, lists of tensors shown by length."""
    words = [f"[{len(size)}]" if isinstance(size[0], list) else "x".join(map(str, size)) for size in shapes if size]
    return " ".join(words)[:_NAME]


def _slowest(rows: list[dict[str, Any]], number: int) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: -row["seconds"])[:number]
