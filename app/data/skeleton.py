"""What a chat template writes for a pattern of roles, with holes for the words: spans found once, filled for each row.

The filled text is only worth something where it equals what the template really writes for a row.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from app.data.shapes import Message, Span

# Of what stands for a message: white space of two kinds, to see what a template strips of it, and characters for
# private use, that no template writes.
_LEFT, _OPEN, _SHUT, _RIGHT = "\N{EM SPACE}", "\U000f0000", "\U000f0001", "\N{EN SPACE}"
_FIRST = 0x100000
_HOLE = re.compile(f"({_LEFT}?){_OPEN}(.){_SHUT}({_RIGHT}?)")
_CUTS: dict[tuple[bool, bool], Callable[[str], str]] = {  # by which white space is left of it
    (True, True): str,
    (False, False): str.strip,
    (False, True): str.lstrip,
    (True, False): str.rstrip,
}


@dataclass(frozen=True, slots=True)
class Skeleton:
    """Literal text, with a message between each two, and edges of spans as literal and place in it."""

    literals: tuple[str, ...]
    holes: tuple[tuple[int, Callable[[str], str]], ...]
    spans: tuple[tuple[tuple[int, int], tuple[int, int]], ...]

    def filled(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        """The text of a conversation, and the spans in it."""
        parts = [self.literals[0]]
        for (index, cut), literal in zip(self.holes, self.literals[1:], strict=True):
            parts += cut(messages[index]["content"]), literal
        begins = [0, *accumulate(map(len, parts))]
        spans = [(begins[2 * at] + first, begins[2 * to] + end) for (at, first), (to, end) in self.spans]
        return "".join(parts), spans


def stand_ins(roles: Sequence[str]) -> list[Message]:
    """Messages that can be found again in what a template makes of them."""
    return [
        {"role": role, "content": f"{_LEFT}{_OPEN}{chr(_FIRST + at)}{_SHUT}{_RIGHT}"}
        for at, role in enumerate(roles)
    ]


def skeleton_of(text: str, spans: Sequence[Span]) -> Skeleton | None:
    """From the text of stand-ins; None where a span begins or ends inside one of them."""
    found = list(_HOLE.finditer(text))
    borders = [0, *(edge for hole in found for edge in hole.span()), len(text)]
    literals = list(pairwise(borders))[::2]
    edges = [_edge(at, literals) for span in spans for at in span]
    holes = [(ord(hole[2]) - _FIRST, _CUTS[bool(hole[1]), bool(hole[3])]) for hole in found]
    known = [edge for edge in edges if edge is not None]
    if len(known) < len(edges):
        return None
    pairs = tuple(zip(known[::2], known[1::2], strict=True))
    return Skeleton(tuple(text[first:end] for first, end in literals), tuple(holes), pairs)


def _edge(at: int, literals: Sequence[Span]) -> tuple[int, int] | None:
    return next(((n, at - first) for n, (first, end) in enumerate(literals) if first <= at <= end), None)
