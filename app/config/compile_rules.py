"""Rules about the section compile; `app.config.rules` has the others."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from app.config.schema import RunConfig

AUTO, BLOCKS, NONE = "auto", "blocks", "none"


class Obstacle(NamedTuple):
    """Why layers cannot be compiled, and the remedy where compile=blocks asks for it."""

    reason: str
    remedy: str


def compile_refusals(obstacles: Iterable[Obstacle]) -> Iterator[str]:
    """Yield the problems of compile=blocks."""
    for each in obstacles:
        yield f"compile=blocks: {each.reason}. {each.remedy}"


def settings_obstacles(run: RunConfig) -> Iterator[Obstacle]:
    """Yield obstacles that settings alone show."""
    if run.task.router_loss not in ("auto", 0):
        yield Obstacle(
            f"task.router_loss={run.task.router_loss:g} reads routers inside compiled layers",
            "Set compile=none, or task.router_loss=0.",
        )
    if not run.batching.packing:
        yield Obstacle(
            "padded rows have many shapes (batching.packing=false), and a graph has one",
            "Set batching.packing=true, or compile=none.",
        )


def compiled_layers_suit_the_run(run: RunConfig) -> Iterator[str]:
    """Problems with what is compiled, and how."""
    backend, mode, graphs = run.compile.backend, run.compile.mode, run.compile.graphs
    if run.compile.kind == BLOCKS:
        yield from compile_refusals(settings_obstacles(run))
    if mode != "default" and backend != "inductor":
        yield (
            f"compile.mode={mode} is of inductor, and compile.backend={backend} does not read it. "
            "Set compile.backend=inductor, or compile.mode=default."
        )
    if graphs and backend in {"aot_eager", "eager"}:
        yield (
            f"compile.graphs=true records kernels, which compile.backend={backend} leaves to torch one by one. "
            "Set compile.backend=inductor or cudagraphs, or compile.graphs=false."
        )
    if not graphs and backend == "cudagraphs":
        yield (
            "compile.backend=cudagraphs records CUDA graphs, as compile.graphs=true asks for. "
            "Set compile.graphs=true, or compile.backend=inductor."
        )
    if not graphs and mode in {"reduce-overhead", "max-autotune"}:
        yield (
            f"compile.mode={mode} records CUDA graphs, as compile.graphs=true asks for. "
            "Set compile.graphs=true, or compile.mode=default or max-autotune-no-cudagraphs."
        )
