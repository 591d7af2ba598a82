"""Which operations of a compiled layer are saved for the backward pass and which are computed again.

Under a memory budget, torch's partitioner recomputes every operation whose cost it does not know as if it were free:
attention, and the matrix products of 4-bit and 8-bit weights. Marks on the joint graph decide these.
"""

from functools import cache
from typing import Any

import torch
from torch.fx import Graph

_KNOWN_COSTS = {"aten", "prims", "inductor"}  # namespaces whose operations the partitioner knows
_EXPENSIVE = {  # but it does not know these
    "aten::_grouped_mm",
    "aten::_scaled_grouped_mm",
    "aten::_scaled_dot_product_cudnn_attention",
}
# Shares of a layer's activations that compile.memory_budget=auto tries. Larger ones have not been measured; 0.5 saves
# more bytes than 0.4 and recomputes more products.
BUDGETS = (0.6, 0.4, 0.3)
DEQUANTIZE = "app_kernels::dequantize_int8"  # dequantized weights are not activations: never saved


def mark_expensive(graph: Graph) -> None:
    """Mark the operations of a joint graph that must be saved, and those that must be recomputed."""
    from torch.utils.checkpoint import CheckpointPolicy

    for node in graph.nodes:
        operation = node.target
        if not isinstance(operation, torch._ops.OpOverload):
            continue
        name = operation._schema.name
        if name == DEQUANTIZE:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        elif name in _EXPENSIVE or (operation.namespace not in _KNOWN_COSTS and "dequantize" not in name):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


@cache
def marking_pass() -> Any:
    """Return `mark_expensive` as a pass of inductor, with a version for the key of its cache."""
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class MarkExpensive(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            mark_expensive(graph)

        def uuid(self) -> Any:
            return get_hash_for_files((__file__,))

    return MarkExpensive()
