"""What the expressions of a chat template may be: what follows from the roles, or has in it what a message says.

What the rules below do not know counts as looking at what a message says.
"""

from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any

from jinja2 import nodes

from app.data.template_conditions import MEMBERSHIP, Conditions, is_type_test, key_of


class Kind(IntEnum):
    """What an expression may be, as far as it matters here."""

    FIXED = 0  # follows from the roles and from the tokenizer
    TEXT = 1  # has in it what a message says, as it stands or without the white space around it
    MESSAGE = 2
    MESSAGES = 3


class Looks(Exception):  # noqa: N818  an answer, no error
    """It may look at what a message says."""


FIXED, TEXT, MESSAGE, MESSAGES = Kind
_SAME_KIND = {"list", "reverse"}  # filters of a list of messages
_OF_A_LIST = {"first": MESSAGE, "last": MESSAGE, "length": FIXED, "count": FIXED}
_TRIMMING = {"strip", "lstrip", "rstrip"}
_CALLED = {"range", "dict", "strftime_now"}
_OF_LOOPS = {"index", "index0", "revindex", "revindex0", "first", "last", "length", "depth", "depth0"}
_NO_VALUES = {"loop", "varargs", "kwargs", "caller", "self"}  # some are known by their parts alone


class Kinds:
    """Of the variables of one template, and of its expressions."""

    def __init__(self, tree: nodes.Template, conditions: Conditions) -> None:
        self._conditions = conditions
        macros = list(tree.find_all(nodes.Macro))
        self._macros = {macro.name: macro for macro in macros}
        require(len(self._macros) == len(macros))
        self._spaces = {each.target.name for each in tree.find_all(nodes.Assign) if is_space(each)}  # type: ignore[attr-defined]
        self.known: dict[str, Kind] = {"messages": MESSAGES}  # with a dot before those of attributes

    def set(self, name: str, kind: Kind) -> None:
        """One of the values that a variable has."""
        require(name not in self._spaces)
        before = self.known.get(name)
        self.known[name] = kind if before is None else _joined(before, kind)

    def of(self, node: nodes.Node) -> Kind:
        """Looks if it is not known not to."""
        rule = _RULES.get(type(node))
        if rule is None:
            raise Looks
        return rule(self, node)

    def fixed(self, *given: nodes.Node | None) -> Kind:
        """All of them are, or it looks."""
        for node in given:
            require(node is None or self.of(node) is FIXED)
        return FIXED

    def _name(self, node: nodes.Name) -> Kind:
        require(node.name not in _NO_VALUES and node.name not in self._spaces)
        return self.known.get(node.name, FIXED)

    def _concat(self, node: nodes.Concat) -> Kind:
        return self._text_of(*node.nodes)

    def _sum(self, node: nodes.Add) -> Kind:
        return self._text_of(node.left, node.right)

    def _text_of(self, *parts: nodes.Node) -> Kind:
        kind = _joined(*(self.of(part) for part in parts))
        require(kind in (FIXED, TEXT))
        return kind

    def _either(self, node: nodes.And | nodes.Or) -> Kind:
        left = self.of(node.left)
        if self._conditions.truth(node.left) is isinstance(node, nodes.Or):  # the right side is never asked
            return left
        return _joined(left, self.of(node.right))

    def _not(self, node: nodes.Not) -> Kind:
        self.of(node.node)
        return FIXED

    def _choice(self, node: nodes.CondExpr) -> Kind:
        self.of(node.test)
        known, other = self._conditions.truth(node.test), node.expr2 or nodes.Const(None)
        if known is not None:
            return self.of(node.expr1 if known else other)
        return _joined(self.of(node.expr1), self.of(other))

    def _comparison(self, node: nodes.Compare) -> Kind:
        kinds = [self.of(node.expr), *(self.of(each.expr) for each in node.ops)]
        if any(kinds):
            require(len(node.ops) == 1)
            right, how = node.ops[0].expr, node.ops[0].op
            if kinds[1] is MESSAGE:
                require(kinds[0] is FIXED and how in MEMBERSHIP)  # has it such a key
            else:  # nothing that is said equals an empty text, or what is no text
                require(kinds == [TEXT, FIXED] and how in ("eq", "ne") and isinstance(right, nodes.Const))
                require(right.value == "" or not isinstance(right.value, str))  # type: ignore[attr-defined]
        return FIXED

    def _test(self, node: nodes.Test) -> Kind:
        kind = self.of(node.node)
        if kind is not FIXED:
            require(is_type_test(node.name) or (node.name == "sameas" and kind is MESSAGE))
        for given in node.args:
            require(self.of(given) in ((FIXED, MESSAGE) if node.name == "sameas" else (FIXED,)))
        require(not node.kwargs and node.dyn_args is None and node.dyn_kwargs is None)
        return FIXED

    def _filter(self, node: nodes.Filter) -> Kind:
        require(node.node is not None and node.dyn_args is None and node.dyn_kwargs is None)
        kind = self.of(node.node)  # type: ignore[arg-type]
        self.fixed(*node.args, *(each.value for each in node.kwargs))
        if kind is FIXED:
            require(node.name not in ("random", "attr", "map"))
            return FIXED
        if kind is MESSAGES and node.name in ("selectattr", "rejectattr"):
            require(isinstance(node.args[0], nodes.Const) and node.args[0].value == "role")
            return MESSAGES
        require(not node.args and not node.kwargs)
        if kind is MESSAGES:
            require(node.name in _SAME_KIND or node.name in _OF_A_LIST)
            return _OF_A_LIST.get(node.name, MESSAGES)
        require(kind is TEXT and node.name in ("trim", "string"))
        return TEXT

    def _part(self, node: nodes.Getattr | nodes.Getitem) -> Kind:
        key = key_of(node)
        if isinstance(node.node, nodes.Name) and node.node.name == "loop":
            require(key in _OF_LOOPS or key in ("previtem", "nextitem"))
            return FIXED if key in _OF_LOOPS else MESSAGE
        if isinstance(node.node, nodes.Name) and node.node.name in self._spaces:
            require(isinstance(key, str))
            return self.known.get(f".{key}", FIXED)
        kind = self.of(node.node)
        if kind is MESSAGES:
            return self._part_of_messages(node)
        if kind is MESSAGE:
            require(isinstance(key, str) and not key.startswith("_") and not hasattr(dict, key))
            return TEXT if key == "content" else FIXED
        require(kind is FIXED)
        return self.fixed(node.arg) if isinstance(node, nodes.Getitem) else FIXED

    def _part_of_messages(self, node: nodes.Getattr | nodes.Getitem) -> Kind:
        require(isinstance(node, nodes.Getitem) and not isinstance(key_of(node), str))
        assert isinstance(node, nodes.Getitem)
        self.fixed(node.arg)
        return MESSAGES if isinstance(node.arg, nodes.Slice) else MESSAGE

    def _call(self, node: nodes.Call) -> Kind:
        require(node.dyn_args is None and node.dyn_kwargs is None)
        if isinstance(node.node, nodes.Name):
            return self._named_call(node, node.node.name)
        require(isinstance(node.node, nodes.Getattr))
        assert isinstance(node.node, nodes.Getattr)
        kind = self.of(node.node.node)
        if kind is TEXT:
            require(node.node.attr in _TRIMMING and not node.args and not node.kwargs)
            return TEXT
        if kind is MESSAGE:
            require(node.node.attr == "get" and len(node.args) in (1, 2) and not node.kwargs)
            self.fixed(*node.args)
            found = nodes.Getitem(node.node.node, node.args[0], "load")
            return self.of(found)
        require(kind is FIXED)
        return self.fixed(*node.args, *(each.value for each in node.kwargs))

    def _named_call(self, node: nodes.Call, name: str) -> Kind:
        if name in self._macros:
            return self._macro_call(node, self._macros[name])
        if name == "raise_exception":  # whoever gets here has no text
            return FIXED
        require(name in _CALLED)
        return self.fixed(*node.args, *(each.value for each in node.kwargs))

    def _macro_call(self, node: nodes.Call, macro: nodes.Macro) -> Kind:
        names = [each.name for each in macro.args]
        require(len(node.args) <= len(names) and all(each.key in names for each in node.kwargs))
        given = [*zip(names, node.args, strict=False), *((each.key, each.value) for each in node.kwargs)]
        for name, value in given:
            self.set(name, self.of(value))
        return TEXT

    def _parts(self, node: nodes.Node) -> Kind:
        return self.fixed(*node.iter_child_nodes())


