"""Compiled decoder layers: obstacles before the start, one graph for equal layers, operations to recompute.

Under a memory budget, torch's partitioner recomputes every operation of unknown cost as if it were free: attention,
and the matrix products of 4-bit and 8-bit weights. Marks on the joint graph decide these.

All micro-batches of a packed run have one shape and differ in the values of one tensor: the starts of documents. So
the graph is compiled and verified once, before the first step, and a later recompilation is an error. Passes without a
gradient (evaluation, generation) use the layer's own forward. So do parts of a split micro-batch, which are also
recomputed, because an uncompiled layer saves about twice the activations.

A tiled MLP is outside the graph of its layer, which then has two parts: a recomputed layer must be able to stop before
the MLP. A tile has a graph of its own, with one shape.
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial, wraps
from importlib.util import find_spec
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Graph

from app.batch import Batch
from app.config.rules import Obstacle
from app.config.schema import CompileConfig
from app.errors import TrainingError, gist
from app.layers.activation_checkpointing import is_recomputed, recomputed, repeated_layers
from app.layers.attention.requirements import dropouts_of
from app.layers.recurrent import recurrent_mixers
from app.layers.tiled_mlp import in_tiles, outside_graphs, tiling_of

_KNOWN_COSTS = {"aten", "prims", "inductor"}  # namespaces with known costs
_EXPENSIVE = {  # except these
    "aten::_grouped_mm",
    "aten::_scaled_grouped_mm",
    "aten::_scaled_dot_product_cudnn_attention",
}
# Shares of a layer's activations that compile.memory_budget=auto tries. Larger ones have not been measured; 0.5 saves
# more bytes than 0.4 and recomputes more products.
BUDGETS = (0.6, 0.4, 0.3)
DEQUANTIZE = ("app_kernels::dequantize_int8", "app_kernels::dequantize_packed")  # weights, not activations: never saved


def mark_expensive(graph: Graph) -> None:
    """Mark the operations of a joint graph that must be saved, and those that must be recomputed."""
    from torch.utils.checkpoint import CheckpointPolicy

    for node in graph.nodes:
        operation = node.target
        if not isinstance(operation, torch._ops.OpOverload):
            continue
        name = operation._schema.name
        if name in DEQUANTIZE:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        elif name in _EXPENSIVE or (operation.namespace not in _KNOWN_COSTS and "dequantize" not in name):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


@cache
def marking_pass() -> Any:
    """Return `mark_expensive` as a pass of inductor, with a version for its cache key."""
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class MarkExpensive(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            mark_expensive(graph)

        def uuid(self) -> Any:
            return get_hash_for_files((__file__,))

    return MarkExpensive()


# ---- compilable


# by device: language, environment variable of the compiler, and compilers to look for
_COMPILERS = {"cpu": ("C++", "CXX", ("g++", "clang++", "c++")), "cuda": ("C", "CC", ("gcc", "clang"))}


def machine_obstacles(config: CompileConfig, device: torch.device) -> Iterator[Obstacle]:
    """Yield missing hardware and software of this machine."""
    if config.graphs and device.type != "cuda":
        reason = f"compile.graphs=true records kernels of an NVIDIA GPU, and this run is on {device.type}"
        yield Obstacle(reason, "Set compile.graphs=false.")
    if config.backend != "inductor":
        return
    if device.type == "cuda" and find_spec("triton") is None:
        yield Obstacle("the package triton is not installed", "Install it, or set compile=none.")
    language, variable, names = _COMPILERS.get(device.type, _COMPILERS["cpu"])
    if variable not in os.environ and not any(map(shutil.which, names)):
        reason = f"no {language} compiler found ({' or '.join(names)})"
        yield Obstacle(reason, f"Install {names[0]}, or set compile=none.")


def model_obstacles(lm: Any) -> Iterator[Obstacle]:
    """Yield dropouts of attention weights, and layers that depend on others; `lm` may be on meta."""
    shared = getattr(lm.config.get_text_config(), "num_kv_shared_layers", 0)
    if shared:
        reason = f"{shared} layers read keys and values of earlier layers (num_kv_shared_layers in config.json)"
        yield Obstacle(reason, "Set compile=none.")
    for name, rate in dropouts_of(lm).items():
        key = f"model.architecture.{name}"
        yield Obstacle(
            f"{key}={rate:g}: compiled layers have no dropout of attention weights",
            f"Set compile=none, or {key}=0 (for pretrained weights: {name} in the config.json of model.path).",
        )


SDPA_OBSTACLE = Obstacle(
    "attention=sdpa on a GPU makes one call per document if their lengths differ",
    "Set attention=varlen (or flash), or compile=none.",
)


def attention_obstacles(attention: str, device: torch.device, some_batch: Callable[[], Batch]) -> Iterator[Obstacle]:
    """Yield an attention backend that one graph cannot compute for all batches of the run."""
    if attention == "sdpa" and device.type != "cpu":
        batch = some_batch()
        if batch.documents is not None and not batch.documents.are_longest(batch.ids.numel()):
            yield SDPA_OBSTACLE


def product_flops(lm: Any, *, trains_all: bool) -> float:
    """Return the FLOPs per token, forward and backward, of matrix products in the layers that can be compiled.

    For a frozen weight, the gradient of its input takes as many as its product; a trained one adds its own gradient.
    """
    numbers = lm.config.get_text_config()
    experts = getattr(numbers, "num_experts_per_tok", None) or 1
    layers = (layer for layer in repeated_layers(lm) if not recurrent_mixers(layer))
    used = 0.0
    for weight in (tensor for layer in layers for tensor in layer.parameters() if tensor.ndim > 1):
        used += weight.numel() * (min(1.0, experts / len(weight)) if weight.ndim > 2 else 1.0)
    return 2 * (3 if trains_all else 2) * used


# ---- compile


class LayerCall(NamedTuple):
    """The arguments of a layer; hidden states come first."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def hidden(self) -> Tensor:
        states: Tensor = self.args[0] if self.args else self.kwargs["hidden_states"]
        return states

    def with_hidden(self, states: Tensor | None) -> "LayerCall":
        if self.args:
            return LayerCall((states, *self.args[1:]), self.kwargs)
        return LayerCall((), self.kwargs | {"hidden_states": states})


