"""The repeated layers of a model through torch's compiler: one graph for all that are alike, for the whole run.

A micro-batch of a packed run always has the same shape, and what differs between batches is the values of one tensor:
where documents begin. So a graph is made once, before the first step, and to need another one later is an error. What
has another shape, or needs no gradient, is computed by the layer's own forward: evaluations, answers, micro-batches
that had to be split.
"""

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from functools import wraps
from importlib.util import find_spec
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from app.config.schema import CompileConfig
from app.errors import ConfigError, EnvironmentProblem, TrainingError
from app.model.recompute import repeated_layers

BACKEND = "inductor"  # tests take one that makes graphs and no code
_COMPILERS = ("g++", "clang++", "c++")


def require_compilable(config: CompileConfig, device: torch.device) -> None:
    """Told before a weight is loaded."""
    if config.kind == "none":
        return
    if config.graphs and device.type != "cuda":
        raise ConfigError(
            f"compile.graphs=true records kernels of an NVIDIA GPU, and this run is on {device.type}. "
            "Set compile.graphs=false."
        )
    if device.type == "cpu" and not any(map(shutil.which, _COMPILERS)):
        raise EnvironmentProblem(
            "compile=blocks on a CPU needs a C++ compiler, and there is none: install g++, or set compile=none."
        )
    if device.type == "cuda" and find_spec("triton") is None:
        raise EnvironmentProblem(
            "compile=blocks on a GPU needs the package triton, which is not installed. Set compile=none."
        )


class Blocks:
    """The compiled layers of one model. `graphs` counts what was made of them, `seconds` what that took."""

    def __init__(self, layers: list[Any], *, recorded: bool) -> None:
        self.layers = len(layers)
        self.graphs = 0
        self.seconds = 0.0
        self.settled = False  # from here on another graph is an error
        self.fault: str | None = None  # why layers are computed by their own forward after all
        self._on = True
        self._shape: torch.Size | None = None
        self._recorded = recorded
        self._compiled: Any = torch.compile(
            _fresh(_own_forward), fullgraph=True, dynamic=False, backend=self._made
        )
        for layer in layers:
            layer.forward = self._in_place_of(layer, first=layer is layers[0])

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Every layer by its own forward."""
        before, self._on = self._on, False
        try:
            yield
        finally:
            self._on = before

    def give_up(self, fault: str) -> None:
        """For the whole run."""
        self._on, self.fault = False, fault

    def remarks(self) -> list[str]:
        """For the table that a run starts with."""
        if self.fault is not None:
            return [f"compile=blocks: {self.fault}, so layers are computed as without it"]
        return [
            f"compile=blocks: {self.layers} layers are {self.graphs} graph{'s' * (self.graphs != 1)}, made in "
            f"{self.seconds:.1f} s before the first step; memory is planned as without it"
        ]

    def _in_place_of(self, layer: Any, *, first: bool) -> Callable[..., Any]:
        own = layer.forward

        @wraps(own)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not self._takes(args, kwargs):
                return own(*args, **kwargs)
            if first and self._recorded:
                torch.compiler.cudagraph_mark_step_begin()
            try:
                return self._compiled(layer, *args, **kwargs)
            except torch._dynamo.exc.TorchDynamoException as fault:
                if not self.settled:
                    raise
                raise TrainingError(
                    f"compile=blocks: a layer would need another graph in the middle of the run ({gist(fault)}). "
                    "Set compile=none; the last checkpoint can be continued with it."
                ) from fault

        return forward

    def _takes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if not self._on or kwargs.get("documents") is None or not torch.is_grad_enabled():
            return False
        hidden: Tensor = args[0] if args else kwargs["hidden_states"]
        self._shape = self._shape or hidden.shape
        return hidden.shape == self._shape

    def _made(self, graph: Any, inputs: list[Any]) -> Any:
        """What torch calls for each graph."""
        if self.settled:
            raise RuntimeError("all graphs were made before the first step")
        self.graphs += 1
        backend: Any = torch._dynamo.lookup_backend(BACKEND)
        if BACKEND != "inductor":
            return backend(graph, inputs)
        # random numbers are those that the layers would draw by themselves
        wanted = {"fallback_random": True, "triton.cudagraphs": self._recorded}
        return backend(graph, inputs, config_patches=wanted)


def compile_blocks(lm: nn.Module, config: CompileConfig, device: torch.device) -> Blocks | None:
    """Before layers are wrapped for recomputing: what is computed again is compiled too."""
    if config.kind == "none":
        return None
    require_compilable(config, device)
    import torch._dynamo  # noqa: F401  its errors are named above

    return Blocks(repeated_layers(lm), recorded=config.graphs)


def gist(fault: BaseException) -> str:
    """How what the compiler says begins."""
    lines = [line.strip() for line in str(fault).splitlines() if line.strip()]
    return f"{type(fault).__name__}: {' '.join(lines[:2])[:200]}" if lines else type(fault).__name__


def timed(blocks: Blocks, run: Callable[[], Any]) -> Any:
    """Its result; its time counts as the compiler's."""
    begun = time.perf_counter()
    result = run()
    blocks.seconds += time.perf_counter() - begun
    return result


def _own_forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
    return type(layer).forward(layer, *args, **kwargs)


def _fresh(function: Any) -> Any:
    """With code of its own: torch keeps graphs by the code that they were made from, and another model has others."""
    return FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