def _joined(*kinds: Kind) -> Kind:
    """What may be any of them. Lists that are no messages have other keys, so they are kept apart."""
    others = {*kinds} - {FIXED}
    require(len(others) <= 1 and {*kinds} != {FIXED, MESSAGES})
    return next(iter(others), FIXED)


def require(known: bool) -> None:
    """It looks if not."""
    if not known:
        raise Looks


def is_space(node: nodes.Assign) -> bool:
    """Whether a variable becomes a namespace."""
    made = node.node
    called = (
        isinstance(made, nodes.Call) and isinstance(made.node, nodes.Name) and made.node.name == "namespace"
    )
    plain = called and made.dyn_args is None and made.dyn_kwargs is None  # type: ignore[attr-defined]
    return plain and isinstance(node.target, nodes.Name)


def _nothing(_kinds: Kinds, _node: nodes.Node) -> Kind:
    return FIXED


_RULES: Mapping[type[nodes.Node], Callable[[Any, Any], Kind]] = {
    nodes.Const: _nothing,
    nodes.TemplateData: _nothing,
    nodes.Name: Kinds._name,
    nodes.Concat: Kinds._concat,
    nodes.Add: Kinds._sum,
    nodes.And: Kinds._either,
    nodes.Or: Kinds._either,
    nodes.Not: Kinds._not,
    nodes.CondExpr: Kinds._choice,
    nodes.Compare: Kinds._comparison,
    nodes.Test: Kinds._test,
    nodes.Filter: Kinds._filter,
    nodes.Getattr: Kinds._part,
    nodes.Getitem: Kinds._part,
    nodes.Call: Kinds._call,
    **dict.fromkeys(
        (nodes.List, nodes.Tuple, nodes.Dict, nodes.Pair, nodes.Slice, nodes.Sub, nodes.Mul, nodes.Div,
         nodes.FloorDiv, nodes.Mod, nodes.Pow, nodes.Neg, nodes.Pos),
        Kinds._parts,
    ),
}  # fmt: skip
