"""What compile=auto means: whether decoder layers are compiled, decided at a run's first start and then kept.

Auto compiles on an NVIDIA GPU if every layer can be compiled and the run is long enough to repay the compile time.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from app.config.adapters import compile_obstacle
from app.config.compile_rules import AUTO, BLOCKS, NONE, Obstacle, settings_obstacles
from app.config.schema import RunConfig
from app.distributed.process_group import HostGroup
from app.layers.compilable import model_obstacles, product_flops
from app.layers.router_loss import coefficient_of

COMPILE_CHOICE = "compile"  # among the choices of a checkpoint and of a manifest

# Of one process over the whole run. Measured on an H200: the compiler takes 15 s and saves 19 % of the step, so it is
# repaid after 80 s of uncompiled steps, which do 370 TFLOP/s: 65 steps of Llama-3.1-8B with 16,384 tokens.
REPAYING_FLOPS = 3e16


@dataclass(frozen=True, slots=True)
class CompileFacts:
    """What compile=auto decides by."""

    device: str
    obstacles: tuple[str, ...] = ()  # that compile=blocks is refused for
    is_rocm: bool = False
    trains_experts: bool = False  # by adapters
    router_coefficient: float = 0.0
    flops: float = 0.0  # of products in layers that can be compiled: of one process, over the whole run
    stored: str | None = None  # the choice of the checkpoint


class CompileChoice(NamedTuple):
    """`kind`: blocks or none. `reasons`: why not, on a GPU."""

    kind: str
    reasons: tuple[str, ...] = ()


def choose_compile(facts: CompileFacts) -> CompileChoice:
    """Decide compile=auto. A continued run keeps its choice, unless this machine cannot compile."""
    if facts.device != "cuda":
        return CompileChoice(NONE)
    if facts.stored == NONE:
        return CompileChoice(NONE, ("as when the run began",))
    reasons = list(facts.obstacles)
    if facts.is_rocm:
        reasons.append("not tested on ROCm")
    if facts.trains_experts:
        reasons.append("adapter.experts=true")
    if facts.router_coefficient:
        reasons.append(f"the routers' loss (coefficient {facts.router_coefficient:g}) reads inside layers")
    if not reasons and not facts.flops:
        reasons.append("every layer has a recurrent mixer, whose rows have many shapes")
    elif not reasons and facts.stored is None and facts.flops < REPAYING_FLOPS:
        of_run, repaying = (each / 1e15 for each in (facts.flops, REPAYING_FLOPS))
        reasons.append(f"too few steps to repay compiling ({of_run:.2g} PFLOP, at least {repaying:g})")
    return CompileChoice(NONE, tuple(reasons)) if reasons else CompileChoice(BLOCKS)


def settle_compile(
    run: RunConfig, stored: Mapping[str, str], host_group: HostGroup, facts: Callable[[str | None], CompileFacts]
) -> CompileChoice:
    """Settle `compile` by the `stored` choices of a checkpoint, else by the facts, which take that choice.

    Layers are compiled on all processes or on none.
    """
    if run.compile.kind != AUTO:
        return CompileChoice(run.compile.kind)
    choices = host_group.all_gather_object(choose_compile(facts(stored.get(COMPILE_CHOICE))))
    found: CompileChoice = next((each for each in choices if each.kind == NONE), choices[0])
    return found


def compile_facts(
    run: RunConfig,
    lm: Any,
    device: str,
    obstacles: Iterable[Obstacle] = (),
    steps: int | None = None,
    stored: str | None = None,
) -> CompileFacts:
    """Collect the facts, of which a run on another device than a GPU needs none. `lm` may be on meta.

    `obstacles` are those beside the settings and the model. Without `steps` the run counts as long enough.
    """
    if device != "cuda":
        return CompileFacts(device)
    all_obstacles = (*settings_obstacles(run), *model_obstacles(lm), *obstacles)
    flops = product_flops(lm, trains_all=run.adapter.kind == "none")
    if steps is not None and run.batching.packing:
        flops *= run.batching.bin_tokens * run.batching.accumulation * steps
    elif flops:
        flops = math.inf
    return CompileFacts(
        device,
        obstacles=(*filter(None, [compile_obstacle(run.adapter)]), *(each.reason for each in all_obstacles)),
        is_rocm=torch.version.hip is not None,
        trains_experts=run.adapter.kind != "none" and run.adapter.experts,
        router_coefficient=coefficient_of(run.task, run.adapter, lm) if run.task.router_loss == AUTO else 0.0,
        flops=flops,
        stored=stored,
    )


def with_planned_compile(run: RunConfig, lm: Any, device: str) -> RunConfig:
    """Settle compile=auto for a memory plan of a gpu or cpu."""
    if run.compile.kind != AUTO:
        return run
    choice = choose_compile(compile_facts(run, lm, "cuda" if device == "gpu" else device))
    return with_compile(run, choice.kind)


def with_compile(run: RunConfig, kind: str) -> RunConfig:
    """Return the run with another kind of `compile`."""
    return replace(run, compile=replace(run.compile, kind=kind))
