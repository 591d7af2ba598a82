"""Compiled layers in a memory plan: inductor's graphs, run on fake tensors kernel by kernel.

Inductor computes connected pointwise operations, reductions and views in one kernel. Its inputs are alive until all its
results are written, and results that only the kernel itself reads take no memory. Where inductor writes a result over
an input, this is an overestimate.

A tiled MLP is one operation in the graphs of its layer, which stop there: tiles run as in an uncompiled layer.
"""

import operator
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache, wraps
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from app.layers.compile import marking_pass
from app.layers.operations import COSTS, OperationCost, autocast_dtype
from app.layers.tiled_mlp import gated_mlps, tiling_of
from app.memory.fake_tensors import FakeTensorFallbacks, cost_key


@dataclass(frozen=True, slots=True)
class Kernel:
    """Operations computed together, in order; other kernels read the results of `written`."""

    nodes: tuple[fx.Node, ...]
    is_fused: bool
    written: tuple[fx.Node, ...]
    last_uses: list[fx.Node] = field(default_factory=list)  # values not read by later kernels


def kernels_of(graph: fx.Graph) -> list[Kernel]:
    """Return the kernels of a graph in the order of its products; a fused one runs before its first result is read."""
    groups = _groups(graph)
    kernels: list[Kernel] = []
    done: set[fx.Node] = set()

    def visit(node: fx.Node) -> None:
        if node in done:
            return
        nodes = groups.get(node, (node,))
        done.update(nodes)
        for member in nodes:
            for value in member.all_input_nodes:
                visit(value)
        inside = {*nodes}
        kernels.append(Kernel(nodes, node in groups, tuple(member for member in nodes if {*member.users} - inside)))

    for node in sorted(graph.nodes, key=_is_mlp, reverse=True):  # an MLP before all that it does not need
        if node not in groups and node.op != "output":
            visit(node)
    for node in graph.output_node().all_input_nodes:
        visit(node)
    used = {*graph.output_node().all_input_nodes}
    for kernel in reversed(kernels):
        values = {value for node in kernel.nodes for value in (node, *node.all_input_nodes)}
        kernel.last_uses.extend(values - used)
        used |= values
    return kernels


def _groups(graph: fx.Graph) -> Mapping[fx.Node, tuple[fx.Node, ...]]:
    """Return the kernel of every fusible operation: operations of one depth that share values.

    Depth is the largest number of steps, on any path from the inputs, from a product or another unfusible operation to
    a fusible one. So no operation of a kernel waits for a product that waits for another operation of this kernel.
    """
    from torch._functorch.partitioners import get_default_op_list

    can_fuse = get_default_op_list().is_fusible
    fuses = {node: node.target is not operator.getitem and can_fuse(node) for node in graph.nodes}
    depth: dict[fx.Node, int] = {}
    parent: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        steps = (depth[value] + (fuses[node] and not fuses[value]) for value in node.all_input_nodes)
        depth[node], parent[node] = max(steps, default=0), node
    for node in reversed(graph.nodes):
        if fuses[node] and any(fuses[user] for user in node.users):  # as late as its users allow
            depth[node] = max(depth[node], min(depth[user] for user in node.users))

    def root(node: fx.Node) -> fx.Node:
        while parent[node] is not node:
            node = parent[node]
        return node

    for node in graph.nodes:
        sharing: dict[int, fx.Node] = {}
        for fused in filter(fuses.__getitem__, (node, *node.users)):
            parent[root(fused)] = root(sharing.setdefault(depth[fused], fused))
    members: dict[fx.Node, list[fx.Node]] = {}
    for node in filter(fuses.__getitem__, graph.nodes):
        members.setdefault(root(node), []).append(node)
    return {node: tuple(group) for group in members.values() for node in group}


# ---- compiled layers


Forward = Callable[..., Any]
Count = Callable[[Forward], Forward]  # wraps a computation whose FLOPs are recomputation
Compiled = Callable[[Any, Count], Forward]  # returns the compiled forward of a layer
Place = tuple[dict[str, Any], str]  # of a tensor in a layer: its dictionary and name


@lru_cache(maxsize=4)
def graphs_of(_settings: str) -> "LayerGraphs":
    """Return the graphs of all plans with the same layers, inputs and attention."""
    return LayerGraphs()


@dataclass(frozen=True, slots=True)
class _Joint:
    """Forward and backward of a layer in one graph."""

    module: fx.GraphModule
    outputs: TreeSpec
    static: Sequence[int]  # inputs that stay allocated, so that saving them is free
    mode: FakeTensorMode


