"""One conversation as its chat template writes it: whole, in prefixes, and with other words in place of an answer."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from jinja2.exceptions import TemplateError

from app.data.shapes import Conversation, Message, RowProblem
from app.data.tokenizer import Tokenizer

_WORDS = ("b", "c")  # two answers that have no character in common


@dataclass(slots=True)
class Script:
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


def script_of(conversation: Conversation, tokenizer: Tokenizer) -> Script:
    """With all calls of tools in it, spelt in the first way that the template writes."""
    messages, tools = conversation.messages, conversation.tools
    calling = [index for index, message in enumerate(messages) if "tool_calls" in message]
    if not calling:
        return Script(tokenizer, messages, tools)
    lost: int | None = None
    refused: RowProblem | None = None
    for spelt in _spellings(messages):
        script = Script(tokenizer, spelt, tools)
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


def _writes_calls(script: Script, index: int) -> bool:
    """Whether all calls of a message are there, and not in the spelling of Python."""
    added = script.added(index)
    called = [call["function"] for call in script.messages[index]["tool_calls"]]
    python = [repr(call["arguments"]) for call in called if call["arguments"]]
    return all(call["name"] in added for call in called) and not any(text in added for text in python)


def _answer(word: str) -> Message:
    return {"role": "assistant", "content": word}
