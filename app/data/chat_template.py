"""Conversations rendered by a chat template: whole, in prefixes, or from a skeleton shared by a role pattern.

`RenderedConversation` renders each prefix once and formats tool calls as the template expects. `Skeleton` is the
rendering of a role pattern with holes for the contents: trained spans are located once and filled in for each row.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise, product
from typing import Any

from app.assets import template_names, template_text
from app.chat_rendering import ConversationRefused, render_chat
from app.data.rows import Conversation, Message, RowProblem, Span
from app.data.tokenizer import Tokenizer
from app.errors import ConfigError

TOOL_TEMPLATES = ("qwen3", "qwen2.5", "llama3.1")  # built-in templates with tool support
THOUGHT_KEYS = ("reasoning_content", "thinking", "reasoning")  # message keys of reasoning
_INLINE = re.compile(r"\s*(?:<think>(.*?)</think>|\[THINK\](.*?)\[/THINK\])\s*", re.DOTALL)
THOUGHT_END = re.compile(r"\s*(?:</think>|\[/THINK\])\s*")
_BAR = "[|\N{FULLWIDTH VERTICAL LINE}]"
_MARKER = re.compile(rf"<{_BAR}[^\s<>'\"]+{_BAR}>|<(?:start|end)_of_turn>")
_WORD = re.compile(r"\w+")
# Arguments of apply_chat_template that are not template options.
_NO_OPTIONS = {"messages", "conversation", "tools", "chat_template", "add_generation_prompt", "tokenize", "padding"}
_NO_OPTIONS |= {"continue_final_message", "sanitize_control_tokens", "truncation", "max_length", "tokenizer_kwargs"}
_NO_OPTIONS |= {"return_tensors", "return_dict", "return_assistant_tokens_mask"}
_ROLE_KEYS = ("role", "content", "tool_calls")  # read by every template
_MAX_KEY_PATTERNS = 4096
_PROBE_ANSWERS = ("b", "c")  # two answers without a common character
_PROBE_ARGUMENTS = {"key": "value"}  # the call ID has nine letters, as Mistral's templates require
_PROBE_CALL = {"id": "callprobe", "type": "function", "function": {"name": "probe", "arguments": _PROBE_ARGUMENTS}}

# The content of a placeholder message: two kinds of whitespace, to detect what a template strips, around private-use
# characters, which no template writes.
_LEFT, _OPEN, _SHUT, _RIGHT = "\N{EM SPACE}", "\U000f0000", "\U000f0001", "\N{EN SPACE}"
_FIRST_NUMBER = 0x100000
_HOLE = re.compile(f"({_LEFT}?){_OPEN}(.){_SHUT}({_RIGHT}?)")
_STRIPS: dict[tuple[bool, bool], Callable[[str], str]] = {  # by the whitespace that the template kept
    (True, True): str,
    (False, False): str.strip,
    (False, True): str.lstrip,
    (True, False): str.rstrip,
}


def missing_markers(tokenizer: Tokenizer, text: str) -> list[str]:
    """Return markers in a template or its output that look like special tokens but are not in the tokenizer."""
    markers = dict.fromkeys(_MARKER.findall(text))
    return [marker for marker in markers if tokenizer.backend_tokenizer.token_to_id(marker) is None]


def other_template(tokenizer: Tokenizer) -> str:
    """Return a built-in template whose markers are tokens of this tokenizer, or FILE."""
    for name in template_names():
        text = template_text(name)
        if text not in str(tokenizer.chat_template) and _MARKER.search(text) and not missing_markers(tokenizer, text):
            return name
    return "FILE"


def thought_of(message: Message) -> str:
    """Return the reasoning of an assistant message: from its key, or between markers in the content."""
    inline = _INLINE.match(str(message.get("content", "")))
    written = (message[key] for key in THOUGHT_KEYS if isinstance(message.get(key), str))
    if message["role"] != "assistant":
        return ""
    return next(written, "") or (str(inline[1] or inline[2] or "") if inline else "")


def without_thought(message: Message) -> Message:
    """Return the message without reasoning."""
    if message["role"] != "assistant":
        return message
    rest = {key: value for key, value in message.items() if key not in THOUGHT_KEYS}
    return {**rest, "content": _INLINE.sub("", rest["content"], count=1)} if rest.get("content") else rest


def with_merged_answers(conversation: Conversation) -> Conversation | None:
    """Join consecutive assistant messages with a blank line.

    Return None if there are none, or if flags or a completion refer to single messages.
    """
    if conversation.trained or conversation.weights or conversation.completion_start:
        return None
    merged: list[Message] = []
    for message in conversation.messages:
        both = (merged[-1], message) if merged else ()
        if both and all(turn["role"] == "assistant" and turn.keys() == {"role", "content"} for turn in both):
            merged[-1] = {**message, "content": "\n\n".join(turn["content"] for turn in both)}
        else:
            merged.append(message)
    return replace(conversation, messages=merged) if len(merged) < len(conversation.messages) else None


class TemplateNames:
    """Names that a chat template reads from a row in addition to role and content."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._words = {"role", "content", "tool_calls", *_WORD.findall(str(tokenizer.chat_template))}
        self._thought = next((key for key in THOUGHT_KEYS if key in self._words), None)
        self._unread: dict[tuple[Any, ...], tuple[str, ...]] = {}

    def unread_keys(self, conversation: Conversation, index: int) -> tuple[str, ...]:
        """Return the message keys that do not change the rendering of the conversation up to this message.

        Cached by the set of keys and which of their values are empty.
        """
        message = conversation.messages[index]
        extra = [key for key in message if key not in _ROLE_KEYS]
        if not extra:
            return ()
        pattern = (message["role"], "tool_calls" in message, *((key, bool(message[key])) for key in extra))
        if pattern not in self._unread:
            if len(self._unread) >= _MAX_KEY_PATTERNS:
                self._unread.clear()
            before = conversation.messages[:index]
            whole = self._text(conversation, [*before, message])
            others = ({name: inner for name, inner in message.items() if name != key} for key in extra)
            texts = [self._text(conversation, [*before, other]) for other in others]
            self._unread[pattern] = tuple(
                key for key, text in zip(extra, texts, strict=True) if whole is not None and text == whole
            )
        return self._unread[pattern]

    def _text(self, conversation: Conversation, messages: list[Message]) -> str | None:
        """Return the rendering of these messages; None if the template rejects them or fails."""
        try:
            adapted = self.adapt(replace(conversation, messages=messages))
            return render_conversation(adapted, self._tokenizer, self).whole
        except (RowProblem, ConfigError):
            return None

    def reads_option(self, name: str) -> bool:
        return name in self._words and name not in _NO_OPTIONS

    @property
    def is_there(self) -> bool:
        """Whether the tokenizer has a template."""
        return bool(self._tokenizer.chat_template)

    @cached_property
    def writes_thoughts(self) -> bool:
        """Whether there is a template that renders the reasoning of an assistant message."""
        answer = {"role": "assistant", "content": "b", THOUGHT_KEYS[0]: "c"}
        chat = Conversation([{"role": "user", "content": "a"}, answer])
        return self.is_there and not self.unread_keys(chat, 1)

    @cached_property
    def writes_python(self) -> bool:
        """Whether the template renders tool call arguments that are an object as their Python `repr`."""
        call: Message = {"role": "assistant", "tool_calls": [_PROBE_CALL]}
        for message in ({**call, "content": ""}, call):
            try:
                text = RenderedConversation(self._tokenizer, [{"role": "user", "content": "a"}, message]).whole
            except (RowProblem, ConfigError):  # a template may reject the probe or fail
                continue
            if repr(_PROBE_ARGUMENTS) in text:
                return True
        return False

    def adapt(self, conversation: Conversation) -> Conversation:
        """Rename the reasoning key to that of the template, and drop options that it does not read."""
        options = {name: value for name, value in conversation.options.items() if self.reads_option(name)}
        return replace(conversation, messages=[self._renamed(m) for m in conversation.messages], options=options)

    def _renamed(self, message: Message) -> Message:
        other = next((key for key in THOUGHT_KEYS if key in message and key not in self._words), None)
        if other is None or self._thought is None or self._thought in message:
            return message
        return {self._thought if key == other else key: value for key, value in message.items()}