@dataclass(frozen=True, slots=True)
class _Parts:
    """The graphs of a layer at one memory budget."""

    forward: "_Graph"
    backward: "_Graph"
    outputs: TreeSpec


class LayerGraphs:
    """Graphs of the compiled layers of a run: traced once per kind of layer, partitioned once per memory budget."""

    def __init__(self) -> None:
        self._joints: dict[Any, _Joint] = {}
        self._parts: dict[Any, _Parts] = {}

    def compiled(self, budget: float, layer: Any, count: Count) -> Forward:
        """Return the forward of `layer` as compiled with a memory budget; without gradients it runs uncompiled."""
        eager: Forward = layer.forward
        kind = cost_key(layer)

        @wraps(eager)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("documents") is None or not torch.is_grad_enabled():
                return eager(*args, **kwargs)
            tiling = tiling_of(layer)
            mlps = [] if tiling is None else gated_mlps(layer)
            places = _places(layer, mlps)
            compute, tensors = _as_function(eager, args, kwargs, places)
            key = kind, tuple((tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in tensors)
            opaque = nullcontext() if tiling is None else tiling.computed_by(_opaque_mlp)
            with warnings.catch_warnings(), opaque:
                warnings.simplefilter("ignore")  # of torch about its own code
                if key not in self._joints:
                    self._joints[key] = _trace(compute, tensors, places)
                if (key, budget) not in self._parts:
                    self._parts[key, budget] = _partition(self._joints[key], budget)
            parts = self._parts[key, budget]
            if tiling is None:
                outputs = _CompiledLayer.apply(parts, count, *tensors)  # type: ignore[no-untyped-call]
            else:
                (mlp,), call = mlps, _Call(parts, count)
                x = _BeforeMlp.apply(call, *tensors)  # type: ignore[no-untyped-call]
                outputs = _AfterMlp.apply(call, mlp(x))  # type: ignore[no-untyped-call]
            return tree_unflatten(list(outputs), parts.outputs)

        return forward


def _as_function(
    forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any], places: Sequence[Place]
) -> tuple[Forward, list[Tensor]]:
    """Return a call of a layer as a function of all tensors it reads, and these tensors, those of `places` last.

    The function puts its tensors into their places, where its backward pass reads them too.
    """
    documents = kwargs["documents"]
    leaves, spec = tree_flatten((args, kwargs | {"documents": documents.cu_seqlens}))
    at = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    tensors = [*(leaves[index] for index in at), *(owner[name] for owner, name in places)]
    leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]  # a trace may outlive the call

    def compute(*tensors: Tensor) -> Any:
        by_index = dict(zip(at, tensors, strict=False))
        args, kwargs = tree_unflatten([by_index.get(index, leaf) for index, leaf in enumerate(leaves)], spec)
        for (owner, name), tensor in zip(places, tensors[len(at) :], strict=True):
            owner[name] = tensor
        return forward(*args, **kwargs | {"documents": replace(documents, cu_seqlens=kwargs["documents"])})

    return compute, tensors


def _places(layer: nn.Module, mlps: Sequence[nn.Module]) -> list[Place]:
    """Return the places of parameters, buffers and quantization constants, without those of tiled MLPs."""
    owners: list[dict[str, Any]] = []
    outside = {module for mlp in mlps for module in mlp.modules()}
    for module in (module for module in layer.modules() if module not in outside):
        owners += [module._parameters, module._buffers]
        state: Any = getattr(module, "quant_state", None)
        while state is not None:
            owners.append(vars(state))
            state = state.state2
    return [(owner, name) for owner in owners for name, value in owner.items() if isinstance(value, Tensor)]


def _trace(compute: Forward, tensors: Sequence[Tensor], places: Sequence[Place]) -> _Joint:
    """Trace forward and backward of a layer with inductor's decompositions, without counting FLOPs or memory."""
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._functorch.aot_autograd import aot_function
    from torch._functorch.partitioners import default_partition
    from torch._inductor.decomposition import select_decomp_table

    specs: list[TreeSpec] = []
    graphs: list[fx.GraphModule] = []

    def flat(*values: Tensor) -> tuple[Tensor, ...]:
        outputs, spec = tree_flatten(compute(*values))
        specs.append(spec)
        return tuple(outputs)

    mode: Any = next(tensor.fake_mode for tensor in tensors if hasattr(tensor, "fake_mode"))

    def keep(joint: fx.GraphModule, *inputs: Any, num_fwd_outputs: int, **others: Any) -> Any:
        assert num_fwd_outputs == specs[-1].num_leaves, "outputs of a layer share memory with its inputs"
        graphs.append(_copy(joint))
        return default_partition(joint, *inputs, num_fwd_outputs=num_fwd_outputs, **others)

    static = range(len(tensors) - len(places), len(tensors))
    try:
        with (
            _disable_current_modes(),
            torch.autograd.graph.saved_tensors_hooks(
                lambda saved: saved, lambda saved: saved
            ),  # not those of recomputing
            mode,
            FakeTensorFallbacks(),  # type: ignore[no-untyped-call]
        ):
            inputs = tuple(map(_like, tensors))  # the graph keeps them: counted ones would never be freed
            tables: Any = {"decompositions": select_decomp_table(), "partition_fn": keep}
            aot_function(flat, lambda module, _inputs: make_boxed_func(module.forward), **tables)(*inputs)
    finally:
        for (owner, name), at in zip(places, static, strict=True):
            owner[name] = tensors[at]
    return _Joint(graphs[0], specs[-1], static, mode)


