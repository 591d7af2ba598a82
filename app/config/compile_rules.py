"""Rules about the section compile; `app.config.rules` has the others."""

from collections.abc import Callable, Iterator

from app.config.schema import RunConfig


def _compiled_layers_have_one_shape(run: RunConfig) -> Iterator[str]:
    if run.compile.kind != "none" and not run.batching.packing:
        yield (
            "compile=blocks makes one graph for one shape, and padded rows have many (batching.packing=false). "
            "Set batching.packing=true, or compile=none."
        )


def _compile_options_suit_each_other(run: RunConfig) -> Iterator[str]:
    backend, mode, graphs = run.compile.backend, run.compile.mode, run.compile.graphs
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


def _compiled_layers_keep_their_routers(run: RunConfig) -> Iterator[str]:
    if run.compile.kind != "none" and run.task.router_loss not in ("auto", 0):
        yield (
            f"task.router_loss={run.task.router_loss:g} reads routers inside layers that compile={run.compile.kind} "
            "makes one graph of. Set compile=none, or task.router_loss=0."
        )


def _only_fused_layers_are_compiled_fused(run: RunConfig) -> Iterator[str]:
    if run.compile.fused and not run.adapter.fused:
        yield (
            "compile.fused=true compiles fused layers, and adapter.fused=false leaves them out. "
            "Set adapter.fused=true, or compile.fused=false."
        )


COMPILE_RULES: tuple[Callable[[RunConfig], Iterator[str]], ...] = (
    _compiled_layers_keep_their_routers,
    _compiled_layers_have_one_shape,
    _compile_options_suit_each_other,
    _only_fused_layers_are_compiled_fused,
)
