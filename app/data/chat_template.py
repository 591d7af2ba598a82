"""One conversation as its chat template writes it: whole, in prefixes, and with other words in place of an answer."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

from jinja2.exceptions import TemplateError

from app.data.tokenizer import Tokenizer
from app.data.types import Conversation, Message, RowProblem, Span

_WORDS = ("b", "c")  # two answers that have no character in common


@dataclass(slots=True)
class RenderedConversation:
    """Each prefix is rendered once."""

    tokenizer: Tokenizer
    messages: list[Message]
    tools: list[dict[str, Any]] | None
    _known: dict[tuple[int, bool], str] = field(default_factory=dict)

    @property
    def whole(self) -> str:
        """The conversation."""
        return self.prefix(len(self.messages))

    def prefix(self, end: int, *, ask: bool = False) -> str:
        """The first `end` messages; `ask`: with what opens the next answer. Of no messages nothing is written."""
        if end == 0:
            return ""
        if (end, ask) not in self._known:
            self._known[end, ask] = self._rendered(self.messages[:end], ask=ask)
        return self._known[end, ask]

    def head(self, index: int) -> str:
        """What stands before an answer in the place of message `index` whatever it says."""
        before = self.messages[:index]
        return common_start(*(self._rendered([*before, _answer(word)]) for word in _WORDS))

    def added(self, index: int) -> str:
        """What message `index` adds to those before it."""
        before, through = self.prefix(index), self.prefix(index + 1)
        return through[len(common_start(before, through)) :]

    def _rendered(self, messages: list[Message], *, ask: bool = False) -> str:
        try:
            [text] = self.tokenizer.apply_chat_template(
                [messages], tools=self.tools, tokenize=False, add_generation_prompt=ask
            )
        except (TemplateError, TypeError) as error:  # a template may add text to what is none
            raise RowProblem(f"the chat template refuses the conversation: {error}") from error
        return text


def common_start(*texts: str) -> str:
    """The longest text that all of them begin with."""
    shortest = min(texts, key=len)
    if all(text.startswith(shortest) for text in texts):
        return shortest
    end = next(at for at, characters in enumerate(zip(*texts, strict=False)) if len(set(characters)) > 1)
    return shortest[:end]


def render_conversation(conversation: Conversation, tokenizer: Tokenizer) -> RenderedConversation:
    """With all calls of tools in it, spelt in the first way that the template writes."""
    messages, tools = conversation.messages, conversation.tools
    calling = [index for index, message in enumerate(messages) if "tool_calls" in message]
    if not calling:
        return RenderedConversation(tokenizer, messages, tools)
    lost: int | None = None
    refused: RowProblem | None = None
    for spelt in _spellings(messages):
        script = RenderedConversation(tokenizer, spelt, tools)
        try:
            missing = next((index for index in calling if not _writes_calls(script, index)), None)
        except RowProblem as problem:
            refused = refused or problem
            continue
        if missing is None:
            return script
        lost = missing if lost is None else lost
    if lost is None and refused is not None:
        raise refused
    raise RowProblem(
        f"the chat template writes nothing of the tool call in message {lost}; give one that knows tools:"
        " model.chat_template=FILE"
    )


def _spellings(messages: list[Message]) -> Iterator[list[Message]]:
    """Templates differ in what they expect of one who calls and says nothing, and of what is called with."""
    for as_text in (False, True):
        for absent in (False, True):
            yield [_spelt(m, as_text, absent) if "tool_calls" in m else m for m in messages]


def _spelt(message: Message, as_text: bool, absent: bool) -> Message:
    kept = {key: value for key, value in message.items() if value or key != "content" or not absent}
    calls = [
        {**call, "function": {**call["function"], "arguments": _arguments(call, as_text)}}
        for call in message["tool_calls"]
    ]
    return {**kept, "tool_calls": calls}


def _arguments(call: Message, as_text: bool) -> Any:
    found = call["function"]["arguments"]
    return json.dumps(found, ensure_ascii=False) if as_text else found


def _writes_calls(script: RenderedConversation, index: int) -> bool:
    """Whether all calls of a message are there, and not in the spelling of Python."""
    added = script.added(index)
    called = [call["function"] for call in script.messages[index]["tool_calls"]]
    python = [repr(call["arguments"]) for call in called if call["arguments"]]
    return all(call["name"] in added for call in called) and not any(text in added for text in python)


def _answer(word: str) -> Message:
    return {"role": "assistant", "content": word}


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