def _like(tensor: Tensor) -> Tensor:
    """Return a new tensor of the same layout."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, requires_grad=tensor.requires_grad)


def _copy(module: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    graph.output_node().meta = dict(module.graph.output_node().meta)
    return fx.GraphModule(module, graph)


def _partition(joint: _Joint, budget: float) -> _Parts:
    """Partition as inductor does for `CompiledLayers` of app.layers.compile."""
    import torch._inductor.config
    from torch._inductor.compile_fx import partition_fn
    from torch._inductor.virtualized import V

    module = _copy(joint.module)
    inputs = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    with (
        _disable_current_modes(),
        joint.mode,
        V.set_fake_mode(joint.mode),
        torch._inductor.config.patch(joint_custom_pre_pass=marking_pass(), fallback_random=True),
        torch._functorch.config.patch(activation_memory_budget=budget),
    ):
        forward, backward = partition_fn(
            module, inputs, num_fwd_outputs=joint.outputs.num_leaves, static_lifetime_input_indices=joint.static
        )
    names = {node.name for node in forward.graph.nodes}
    return _Parts(_Graph(forward, frozenset()), _Graph(backward, names), joint.outputs)


class _Graph:
    """Graph to run. Operations with names in `recomputed` are recomputation."""

    def __init__(self, module: fx.GraphModule, recomputed: Collection[str]) -> None:
        self._module, self._recomputed, self._kernels = module, recomputed, kernels_of(module.graph)
        self.inputs = module.graph.find_nodes(op="placeholder")
        self.outputs: Any = module.graph.output_node().args[0]
        self._mlp = next((at for at, kernel in enumerate(self._kernels) if _is_mlp(kernel.nodes[0])), -1)

    def run(self, inputs: list[Tensor], count: Count) -> Any:
        """Return the outputs for `inputs`, which is emptied. Fused kernels are not run: their results are allocated."""
        values: dict[fx.Node, Any] = dict(zip(self.inputs, inputs, strict=True))
        inputs.clear()
        self._run(self._kernels, values, count)
        return fx.node.map_arg(self.outputs, values.__getitem__)

    def run_to_mlp(self, values: dict[fx.Node, Any], count: Count) -> Tensor:
        """Add the values of all that the MLP needs, and return its input."""
        kernel = self._kernels[self._mlp]
        self._run(self._kernels[: self._mlp], values, count)
        x: Tensor = values[kernel.nodes[0].all_input_nodes[0]]
        for node in kernel.last_uses:
            values.pop(node, None)
        return x

    def run_from_mlp(self, out: Tensor, values: dict[fx.Node, Any], count: Count) -> None:
        """Add the values of the rest, with the output of the MLP."""
        values[self._kernels[self._mlp].nodes[0]] = out
        self._run(self._kernels[self._mlp + 1 :], values, count)

    def _run(self, kernels: Sequence[Kernel], values: dict[fx.Node, Any], count: Count) -> None:
        with torch.autocast("cpu", enabled=False):
            for kernel in kernels:
                for node in kernel.written:
                    if node.op != "placeholder":
                        values[node] = self._written(node, values, count, kernel)
                for node in kernel.last_uses:
                    values.pop(node, None)

    def _written(self, node: fx.Node, values: dict[fx.Node, Any], count: Count, kernel: Kernel) -> Any:
        if node.op == "get_attr":
            return getattr(self._module, str(node.target))
        if kernel.is_fused and not _is_view(node):
            return tree_map_only(Tensor, _like, node.meta["val"])
        for base in node.all_input_nodes:
            if base not in values:  # the base of a written view is not written
                values[base] = self._written(base, values, count, kernel)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        operation: Any = node.target
        return (count(operation) if node.name in self._recomputed else operation)(*args, **kwargs)


def _is_view(node: fx.Node) -> bool:
    """Return whether the result of an operation shares memory with its inputs."""
    return bool(_storages(node) & {storage for value in node.all_input_nodes for storage in _storages(value)})


def _storages(node: fx.Node) -> set[int]:
    return {leaf.untyped_storage()._cdata for leaf in tree_leaves(node.meta["val"]) if isinstance(leaf, Tensor)}


class _CompiledLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: _Parts, count: Count, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.parts, ctx.count = parts, count
        values = parts.forward.run(list(tensors), count)
        ctx.save_for_backward(*values[parts.outputs.num_leaves :])
        return tuple(values[: parts.outputs.num_leaves])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        values = [*ctx.saved_tensors, *gradients]
        ctx.maybe_clear_saved_tensors()  # as in compiled layers: tensors are freed after their last use
        return None, None, *ctx.parts.backward.run(values, ctx.count)


# ---- layers with a tiled MLP


@torch.library.custom_op("app_plan::mlp", mutates_args=())
def _mlp(x: Tensor, dtype: torch.dtype) -> Tensor:
    raise NotImplementedError("a plan never computes")


@torch.library.custom_op("app_plan::mlp_backward", mutates_args=())
def _mlp_backward(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    raise NotImplementedError("a plan never computes")


COSTS["app_plan::mlp"] = COSTS["app_plan::mlp_backward"] = OperationCost()  # a plan never computes them

_mlp.register_fake(lambda x, dtype: torch.empty_like(x, dtype=dtype))
_mlp_backward.register_fake(lambda gradient, dtype: torch.empty_like(gradient, dtype=dtype))


def _keep_dtype(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    ctx.dtype = inputs[0].dtype


_mlp.register_autograd(lambda ctx, gradient: (_mlp_backward(gradient, ctx.dtype), None), setup_context=_keep_dtype)


def _opaque_mlp(_module: nn.Module, x: Tensor) -> Tensor:
    """Return the output of an MLP as one operation, which only the layer's graphs have."""
    out: Tensor = _mlp(x, autocast_dtype(x))
    return out