@dataclass(slots=True)
class RenderedConversation:
    """Messages and tools with one template; each prefix is rendered once."""

    tokenizer: Tokenizer
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    _prefixes: dict[tuple[int, bool], str] = field(default_factory=dict)

    @property
    def whole(self) -> str:
        return self.prefix(len(self.messages))

    def prefix(self, end: int, *, ask: bool = False) -> str:
        """Render the first `end` messages; `ask` adds the generation prompt. Return an empty text for no messages."""
        if end == 0:
            return ""
        if (end, ask) not in self._prefixes:
            self._prefixes[end, ask] = self._render(self.messages[:end], ask=ask)
        return self._prefixes[end, ask]

    def answer_head(self, index: int) -> str:
        """Return the text before any answer at the position of message `index`."""
        before = self.messages[:index]
        answers = ({"role": "assistant", "content": word} for word in _PROBE_ANSWERS)
        return common_start(*(self._render([*before, answer]) for answer in answers))

    def added(self, index: int) -> str:
        """Return the text that message `index` adds to the previous messages."""
        before, through = self.prefix(index), self.prefix(index + 1)
        return through[len(common_start(before, through)) :]

    def _render(self, messages: list[Message], *, ask: bool = False) -> str:
        try:
            return render_chat(self.tokenizer, messages, tools=self.tools, ask=ask, options=self.options)
        except ConversationRefused as refusal:
            raise RowProblem(f"the chat template rejects the conversation: {refusal}") from refusal