# number, layer, uncompiled forward, call -> output
Visit = Callable[[int, nn.Module, Callable[..., Any], LayerCall], Any]


class CompiledLayers:
    """The compiled layers of one model. `graphs` counts the compiled graphs, `seconds` is their compile time."""

    def __init__(self, layers: Mapping[int, Any], config: CompileConfig, left_out: int = 0) -> None:
        """Compile `layers`, by their numbers in the model."""
        self.layers = len(layers)
        self.left_out = left_out
        self.graphs = 0
        self.seconds = 0.0
        self.verified = False  # a further graph is an error
        self.worst_ratio = 0.0  # of `errors`, set by verification
        self.errors: Sequence[Any] = ()
        self.fault: str | None = None  # why layers use their own forward
        self.is_on = True
        self._visit: Visit | None = None
        self._shape: torch.Size | None = None
        self._config = config
        self._tiling = next(filter(None, map(tiling_of, layers.values())), None)
        self._compiled = _torch_compiled(self._compile_graph, fullgraph=self._tiling is None)
        if self._tiling is not None:
            tile = _torch_compiled(self._compile_tile_graph)
            self._tiles = partial(in_tiles, tile, self._tiling.tokens, pads=True)
        for number, layer in layers.items():
            layer.forward = self._compiled_forward(number, layer, first=number == min(layers))
            if self._tiling is not None:
                outside_graphs(layer)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Use the own forward of every layer inside this context."""
        before, self.is_on = self.is_on, False
        try:
            yield
        finally:
            self.is_on = before

    @contextlib.contextmanager
    def visited(self, visit: Visit) -> Iterator[None]:
        """Take the output of every layer from `visit` inside this context."""
        self._visit = visit
        try:
            yield
        finally:
            self._visit = None

    def compiled(self, layer: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the compiled layer; from now on only this shape is compiled."""
        self._shape = LayerCall(args, kwargs).hidden.shape
        if self._config.graphs:
            torch.compiler.cudagraph_mark_step_begin()
        return self._run(layer, *args, **kwargs)

    def give_up(self, fault: str) -> None:
        """Use the layers' own forward for the rest of the run."""
        self.is_on, self.fault = False, fault

    def remarks(self) -> list[str]:
        if self.fault is not None:
            return [f"compiled layers disabled: {self.fault}"]
        others = f"; {self.left_out} layers with a recurrent mixer are not compiled" if self.left_out else ""
        return [
            f"{self.layers} layers compiled as {self.graphs} graph{'s' * (self.graphs != 1)} in {self.seconds:.1f} s; "
            f"largest error {self.worst_ratio:.2f}x that of uncompiled layers; evaluations are not compiled{others}"
        ]

    def _compiled_forward(self, number: int, layer: Any, *, first: bool) -> Callable[..., Any]:
        uncompiled = layer.forward
        uncompiled_recomputed = recomputed(uncompiled)

        @wraps(uncompiled)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._visit is not None:
                return self._visit(number, layer, uncompiled, LayerCall(args, kwargs))
            if not self._fits(LayerCall(args, kwargs)):
                is_split = self.is_on and torch.is_grad_enabled() and not is_recomputed(layer)
                return (uncompiled_recomputed if is_split else uncompiled)(*args, **kwargs)
            if first and self._config.graphs:
                torch.compiler.cudagraph_mark_step_begin()
            try:
                return self._run(layer, *args, **kwargs)
            except torch._dynamo.exc.TorchDynamoException as fault:
                if not self.verified:
                    raise
                raise TrainingError(
                    f"a compiled layer would need another graph in the middle of the run ({gist(fault)}). "
                    "Set compile=none and resume from the last checkpoint."
                ) from fault

        return forward

    def _run(self, layer: Any, *args: Any, **kwargs: Any) -> Any:
        if self._tiling is None:
            return self._compiled(layer, *args, **kwargs)
        with self._tiling.computed_by(self._tiles):
            return self._compiled(layer, *args, **kwargs)

    def _fits(self, call: LayerCall) -> bool:
        if not self.is_on or call.kwargs.get("documents") is None or not torch.is_grad_enabled():
            return False
        self._shape = self._shape or call.hidden.shape
        return call.hidden.shape == self._shape

    def _compile_graph(self, graph: Any, inputs: list[Any]) -> Any:
        """Compile a graph of a layer; torch calls this backend for each one."""
        return self._compile(graph, inputs, self._config.memory_budget)

    def _compile_tile_graph(self, graph: Any, inputs: list[Any]) -> Any:
        """Compile a graph of a tile, which is recomputed as a whole and then saves all activations."""
        return self._compile(graph, inputs, 1.0)

    def _compile(self, graph: Any, inputs: list[Any], memory_budget: float | str) -> Any:
        if self.verified:
            raise RuntimeError("all graphs are compiled before the first step")
        self.graphs += 1
        backend: Any = torch._dynamo.lookup_backend(self._config.backend)
        if self._config.backend != "inductor":
            return backend(graph, inputs)
        options = torch._inductor.list_mode_options(self._config.mode)
        # same random numbers as in uncompiled layers
        options |= {"fallback_random": True, "triton.cudagraphs": self._config.graphs}
        options |= {"joint_custom_pre_pass": marking_pass()}
        with torch._functorch.config.patch(activation_memory_budget=memory_budget):
            return backend(graph, inputs, config_patches=options)


