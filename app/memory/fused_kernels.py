"""Kernels of a compiled graph, as far as memory depends on them: operations computed together, and results written.

Inductor computes connected pointwise operations, reductions and views in one kernel. Its inputs are alive until all its
results are written, and results that only the kernel itself reads take no memory. Where inductor writes a result over
an input, this is an overestimate.
"""

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx


@dataclass(frozen=True, slots=True)
class Kernel:
    """Operations that are computed together, in order; others read the results of `written`."""

    nodes: tuple[fx.Node, ...]
    is_fused: bool
    written: tuple[fx.Node, ...]
    last_uses: list[fx.Node] = field(default_factory=list)  # values that no later kernel reads


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
        for each in nodes:
            for value in each.all_input_nodes:
                visit(value)
        inside = {*nodes}
        kernels.append(Kernel(nodes, node in groups, tuple(each for each in nodes if {*each.users} - inside)))

    for node in graph.nodes:
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
    """Return the kernel of each operation that fuses: operations of one depth that share values.

    Depth is the largest number of times that a way from the inputs goes from a product, or another operation that does
    not fuse, to one that does. So no operation of a kernel waits for a product that waits for another one of it.
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
        for each in filter(fuses.__getitem__, (node, *node.users)):
            parent[root(each)] = root(sharing.setdefault(depth[each], each))
    members: dict[fx.Node, list[fx.Node]] = {}
    for node in filter(fuses.__getitem__, graph.nodes):
        members.setdefault(root(node), []).append(node)
    return {node: tuple(group) for group in members.values() for node in group}