def common_start(*texts: str) -> str:
    """Return the longest common prefix."""
    shortest = min(texts, key=len)
    start, end = 0, len(shortest)
    while start < end:  # binary search: compares slices at C speed
        middle = (start + end + 1) // 2
        is_common = all(text.startswith(shortest[start:middle], start) for text in texts)
        start, end = (middle, end) if is_common else (start, middle - 1)
    return shortest[:start]


def render_conversation(conversation: Conversation, tokenizer: Tokenizer, names: TemplateNames) -> RenderedConversation:
    """Render with tool calls in the first form that the template renders."""
    messages, rest = conversation.messages, (conversation.tools, conversation.options)
    calling = [index for index, message in enumerate(messages) if "tool_calls" in message]
    if not calling:
        return RenderedConversation(tokenizer, messages, *rest)
    unwritten: int | None = None
    refusal: RowProblem | None = None
    for as_text, absent in product((False, True), repeat=2):
        if names.writes_python and not as_text:
            unwritten = calling[0]
            continue
        spelt = [_spelt(message, as_text, absent) for message in messages]
        rendered = RenderedConversation(tokenizer, spelt, *rest)
        try:
            missing = next((index for index in calling if not _writes_calls(rendered, index)), None)
        except RowProblem as problem:
            refusal = refusal or problem
            continue
        if missing is None:
            return rendered
        unwritten = missing if unwritten is None else unwritten
    if unwritten is None and refusal is not None:
        raise refusal
    raise RowProblem(
        f"the chat template does not render the tool call in message {unwritten}; set one with tool support:"
        f" model.chat_template=FILE or {', '.join(TOOL_TEMPLATES)}"
    )


def _spelt(message: Message, as_text: bool, absent: bool) -> Message:
    """Format tool calls: arguments as an object or JSON text, empty content present or absent."""
    if "tool_calls" not in message:
        return message
    rest = {key: value for key, value in message.items() if value or key != "content" or not absent}
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"]["arguments"]
        arguments = json.dumps(arguments, ensure_ascii=False) if as_text else arguments
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**rest, "tool_calls": calls}


def _writes_calls(rendered: RenderedConversation, index: int) -> bool:
    """Return whether all tool calls of a message are rendered."""
    added = rendered.added(index)
    return all(call["function"]["name"] in added for call in rendered.messages[index]["tool_calls"])


@dataclass(frozen=True, slots=True)
class Skeleton:
    """Literal texts with a message between each pair, and trained spans as (literal, character) edges.

    The filled text is valid for a row only if it equals the rendering of the row.
    """

    literals: tuple[str, ...]
    holes: tuple[tuple[int, Callable[[str], str]], ...]  # message index, and how the template strips its content
    spans: tuple[tuple[tuple[int, int], tuple[int, int]], ...]

    @classmethod
    def from_text(cls, text: str, spans: Sequence[Span]) -> "Skeleton | None":
        """Build from the rendering of placeholders; None if a span starts or ends inside a placeholder."""
        matches = list(_HOLE.finditer(text))
        borders = [0, *(edge for hole in matches for edge in hole.span()), len(text)]
        literals = list(pairwise(borders))[::2]
        edges = [
            next(((n, at - first) for n, (first, end) in enumerate(literals) if first <= at <= end), None)
            for span in spans
            for at in span
        ]
        holes = [(ord(hole[2]) - _FIRST_NUMBER, _STRIPS[bool(hole[1]), bool(hole[3])]) for hole in matches]
        located = [edge for edge in edges if edge is not None]
        if len(located) < len(edges):
            return None
        pairs = tuple(zip(located[::2], located[1::2], strict=True))
        return cls(tuple(text[first:end] for first, end in literals), tuple(holes), pairs)

    def fill(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        """Return the text of a conversation and its trained spans."""
        parts = [self.literals[0]]
        for (index, strip), literal in zip(self.holes, self.literals[1:], strict=True):
            parts += strip(messages[index]["content"]), literal
        starts = [0, *accumulate(map(len, parts))]
        spans = [(starts[2 * at] + first, starts[2 * to] + end) for (at, first), (to, end) in self.spans]
        return "".join(parts), spans


def placeholders(roles: Sequence[str]) -> list[Message]:
    """Return messages that can be located in the rendering of a template."""
    return [
        {"role": role, "content": f"{_LEFT}{_OPEN}{chr(_FIRST_NUMBER + at)}{_SHUT}{_RIGHT}"}
        for at, role in enumerate(roles)
    ]
