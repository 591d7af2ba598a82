"""Settings that would make a run faster where its plan leaves much of a GPU free, derived from the plan alone.

The bound on the time of a token is its FLOPs at the peak rate of the GPU, plus the weights that a micro-batch reads and
dequantizes in each pass at its peak bandwidth. Larger micro-batches share these bytes among more tokens.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from app.config.rules import problems_of
from app.config.schema import RunConfig
from app.memory.estimate import (
    Hardware,
    MemoryPlan,
    check_fit,
    dequantization_seconds,
    quantized_weights,
    seconds_per_token,
)
from app.training.auto_settings import recomputed_layers

MAX_SPEEDUPS = 3
MIN_FACTOR = 1.05  # of the upper bound of tokens/s
_MIN_FREE_SHARE = 1 / 3  # of the memory of the GPU
_PACKED_BYTES = 0.5  # per weight of a 4-bit base
_UNPACKED_BYTES = 2 - _PACKED_BYTES  # more per dequantized weight
_STATES_PER_WEIGHT_BYTE = 2  # fp32 states of the adapter, which recipe=qlora pages
_FIXED_KINDS = ("frozen_weights", "quantization_constants", "trained_weights", "optimizer_states", "workspaces")


@dataclass(frozen=True, slots=True)
class Speedup:
    """Overrides and their effect. `needed_bytes` is an upper bound; None: only a trace tells."""

    overrides: tuple[str, ...]
    factor: float  # of the upper bound of tokens/s
    needed_bytes: int | None
    why: str

    @property
    def text(self) -> str:
        return " ".join(self.overrides)


def bound_seconds(run: RunConfig, plan: MemoryPlan, tokens: int, machine: Hardware) -> float:
    """Return the least time of a token if no transfer overlaps with compute."""
    return seconds_per_token(run, plan, tokens, machine) + _read_seconds(run, plan, machine) / tokens


def _read_seconds(run: RunConfig, plan: MemoryPlan, machine: Hardware) -> float:
    """Return the time to read the weights of all matrix products of a micro-batch."""
    if not machine.bytes_per_second:
        return 0.0
    stored = plan.largest["frozen_weights"] + plan.largest["trained_weights"]
    read = stored + _UNPACKED_BYTES * quantized_weights(run, plan)
    return plan.passes * read / machine.bytes_per_second


def speedups(run: RunConfig, plan: MemoryPlan, tokens: int, machine: Hardware) -> list[Speedup]:
    """Return the settings that raise the bound of a planned run on a mostly free GPU, the fastest first.

    `tokens`: positions of a micro-batch. Those whose upper bound of the memory does not fit are left out.
    """
    verdict = check_fit(plan, machine)
    has_rates = machine.rate(run.precision.kind) and machine.bytes_per_second and plan.forward_flops
    if not has_rates or verdict.needed_bytes > (1 - _MIN_FREE_SHARE) * verdict.memory_bytes:
        return []
    situation = run, plan, tokens, machine
    options = [*_without_dequantization(*situation), *_less_recomputation(*situation), *_larger(*situation)]
    return sorted((option for option in options if option.factor >= MIN_FACTOR), key=lambda option: -option.factor)


def _without_dequantization(run: RunConfig, plan: MemoryPlan, tokens: int, machine: Hardware) -> Iterator[Speedup]:
    quantized = quantized_weights(run, plan)
    if not quantized or problems_of(replace(run, quantization=replace(run.quantization, kind="none"))):
        return
    is_qlora = run.adapter.kind == "lora" and run.optimizer.kind == "paged_adamw_8bit"
    override = "recipe=lora" if is_qlora else "quantization=none"
    weights = _UNPACKED_BYTES * quantized + _UNPACKED_BYTES / _PACKED_BYTES * plan.largest["gathered_weights"]
    states = _STATES_PER_WEIGHT_BYTE * plan.anatomy["trained_weights"]
    needed = _needed(plan, round(plan.peak_bytes + weights + states), machine)
    before = bound_seconds(run, plan, tokens, machine)
    factor = before / (before - dequantization_seconds(run, plan, machine) / tokens)
    if needed is not None:
        yield Speedup((override,), factor, needed, "no weights to dequantize")


def _less_recomputation(run: RunConfig, plan: MemoryPlan, tokens: int, machine: Hardware) -> Iterator[Speedup]:
    if recomputed_layers(run.training):
        flops = plan.flops - plan.recomputed_flops * tokens * run.batching.accumulation
        least = replace(plan, flops=flops, recomputed_flops=0.0)
        factor = bound_seconds(run, plan, tokens, machine) / bound_seconds(run, least, tokens, machine)
        yield Speedup(("training.recompute=auto",), factor, None, "no more gradient checkpointing than necessary")


def _larger(run: RunConfig, plan: MemoryPlan, tokens: int, machine: Hardware) -> Iterator[Speedup]:
    """Yield the largest micro-batch with as many tokens per step; without accumulation, one twice as large."""
    batching = run.batching
    name, size = ("tokens", batching.bin_tokens) if batching.packing else ("rows", batching.rows)
    whole = batching.accumulation
    sizes = [times for times in range(whole, 1, -1) if whole % times == 0] or [2]
    for times in sizes:
        needed = _needed(plan, _scaled_peak(plan, times, accumulates=whole > 1), machine)
        if needed is None:
            continue
        shared = _read_seconds(run, plan, machine) + dequantization_seconds(run, plan, machine)
        before = bound_seconds(run, plan, tokens, machine)
        factor = before / (before - shared * (1 - 1 / times) / tokens)
        larger = f"batching.{name}={size * times}"
        if whole == 1:
            yield Speedup((larger,), factor, needed, "twice the tokens per step")
        else:
            overrides = larger, f"batching.accumulation={whole // times}"
            yield Speedup(overrides, factor, needed, "as many tokens per step in fewer micro-batches")
        return


def _scaled_peak(plan: MemoryPlan, times: int, *, accumulates: bool) -> int:
    """Return an upper bound of the peak of a larger micro-batch: all but weights and states grows with its tokens."""
    kinds = (*_FIXED_KINDS, "gradients") if accumulates else _FIXED_KINDS
    fixed = sum(plan.anatomy[kind] for kind in kinds)
    return fixed + times * (plan.peak_bytes - fixed)


def _needed(plan: MemoryPlan, peak_bytes: int, machine: Hardware) -> int | None:
    """Return the memory that a run with another peak needs; None if it does not fit."""
    verdict = check_fit(replace(plan, peak_bytes=peak_bytes), machine)
    return verdict.needed_bytes if verdict.fits else None


def facts_of(speedup: Speedup) -> Mapping[str, Any]:
    """Return an entry of `faster` in check.json and in the memory plan of a manifest."""
    bound = round(speedup.factor, 4)
    return {"override": speedup.text, "needed_bytes": speedup.needed_bytes, "bound": bound, "why": speedup.why}