def compile_blocks(lm: nn.Module, config: CompileConfig, obstacle: str | None = None) -> CompiledLayers | None:
    """Compile the layers, before they are wrapped for recomputation, so that the second pass is compiled too.

    `obstacle`: why none can be compiled.
    """
    if config.kind == "none":
        return None
    import torch._dynamo
    import torch._functorch.config  # noqa: F401  both are named above

    layers = repeated_layers(lm)
    # recurrent mixers have rows of many shapes inside
    compilable = {number: layer for number, layer in enumerate(layers) if not recurrent_mixers(layer)}
    if not compilable:
        obstacle = "every layer has a recurrent mixer, whose rows have many shapes"
    compiled = CompiledLayers({} if obstacle else compilable, config, len(layers) - len(compilable))
    if obstacle:
        compiled.give_up(obstacle)
    return compiled


def _torch_compiled(backend: Callable[[Any, list[Any]], Any], *, fullgraph: bool = True) -> Any:
    """Return the own forward of a module, its first argument, compiled by torch."""
    # a copy with a code object of its own: torch caches graphs by code object, and another model has other graphs
    code: Any = _own_forward.__code__.replace()
    own_forward: Any = FunctionType(code, _own_forward.__globals__, _own_forward.__name__)
    return torch.compile(own_forward, fullgraph=fullgraph, dynamic=False, backend=backend)


def _own_forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
    return type(layer).forward(layer, *args, **kwargs)
