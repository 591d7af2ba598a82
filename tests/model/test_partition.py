"""Partition of compiled layers: expensive operations are not computed twice, dequantized weights are never saved."""

from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule

from app.config.schema import QuantizationConfig
from app.layers.compile import mark_expensive
from tests.model import small
from tests.model.test_compile import BLOCKS, TOKENS, graphs_of_one_test, packed

assert graphs_of_one_test  # a fixture

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning"),  # of copying a graph
]

ATTENTION = "app::split_attention"
# operations that gradients need, of the 7 products of a layer; those that are not named here are needed no more
NEEDED = {
    "none": {},
    "nf4": {"bitsandbytes::dequantize_4bit": 7, "bitsandbytes::dequantize_blockwise": 7},  # weights, and their scales
    "int8": {"app_kernels::dequantize_int8": 7},
    "int4": {"app_kernels::dequantize_packed": 7},
    "fp8": {"app_fp8::product": 7, "app_fp8::quantize_rows": 7},
}
Graphs = tuple[Any, Any]  # forward and backward
Mark = Callable[[Any], None]


def calls(graph: Any) -> Counter[str]:
    """Count the operations of a graph by name."""
    found = (node.target for node in graph.graph.nodes)
    return Counter(each._schema.name for each in found if isinstance(each, torch._ops.OpOverload))


def partitions_of_layer(kind: str, *plans: tuple[float, Mark]) -> list[Graphs]:
    """Return the partitions of a layer's joint graph with each budget and marks; its input needs a gradient."""
    found: list[Graphs] = []

    def partition(joint: Any, inputs: Any, **options: Any) -> Graphs:
        for budget, mark in plans:
            own = GraphModule(joint, deepcopy(joint.graph))
            mark(own.graph)
            with torch._functorch.config.patch(activation_memory_budget=budget):
                found.append(min_cut_rematerialization_partition(own, inputs, **options))
        return found[-1]

    def run(module: Any, _inputs: Any) -> Any:
        return make_boxed_func(module.forward)

    quantization = None if kind == "none" else QuantizationConfig(kind=kind, double_quant=True, group_size=64)
    model = small.training_model_of("llama", small.lora(), "bf16", compile=BLOCKS, quantization=quantization)
    small.with_one_graph(model)
    backend = aot_autograd(fw_compiler=run, partition_fn=partition, decompositions=select_decomp_table())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._dynamo, "lookup_backend", lambda _name: backend)
        model(packed(0))[0].backward()
    assert len(found) == len(plans)
    return found


@pytest.mark.parametrize("kind", [kind for kind in NEEDED if kind != "fp8"])  # that in tests/full/model/test_compile.py
def test_backward_graph_computes_expensive_operations_as_often_as_gradients_need(kind: str) -> None:
    check_backward_graph(kind)


def check_backward_graph(kind: str) -> None:
    marked = [(budget, mark_expensive) for budget in (0.6, 1.0)]
    unmarked: list[tuple[float, Mark]] = [(0.6, lambda _graph: None)] if kind == "none" else []
    *without, smaller, larger = partitions_of_layer(kind, *unmarked, *marked)
    for forward, backward in (smaller, larger):
        found = calls(backward)
        assert found[ATTENTION] == 0
        assert {name: found[name] for name in NEEDED[kind]} == NEEDED[kind]
        opaque = {name: count for name, count in found.items() if not name.startswith(("aten", "prims", "inductor"))}
        assert sum(opaque.values()) == sum(NEEDED[kind].values()) + found["app::split_attention_backward"]
        saved = [node.meta.get("val") for node in forward.graph.output_node().args[0]]
        weights = [each for each in saved if isinstance(each, Tensor) and each.numel() >= 64**2 // 2]
        dequantized = [each for each in weights if each.dtype == torch.bfloat16 and TOKENS not in each.shape]
        assert kind == "none" or not dequantized
    for _, backward in without:
        assert calls(backward)[ATTENTION] == 1, "the marks keep it from that"
