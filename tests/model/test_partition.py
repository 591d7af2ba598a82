"""Partition of compiled layers: expensive operations are not computed twice, dequantized weights are never saved."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

from app.config.schema import QuantizationConfig
from app.layers.compile import DEQUANTIZE, mark_expensive
from tests.model import small
from tests.model.test_compile import BLOCKS, TOKENS, graphs_of_one_test, packed

assert graphs_of_one_test  # a fixture

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

ATTENTION = "app::split_attention"
# operations that gradients need, of the 7 products of a layer; those that are not named here are needed no more
NEEDED = {
    "none": {},
    "nf4": {"bitsandbytes::dequantize_4bit": 7, "bitsandbytes::dequantize_blockwise": 7},  # weights, and their scales
    "int8": {DEQUANTIZE: 7},
    "fp8": {"app_fp8::product": 7, "app_fp8::quantize_rows": 7},
}


@contextmanager
def recorded_graphs(budget: float, mark: Callable[[Any], None]) -> Iterator[list[tuple[Any, Any]]]:
    """Register the backend `recorded`, whose forward and backward graphs are collected."""
    graphs: list[tuple[Any, Any]] = []

    def partition(joint: Any, inputs: Any, **given: Any) -> Any:
        mark(joint.graph)
        graphs.append(min_cut_rematerialization_partition(joint, inputs, **given))
        return graphs[-1]

    def run(module: Any, _inputs: Any) -> Any:
        return make_boxed_func(module.forward)

    backend = aot_autograd(fw_compiler=run, partition_fn=partition, decompositions=select_decomp_table())
    with pytest.MonkeyPatch.context() as patch, torch._functorch.config.patch(activation_memory_budget=budget):
        patch.setattr(torch._dynamo, "lookup_backend", lambda _name: backend)
        yield graphs


def calls(graph: Any) -> Counter[str]:
    """Count the operations of a graph by name."""
    found = (node.target for node in graph.graph.nodes)
    return Counter(each._schema.name for each in found if isinstance(each, torch._ops.OpOverload))


def graphs_of_layer(kind: str, budget: float, mark: Callable[[Any], None] = mark_expensive) -> tuple[Any, Any]:
    """Return the graphs of a layer whose input needs a gradient."""
    quantization = None if kind == "none" else QuantizationConfig(kind=kind, double_quant=True)
    model = small.training_model_of("llama", small.lora(), "bf16", compile=BLOCKS, quantization=quantization)
    with recorded_graphs(budget, mark) as graphs:
        loss, _ = model(packed(0))
        loss.backward()
    assert len(graphs) == 2
    return graphs[1]


@pytest.mark.parametrize("budget", [0.6, 1.0])
@pytest.mark.parametrize("kind", NEEDED)
def test_backward_graph_computes_expensive_operations_as_often_as_gradients_need(kind: str, budget: float) -> None:
    forward, backward = graphs_of_layer(kind, budget)
    found = calls(backward)
    assert found[ATTENTION] == 0
    assert {name: found[name] for name in NEEDED[kind]} == NEEDED[kind]
    opaque = {name: count for name, count in found.items() if not name.startswith(("aten", "prims", "inductor"))}
    assert sum(opaque.values()) == sum(NEEDED[kind].values()) + found["app::split_attention_backward"]
    saved = [node.meta.get("val") for node in forward.graph.output_node().args[0]]
    weights = [each for each in saved if isinstance(each, Tensor) and each.numel() >= 64**2 // 2]
    dequantized = [each for each in weights if each.dtype == torch.bfloat16 and TOKENS not in each.shape]
    assert kind == "none" or not dequantized


def test_unmarked_backward_graph_computes_attention_again() -> None:
    """The marks are what keeps it from that."""
    _, backward = graphs_of_layer("none", 0.6, lambda _graph: None)
    assert calls(backward)[ATTENTION] == 1
