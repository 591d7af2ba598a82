"""What is known of a condition of a chat template, whatever messages say: for branches that are never taken.

Templates have some for content that is no text, for tools, and for roles that no message has.
"""

from collections import Counter
from collections.abc import Iterable

from jinja2 import nodes

_TYPES = {  # tests of text that depend on nothing that it says
    **dict.fromkeys(("string", "defined", "iterable", "sequence"), True),
    **dict.fromkeys(("mapping", "none", "number", "boolean", "undefined", "callable"), False),
}
KEYS = ("role", "content")  # of a message
MEMBERSHIP = ("in", "notin")  # as jinja calls them
ABSENT = ("tools", "documents")  # variables that are None, unless a template sets them


def is_type_test(name: str) -> bool:
    """Whether a test asks for the type of a value alone."""
    return name in _TYPES


class Conditions:
    """Of one template, for conversations of some roles."""

    def __init__(self, tree: nodes.Template, roles: Iterable[str]) -> None:
        self._roles = frozenset(roles)
        self._set = Counter(name.name for name in tree.find_all(nodes.Name) if name.ctx != "load")
        targets = (loop.target for loop in tree.find_all(nodes.For))
        looped = Counter(name.name for name in targets if isinstance(name, nodes.Name))
        # what only loops set, and only loops over messages, is a message wherever it is anything
        self.messages = {name for name in looped if looped[name] == self._set[name]}

    def truth(self, node: nodes.Node) -> bool | None:
        """None where it is not known."""
        if isinstance(node, nodes.Not):
            inside = self.truth(node.node)
            return None if inside is None else not inside
        if isinstance(node, nodes.And | nodes.Or):
            deciding, both = isinstance(node, nodes.Or), (self.truth(node.left), self.truth(node.right))
            return deciding if deciding in both else (None if None in both else not deciding)
        if isinstance(node, nodes.Test):
            return self._truth_of_test(node)
        if isinstance(node, nodes.Compare):
            return self._truth_of_role(node)
        absent = self._message_key(node) not in (None, *KEYS) or self._is_absent(node)
        return False if absent else None

    def _truth_of_test(self, node: nodes.Test) -> bool | None:
        key = self._message_key(node.node)
        if key == "content":
            return _TYPES.get(node.name)
        if key not in (None, "role") and node.name in ("defined", "undefined"):
            return node.name == "undefined"
        if self._is_absent(node.node) and node.name in ("none", "defined"):
            return True
        return None

    def _truth_of_role(self, node: nodes.Compare) -> bool | None:
        """Of `m.role == 'tool'` where no message is of that role, and of `'tool_calls' in m`."""
        [operand, *more] = node.ops
        if more:
            return None
        if isinstance(node.expr, nodes.Const) and self._is_message(operand.expr) and operand.op in MEMBERSHIP:
            return (node.expr.value in KEYS) is (operand.op == "in")
        if (
            self._message_key(node.expr) == "role"
            and isinstance(operand.expr, nodes.Const)
            and operand.op == "eq"
        ):
            return None if operand.expr.value in self._roles else False
        return None

    def _message_key(self, node: nodes.Node) -> str | None:
        """Of a part of what can only be a message."""
        if isinstance(node, nodes.Getattr | nodes.Getitem) and self._is_message(node.node):
            key = key_of(node)
            return key if isinstance(key, str) else None
        return None

    def _is_message(self, node: nodes.Node) -> bool:
        return isinstance(node, nodes.Name) and node.name in self.messages

    def _is_absent(self, node: nodes.Node) -> bool:
        """Tools and documents are None here, unless the template sets them itself."""
        return isinstance(node, nodes.Name) and node.name in ABSENT and not self._set[node.name]


def key_of(node: nodes.Getattr | nodes.Getitem) -> object:
    """Of a part of something; None where it is not known."""
    if isinstance(node, nodes.Getattr):
        return node.attr
    return node.arg.value if isinstance(node.arg, nodes.Const) else None
