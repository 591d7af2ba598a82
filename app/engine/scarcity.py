"""What happens when a device runs out of memory."""

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from app.errors import EnvironmentProblem, Unfinished

Found = TypeVar("Found")


def tried(work: Callable[..., Found], *given: Any) -> Found | None:
    """What `work` returns, or None where it ran out of memory; by then all that it had made is let go."""
    try:
        return work(*given)
    except torch.OutOfMemoryError:
        pass  # nothing is done here: as long as the exception lives, so does all that its frames hold
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None


def does_not_fit(what: str, kept: Mapping[str, int]) -> EnvironmentProblem:
    """`kept` is what stays in memory from step to step, by part."""
    parts = ", ".join(f"{name.replace('_', ' ')} {size / 1e9:.2f} GB" for name, size in kept.items() if size)
    beside = f" beside what stays from step to step ({parts})" if parts else ""
    return EnvironmentProblem(
        f"out of memory: {what} does not fit{beside}. Cheapest first: "
        "training.recompute=true, training.offload=true, a smaller dataset.max_length (with batching.tokens), "
        "optimizer=paged_adamw_8bit, recipe=qlora. Checkpoints made before are kept: resume=auto goes on where "
        "the settings allow it; docs/out-of-memory.md says which do."
    )


class TooLargeTogether(Unfinished):
    """A micro-batch that cannot be made again, because other processes are in the middle of it."""

    def __init__(self, what: str, depth: int) -> None:
        self.depth = depth  # how often the next start halves micro-batches
        super().__init__(
            f"out of memory: {what} does not fit, and with parallel=fsdp it cannot be made again while the other "
            "processes are in the middle of it. Start the same run again with resume=auto: from its last checkpoint "
            f"on micro-batches are split by documents then, into up to {2**depth} parts. The gradient is the same. A "
            "smaller batching.tokens (or batching.rows) with more batching.accumulation is faster."
        )


@contextmanager
def told_where_it_ends_a_run() -> Iterator[None]:
    """Around what is not made in parts: loading weights, proofs, a save."""
    try:
        yield
    except torch.OutOfMemoryError as fault:
        raise does_not_fit("what this run needs outside of its steps", {}) from fault
