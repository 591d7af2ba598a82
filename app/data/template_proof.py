"""Whether a chat template looks at what messages say, or only writes it: proved from its syntax, never by trying.

Where it only writes, its text for one conversation is that for any other with the same roles, with other words in the
same places. Plain messages are meant, of role and content alone, whose content is text and more than white space.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jinja2 import Environment, nodes
from jinja2.exceptions import TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from app.data.template_conditions import Conditions
from app.data.template_kinds import FIXED, MESSAGE, MESSAGES, TEXT, Kinds, Looks, is_space, require


def only_writes(template: str, roles: Iterable[str]) -> bool:
    """Whether that is proved for conversations of no other roles."""
    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    try:
        _Reader(environment.parse(template), roles).read()
    except (TemplateSyntaxError, Looks, RecursionError):
        return False
    return True


class _Generation(Extension):
    """The tag round what is generated: only its inside matters."""

    tags = {"generation"}  # noqa: RUF012  as jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements inside."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Reader:
    """Goes through all statements until the kinds of all variables, whatever the order they are set in, are known."""

    def __init__(self, tree: nodes.Template, roles: Iterable[str]) -> None:
        self._body = tree.body
        self._conditions = Conditions(tree, roles)
        self._kinds = Kinds(tree, self._conditions)

    def read(self) -> None:
        """Looks if it does."""
        before: tuple[object, ...] = ()
        while before != (now := (dict(self._kinds.known), set(self._conditions.messages))):
            before = now
            self._all(self._body)

    def _all(self, statements: Iterable[nodes.Node]) -> None:
        for statement in statements:
            rule = _RULES.get(type(statement))
            if rule is None:
                raise Looks
            rule(self, statement)

    def _output(self, node: nodes.Output) -> None:
        for part in node.nodes:
            require(self._kinds.of(part) in (FIXED, TEXT))

    def _if(self, node: nodes.If) -> None:
        for test, body in [(node.test, node.body), *((each.test, each.body) for each in node.elif_)]:
            self._kinds.of(test)  # what is not empty does not become empty by other words
            known = self._conditions.truth(test)
            if known is not False:
                self._all(body)
            if known:
                return
        self._all(node.else_)

    def _for(self, node: nodes.For) -> None:
        kind = self._kinds.of(node.iter)
        require(kind in (FIXED, MESSAGES) and not node.recursive)
        require(kind is FIXED or isinstance(node.target, nodes.Name))
        for name in [node.target, *node.target.find_all(nodes.Name)]:
            if isinstance(name, nodes.Name):
                self._kinds.set(name.name, MESSAGE if kind is MESSAGES else FIXED)
                if kind is FIXED:
                    self._conditions.messages.discard(name.name)
        if node.test is not None:
            self._kinds.of(node.test)
        self._all(node.body)
        self._all(node.else_)

    def _assign(self, node: nodes.Assign) -> None:
        if is_space(node):
            for each in node.node.kwargs:  # type: ignore[attr-defined]
                self._kinds.set(f".{each.key}", self._kinds.of(each.value))
            self._kinds.fixed(*node.node.args)  # type: ignore[attr-defined]
            return
        kind = self._kinds.of(node.node)
        if isinstance(node.target, nodes.Name):
            self._kinds.set(node.target.name, kind)
        elif isinstance(node.target, nodes.NSRef):
            self._kinds.set(f".{node.target.attr}", kind)
        else:
            require(kind is FIXED)

    def _assign_block(self, node: nodes.AssignBlock) -> None:
        require(isinstance(node.target, nodes.Name) and node.filter is None)
        self._all(node.body)
        self._kinds.set(node.target.name, TEXT)  # type: ignore[attr-defined]

    def _macro(self, node: nodes.Macro) -> None:
        for name, default in zip(node.args[::-1], node.defaults[::-1], strict=False):
            self._kinds.set(name.name, self._kinds.of(default))
        self._all(node.body)

    def _nothing(self, _node: nodes.Node) -> None:
        """Neither sets nor writes anything."""


_RULES: Mapping[type[nodes.Node], Callable[[Any, Any], None]] = {
    nodes.Output: _Reader._output,
    nodes.If: _Reader._if,
    nodes.For: _Reader._for,
    nodes.Assign: _Reader._assign,
    nodes.AssignBlock: _Reader._assign_block,
    nodes.Macro: _Reader._macro,
    nodes.Break: _Reader._nothing,
    nodes.Continue: _Reader._nothing,
}
