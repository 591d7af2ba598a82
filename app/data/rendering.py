"""Conversations to text, and which characters of it are trained, for any chat template.

A template is only ever asked to write prefixes of the conversation: what it adds for an assistant turn,
beyond what asks for that turn, is what the model must learn.
"""

from dataclasses import dataclass

from jinja2.exceptions import TemplateError

from app.data.shapes import Conversation, Document, Draft, Message, RowProblem, Span
from app.data.tokenizer import Tokenizer
from app.errors import DataError


@dataclass(frozen=True, slots=True)
class Drafts:
    """The samples of one row, and what is worth telling about how they came about."""

    samples: list[Draft]
    unstable: bool = False  # the template rewrites earlier turns
    unseen: int = 0  # messages of which the template writes nothing


@dataclass(frozen=True, slots=True)
class _Turn:
    text: str  # the conversation up to and with this turn
    span: Span


class Renderer:
    """Applies one chat template under one `dataset.train_on` and `dataset.on_unstable_template`."""

    def __init__(self, tokenizer: Tokenizer, train_on: str, on_unstable: str) -> None:
        self._tokenizer = tokenizer
        self._train_on = train_on
        self._on_unstable = on_unstable

    def drafts(self, content: Conversation | Document, place: str) -> Drafts:
        """The samples of one row. `place` is for the error that an unstable template may be."""
        if isinstance(content, Document):
            return Drafts([self._document(content)])
        assert self._train_on in ("auto", "assistant", "last", "all"), self._train_on
        messages = content.messages
        whole = self._render(messages)
        unseen = sum(m["role"] != "assistant" and m["content"].strip() not in whole for m in messages)
        if self._train_on == "all":
            return Drafts([Draft(whole, ((0, len(whole)),), raw=False)], unseen=unseen)
        turns = self._turns(messages, whole)
        if all(whole.startswith(turn.text) for turn in turns):
            spans = tuple(turn.span for turn in turns)
            return Drafts([Draft(whole, spans, raw=False)], unseen=unseen)
        return Drafts(self._unstable(turns, place), unstable=True, unseen=unseen)

    def _document(self, document: Document) -> Draft:
        assert self._train_on in ("auto", "completion", "all"), self._train_on
        start = 0 if self._train_on == "all" else document.answer
        return Draft(document.text, ((start, len(document.text)),), raw=True)

    def _turns(self, messages: list[Message], whole: str) -> list[_Turn]:
        at = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if not at:
            raise RowProblem(
                f"has no assistant message: dataset.train_on={self._train_on} trains nothing of it"
            )
        wanted = at[-1:] if self._train_on == "last" else at
        return [self._turn(messages, index, whole) for index in wanted]

    def _turn(self, messages: list[Message], index: int, whole: str) -> _Turn:
        last = index == len(messages) - 1
        through = whole if last else self._render(messages[: index + 1])
        start = self._asking(messages[:index], through)
        if start is None:
            raise RowProblem(
                f"the chat template rewrites what comes before message {index} once it is answered,"
                " so what is the answer cannot be told"
            )
        return _Turn(
            through, (start, max(start, len(through.rstrip())))
        )  # white space after the turn's end is no answer

    def _asking(self, before: list[Message], through: str) -> int | None:
        """How many characters of `through` ask for the turn; None if it does not begin by asking."""
        if not before:
            return 0
        prompt = self._render(before, ask=True)
        if through.startswith(prompt):
            return len(prompt)
        prompt = self._render(before)  # the template asks with more than it writes before an answer
        return len(prompt) if through.startswith(prompt) else None

    def _unstable(self, turns: list[_Turn], place: str) -> list[Draft]:
        if self._on_unstable == "error":
            raise DataError(
                f"{place}: the chat template rewrites earlier turns of this conversation;"
                " set dataset.on_unstable_template=expand (a sample for each turn) or last (one for the last)"
            )
        kept = turns if self._on_unstable == "expand" else turns[-1:]
        return [Draft(turn.text, (turn.span,), raw=False) for turn in kept]

    def _render(self, messages: list[Message], *, ask: bool = False) -> str:
        try:
            return self._tokenizer.apply_chat_template([messages], tokenize=False, add_generation_prompt=ask)[
                0
            ]
        except TemplateError as error:
            raise RowProblem(f"the chat template refuses the conversation: {error}") from error
