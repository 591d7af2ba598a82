"""A backend of torch.compile with the numbers of a compiler that fuses everything between matrix products.

Such a compiler rounds to 16 bits only what products and operations of other libraries read and write.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.utils._pytree import tree_map

WIDE = "wide"  # a value of CompileConfig.backend, while this module is imported
_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
_LOW = (torch.bfloat16, torch.float16)


def _is_rounded(target: Any) -> bool:
    """Whether an operation reads and writes tensors of the graph's dtypes."""
    is_operation = isinstance(target, torch._ops.OpOverload)
    return target in _PRODUCTS or (is_operation and target.namespace not in ("aten", "prims"))


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.dtype in _LOW else value
    return torch.float32 if value in _LOW else value


class _WideInterpreter(fx.Interpreter):
    """Run a graph in float32, except for operations that round."""

    def map_nodes_to_values(self, args: Any, n: fx.Node) -> Any:
        """Return operands: of the graph's dtypes where the operation rounds, and in the outputs of the graph."""
        if n.op != "output" and not _is_rounded(n.target):
            return tree_map(_widened, super().map_nodes_to_values(args, n))

        def rounded(node: fx.Node) -> Any:
            value = self.env[node]
            return value.to(node.meta["val"].dtype) if isinstance(value, Tensor) else value

        return fx.node.map_arg(args, rounded)


def _wide_compiler(module: fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
    return make_boxed_func(_WideInterpreter(module).run)


torch._dynamo.register_backend(
    aot_autograd(
        fw_compiler=_wide_compiler,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    ),
    name=WIDE,
)
