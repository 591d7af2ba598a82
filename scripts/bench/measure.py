"""Measure one contender in its own process.

python -m scripts.bench.measure CONTEST.json RESULT.json [TURN]

With TURN, import the packages and wait until this file exists before using the device.
"""

import os
import sys
import time
import warnings
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import import_module
from math import isfinite
from pathlib import Path
from statistics import mean, median
from typing import Any

from app.files import write_json
from scripts.bench.contest import Contest, contest_of
from scripts.bench.frameworks import FRAMEWORKS, split_settings


def main() -> None:
    """Write the result; errors are on standard error, without a result file."""
    contest = contest_of(Path(sys.argv[1]).read_text())
    warnings.simplefilter("ignore")
    missing = FRAMEWORKS[split_settings(contest.framework)[0]].requires(contest)
    if missing:
        sys.exit(f"needs {' and '.join(missing)}")
    if len(sys.argv) > 3:
        _await_turn(contest, Path(sys.argv[3]))
    write_json(Path(sys.argv[2]), measured(contest))


def _await_turn(contest: Contest, turn: Path) -> None:
    """Import the contender's packages and wait for the file; exit if the parent process has ended."""
    parent, start = os.getppid(), time.perf_counter()
    for name in FRAMEWORKS[split_settings(contest.framework)[0]].imports:
        import_module(name)
    import torch

    device = "initialized" if torch.cuda.is_initialized() else "not initialized"
    print(f"imported in {time.perf_counter() - start:.1f} s, CUDA {device}", flush=True)
    while not turn.exists():
        if os.getppid() != parent:
            sys.exit("the parent benchmark has ended")
        time.sleep(0.05)


def measured(contest: Contest) -> dict[str, Any]:
    """Build and train the contender, and return the result."""
    import torch

    from scripts.bench.gauge import Gauge

    start = time.perf_counter()
    framework, settings = split_settings(contest.framework)
    device = torch.device(contest.device)
    gauge = Gauge(device)
    contender = FRAMEWORKS[framework].build(contest, settings)
    from scripts.bench.machine import Clock  # not before Unsloth, which must be imported before transformers

    clock = Clock(device, contest.warm_up, contest.steps, profile=contest.profile, gauge=gauge)
    start_seconds = time.perf_counter() - start
    contender.train(clock)
    return {
        **asdict(contest),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        **_result(contest, contender, clock),
        "start_seconds": round(start_seconds, 3),
    }


def _result(contest: Contest, contender: Any, clock: Any) -> dict[str, Any]:
    from scripts.bench.kernels import kernels_of
    from scripts.bench.loops import Ours, positions_in
    from scripts.bench.machine import here, matrix_weights, mfu, peak_tflops
    from scripts.bench.workload import digest, sizes_of, workload

    vocabulary = contender.network.get_input_embeddings().num_embeddings
    steps = workload(contest, vocabulary)
    counted = steps[contest.warm_up : contest.warm_up + contest.steps]
    sizes, seconds = sizes_of(counted), clock.step_seconds
    assert len(clock.losses) == len(steps), f"{len(clock.losses)} steps instead of {len(steps)}"
    rate = sizes.tokens / sum(seconds)
    weights = matrix_weights(contender.network)
    trained = sum(p.numel() for p in contender.network.parameters() if p.requires_grad)
    positions = sum(positions_in(step, contender.layout, contest.bin_tokens) for step in counted)
    return {
        "tokens_per_second": round(rate, 2),
        "nonpad_tokens": sizes.tokens,
        "trained_tokens": sizes.trained,
        "documents": sizes.documents,
        "positions": positions,
        "fill": round(sizes.tokens / positions, 4),
        "seconds": round(sum(seconds), 4),
        "step_seconds": _spread(seconds),
        "cpu_seconds": round(clock.cpu_seconds, 3),
        "first_step_seconds": round(clock.first_step, 3),
        **_memory(clock),
        "planned_memory_bytes": contender.planned_bytes() if isinstance(contender, Ours) else None,
        "mfu": mfu(contest, weights, rate, peak_tflops(contest, clock.device)),
        "losses": [round(loss, 7) if isfinite(loss) else None for loss in clock.losses],
        "matrix_weights": weights,
        "trained_weights": trained,
        "attention": contender.attention,
        "layout": contender.layout,
        "recomputed": contender.recomputed if isinstance(contender, Ours) else contest.recompute,
        "workload": digest(steps),
        "verified": contender.verified if isinstance(contender, Ours) else None,
        "gpu": clock.gauge.facts(),
        **(kernels_of(clock.profiler, contest, vocabulary) if contest.profile else {}),
        **here(clock.device),
    }


def _spread(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    tenth = (len(ordered) - 1) / 10
    values = {
        "mean": mean(ordered),
        "median": median(ordered),
        "p10": ordered[round(tenth)],
        "p90": ordered[round(9 * tenth)],
    }
    return {name: round(value, 5) for name, value in values.items()}


def _memory(clock: Any) -> dict[str, int | None]:
    """Return the peak memory: of the measured steps on a GPU, of the whole process on a CPU."""
    from scripts.bench.machine import process_peak_bytes

    (allocated, reserved), before = clock.peak_measured, clock.peak_before
    return {
        "peak_memory_bytes": allocated if clock.on_gpu else process_peak_bytes(),
        "peak_reserved_bytes": reserved if clock.on_gpu else None,
        "peak_memory_bytes_of_all": max(allocated, before[0]) if clock.on_gpu else None,
        "peak_reserved_bytes_of_all": max(reserved, before[1]) if clock.on_gpu else None,
        "context_bytes": clock.context_bytes,
    }


if __name__ == "__main__":
    main()
