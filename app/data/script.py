"""One conversation as its chat template writes it: whole, in prefixes, and with other words in place of an answer."""

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
    """With all calls of tools in it. One who only calls says "", or null: templates differ in what they expect."""
    script = Script(tokenizer, conversation.messages, conversation.tools)
    calling = [index for index, message in enumerate(conversation.messages) if "tool_calls" in message]
    if not calling or _lost_call(script, calling) is None:
        return script
    bare = [{**m, "content": m["content"] or None} if "tool_calls" in m else m for m in script.messages]
    script = Script(tokenizer, bare, conversation.tools)
    lost = _lost_call(script, calling)
    if lost is not None:
        raise RowProblem(
            f"the chat template writes nothing of the tool call in message {lost}; give one that knows tools:"
            " model.chat_template=FILE"
        )
    return script


def _lost_call(script: Script, calling: list[int]) -> int | None:
    """The first message whose calls the template does not write."""
    for index in calling:
        names = [call["function"]["name"] for call in script.messages[index]["tool_calls"]]
        added = script.added(index)
        if not all(name in added for name in names):
            return index
    return None


def _answer(word: str) -> Message:
    return {"role": "assistant", "content": word}