def _is_mlp(node: fx.Node) -> bool:
    return node.target in (torch.ops.app_plan.mlp.default, torch.ops.app_plan.mlp_backward.default)


class _Call:
    """A call of a compiled layer with a tiled MLP."""

    def __init__(self, parts: _Parts, count: Count) -> None:
        self.forward, self.backward, self.count = parts.forward, parts.backward, count
        results = parts.outputs.num_leaves
        self.results, self.saved = parts.forward.outputs[:results], parts.forward.outputs[results:]
        self.saved_before: list[int] = []  # indices of `saved` before the MLP
        self.values: dict[fx.Node, Any] = {}  # between the two halves of a pass


class _BeforeMlp(torch.autograd.Function):
    """The part of a compiled layer before its MLP; in the backward pass the part after it."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> Tensor:
        ctx.call, call.values = call, dict(zip(call.forward.inputs, tensors, strict=True))
        x = call.forward.run_to_mlp(call.values, call.count)
        ctx.saved = call.saved_before = [at for at, node in enumerate(call.saved) if node in call.values]
        ctx.save_for_backward(*(call.values[call.saved[at]] for at in ctx.saved))
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        graph, values = ctx.call.backward, ctx.call.values
        values.update((graph.inputs[at], saved) for at, saved in zip(ctx.saved, ctx.saved_tensors, strict=True))
        ctx.maybe_clear_saved_tensors()
        graph.run_from_mlp(gradients[0], values, ctx.call.count)
        ctx.call.values = {}
        return None, *fx.node.map_arg(graph.outputs, values.__getitem__)


class _AfterMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, out: Tensor) -> tuple[Tensor, ...]:
        values, call.values = call.values, {}
        call.forward.run_from_mlp(out, values, call.count)
        ctx.call, ctx.saved = call, [at for at in range(len(call.saved)) if at not in call.saved_before]
        ctx.save_for_backward(*(values[call.saved[at]] for at in ctx.saved))
        return tuple(values[node] for node in call.results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        graph, call = ctx.call.backward, ctx.call
        call.values = {graph.inputs[at]: saved for at, saved in zip(ctx.saved, ctx.saved_tensors, strict=True)}
        call.values.update(zip(graph.inputs[len(call.saved) :], gradients, strict=True))
        ctx.maybe_clear_saved_tensors()
        return None, graph.run_to_mlp(call.values, call.count)
