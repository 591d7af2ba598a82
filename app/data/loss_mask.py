"""Conversations to text, and which characters of it are trained, for any chat template.

A template is only ever asked to write prefixes of the conversation: what it adds for an assistant turn,
beyond what asks for that turn, is what the model must learn.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

from app.data.chat_template import (
    RenderedConversation,
    Skeleton,
    common_start,
    render_conversation,
    skeleton_of,
    stand_ins,
)
from app.data.tokenizer import Tokenizer
from app.data.types import Conversation, Document, Example, Message, RenderedText, RowProblem, Span
from app.errors import DataError

_Part = tuple[Span, float]  # characters, and the weight of their tokens
_Pattern = tuple[tuple[str, ...], tuple[int, ...]]  # roles, and which messages are trained
_MAX_PATTERNS = 4096
# a thought that was not thought, as templates write it for a model that is not to think; what asks may open it already
_EMPTY_THOUGHT = re.compile(r"\s*([<\[]\|?\w+\|?[>\]])?\s*[<\[]\|?/\w+\|?[>\]]\s*")


@dataclass(frozen=True, slots=True)
class RenderedRow:
    """The samples of one row, and what is worth telling about how they came about."""

    samples: list[RenderedText]
    unstable: bool = False  # the template rewrites earlier turns
    unseen: int = 0  # messages, and lists of tools, of which the template writes nothing
    shortened: int = 0  # trained answers of which the template leaves out a part
    empty: tuple[str, ...] = ()  # where words are missing
    marked: int = 0  # messages that say what the tokenizer takes for a special token


@dataclass(frozen=True, slots=True)
class _Turn:
    text: str  # the conversation up to and with this turn
    span: Span
    weight: float  # of its tokens

    def stands_in(self, whole: str) -> bool:
        """Whether the turn is there with all before it; what follows its end is of no importance."""
        return whole.startswith(self.text[: self.span[1]])


class Renderer:
    """Applies one chat template under one `dataset.train_on` and `dataset.on_unstable_template`."""

    def __init__(self, tokenizer: Tokenizer, train_on: str, on_unstable: str) -> None:
        self._tokenizer = tokenizer
        self._eos = str(tokenizer.special_tokens_map.get("eos_token", ""))
        self._special = _any_of(tokenizer.special_tokens_map)
        self._train_on = train_on
        self._on_unstable = on_unstable
        self._skeletons: dict[_Pattern, Skeleton | None] = {}

    def drafts(self, content: Conversation | Document | Example, place: str) -> RenderedRow:
        """The samples of one row. `place` is for the error that an unstable template may be."""
        if isinstance(content, Document):
            return RenderedRow([self._document(content)])
        if isinstance(content, Example):
            return RenderedRow(
                [RenderedText(content.text, (), raw=True, label=content.label, second=content.second)]
            )
        marked = sum(self._special.search(message["content"]) is not None for message in content.messages)
        known = ("auto", "assistant", "last", "all", *(["completion"] if content.answer else []))
        assert self._train_on in known, self._train_on
        script = render_conversation(content, self._tokenizer)
        drafts = self._filled(script, content) or self._rendered(script, content, place)
        return replace(drafts, marked=marked)

    def _filled(self, script: RenderedConversation, content: Conversation) -> RenderedRow | None:
        """As `_rendered`, without rendering prefixes; None where a skeleton does not give the text of this row.

        Equal text is not enough: where a blank answer stands, or one that begins with what asks for it, only
        prefixes tell. So blank messages have no skeleton, nor has a pattern where an answer is not all that follows
        its prompt.
        """
        if content.tools is not None or self._train_on == "all" or not all(map(_is_plain, script.messages)):
            return None
        whole = script.whole
        pattern = tuple(message["role"] for message in script.messages), tuple(self._trained(content))
        if pattern not in self._skeletons:
            if len(self._skeletons) >= _MAX_PATTERNS:
                return None
            self._skeletons[pattern] = self._skeleton(*pattern)
        skeleton = self._skeletons[pattern]
        text, spans = skeleton.filled(script.messages) if skeleton else ("", [])
        if text != whole:
            return None
        weights = [content.weights.get(index, 1.0) for index in pattern[1]]
        return RenderedRow([_of_parts(text, list(zip(spans, weights, strict=True)))])

    def _skeleton(self, roles: Sequence[str], trained: Sequence[int]) -> Skeleton | None:
        script = RenderedConversation(self._tokenizer, stand_ins(roles), None)
        try:
            spans = [self._turn(script, index, 1.0).span for index in trained]
            if _unseen(script) or not all(map(_only_adds, repeat(script), trained, spans)):
                return None
        except RowProblem:  # a template may refuse what the stand-ins say
            return None
        return skeleton_of(script.whole, spans)

    def _rendered(self, script: RenderedConversation, content: Conversation, place: str) -> RenderedRow:
        whole, unseen = script.whole, _unseen(script)
        if self._train_on == "all":
            return RenderedRow([_of_parts(whole, _parts(script, content))], unseen=unseen)
        at = self._trained(content)
        turns = [self._turn(script, index, content.weights.get(index, 1.0)) for index in at]
        cut = sum(not _is_whole(script.messages[i], turn.text) for i, turn in zip(at, turns, strict=True))
        if all(turn.stands_in(whole) for turn in turns):
            parts = [(turn.span, turn.weight) for turn in turns]
            return RenderedRow([_of_parts(whole, parts)], unseen=unseen, shortened=cut)
        return RenderedRow(self._unstable(turns, place), unstable=True, unseen=unseen, shortened=cut)

    def _document(self, document: Document) -> RenderedText:
        assert self._train_on in ("auto", "completion", "all"), self._train_on
        start = 0 if self._train_on == "all" else document.answer
        return RenderedText(document.text, ((start, len(document.text)),), raw=True)

    def _trained(self, content: Conversation) -> list[int]:
        """The messages that are trained."""
        first = content.answer if self._train_on in ("auto", "completion") else 0
        said = [m["role"] for m in content.messages]
        wishes = {index: "train=true" for index, trained in content.marks.items() if trained}
        wishes |= {index: f"weight={weight:g}" for index, weight in content.weights.items()}
        for index, wish in wishes.items():
            if said[index] != "assistant" or index < first:
                where = f"is of {said[index]}" if index >= first else "is in the prompt"
                what = "the completion" if first else "answers of the assistant"
                raise RowProblem(
                    f"message {index} {where} and has {wish}, but"
                    f" dataset.train_on={self._train_on} trains {what} only"
                )
        at = [index for index, role in enumerate(said) if role == "assistant" and index >= first]
        if not at:
            where = " in its completion" if first else ""
            raise RowProblem(
                f"has no assistant message{where}: dataset.train_on={self._train_on} trains nothing of it"
            )
        wanted = at[-1:] if self._train_on == "last" else at
        kept = [index for index in wanted if content.marks.get(index, True)]
        if not kept:
            raise RowProblem(
                f"has no assistant message to train under dataset.train_on={self._train_on}: train=false or"
                f" weight=0 takes out message {', '.join(map(str, wanted))}"
            )
        return kept

    def _turn(self, script: RenderedConversation, index: int, weight: float) -> _Turn:
        through = script.prefix(index + 1)
        start = _start(script, index, through)
        if start is None:
            raise RowProblem(
                f"the chat template rewrites what comes before message {index} once it is answered,"
                " so what is the answer cannot be told"
            )
        text = self._unclosed(script, index, through)
        span = start, max(start, len(text.rstrip()))  # white space after the end is no answer
        return _Turn(text, span, weight)

    def _unclosed(self, script: RenderedConversation, index: int, through: str) -> str:
        """Without the token that closes a conversation, where the turn has an end of its own and the talk goes on."""
        if script.whole.startswith(through):
            return through
        shorter = through.rstrip().removesuffix(self._eos).rstrip()
        has_end = not shorter.endswith(_said(script.messages[index]))
        return shorter if has_end and script.whole.startswith(shorter) else through

    def _unstable(self, turns: list[_Turn], place: str) -> list[RenderedText]:
        if self._on_unstable == "error":
            raise DataError(
                f"{place}: the chat template rewrites earlier turns of this conversation;"
                " set dataset.on_unstable_template=expand (a sample for each turn) or last (one for the last)"
            )
        kept = turns if self._on_unstable == "expand" else turns[-1:]
        return [_of_parts(turn.text, [(turn.span, turn.weight)]) for turn in kept]


def _is_plain(message: Message) -> bool:
    """Whether there is nothing but a role and words."""
    return message.keys() == {"role", "content"} and bool(message["content"].strip())


def _only_adds(script: RenderedConversation, index: int, span: Span) -> bool:
    """Whether an answer is all that follows its prompt, without a thought before it, and stays as the talk goes on."""
    through, prompt = script.prefix(index + 1), script.prefix(index, ask=True)
    if index == 0 or not through.startswith(prompt) or not script.whole.startswith(through):
        return False
    thought = _EMPTY_THOUGHT.fullmatch(script.head(index)[len(prompt) :])
    return span[0] == len(prompt) and thought is None and _is_whole(script.messages[index], through)


def _any_of(special: Mapping[str, Any]) -> re.Pattern[str]:
    """What finds the text of a special token; nothing where there is none."""
    named = [[tokens] if isinstance(tokens, str) else tokens for tokens in special.values()]
    texts = [re.escape(str(token)) for tokens in named for token in tokens if str(token).strip()]
    return re.compile("|".join(texts) or r"(?!)")


def _start(script: RenderedConversation, index: int, through: str) -> int | None:
    """The first character of `through` that is the answer's; None if it does not begin with what was asked."""
    if index == 0:  # nobody asked
        return len(_shared(script.head(0), through))
    prompt = script.prefix(index, ask=True)
    start = len(prompt)
    if not through.startswith(prompt):
        before = script.prefix(index)  # the template asks with more than it writes before an answer
        if not through.startswith(before):
            return None
        start = max(len(before), len(_shared(prompt, script.head(index), through)))
    return start + _empty_thought(script, index, start, through[start:])


def _shared(*texts: str) -> str:
    """How they all begin. A space before a word is a part of it."""
    return common_start(*texts).rstrip(" ")


def _empty_thought(script: RenderedConversation, index: int, start: int, answer: str) -> int:
    """How many characters of an answer the template writes for one without thoughts, which nobody has to learn."""
    said = _said(script.messages[index])
    if said and answer.lstrip().startswith(said) and not _EMPTY_THOUGHT.match(said):
        return 0
    head = script.head(index)[start:]
    if answer.startswith(head) and _EMPTY_THOUGHT.fullmatch(head):
        return len(head)
    return 0


def _said(message: Message) -> str:
    return str(message.get("content", "")).strip()


def _is_whole(message: Message, text: str) -> bool:
    """Whether all that is thought and said is written, white space aside."""
    for part in (_said(message), message.get("reasoning_content")):
        if isinstance(part, str) and part not in text and _squeezed(part) not in _squeezed(text):
            return False
    return True


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _of_parts(text: str, parts: Sequence[_Part]) -> RenderedText:
    """Weights are only told where one is not 1."""
    weights = tuple(weight for _, weight in parts)
    return RenderedText(text, tuple(span for span, _ in parts), False, weights if {*weights} - {1.0} else ())


def _parts(script: RenderedConversation, content: Conversation) -> list[_Part]:
    """Everything but the messages that are taken out, each with its weight."""
    parts: list[_Part] = []
    start = 0
    out = {index: 0.0 for index, trained in content.marks.items() if not trained}
    for index, weight in sorted({**content.weights, **out}.items()):
        before, through = script.prefix(index), script.prefix(index + 1)
        stays = through.startswith(before) and script.whole.startswith(through)
        if not stays or not _is_in(through[len(before) :], _said(script.messages[index])):
            wish = f"has weight={weight:g}" if weight else "is taken out of training"
            raise RowProblem(
                f"message {index} {wish}, but where the chat template writes it cannot be told"
                " under dataset.train_on=all"
            )
        parts += [((start, len(before)), 1.0), ((len(before), len(through)), weight)]
        start = len(through)
    parts.append(((start, len(script.whole)), 1.0))
    return [((first, end), weight) for (first, end), weight in parts if end > first and weight]


def _unseen(script: RenderedConversation) -> int:
    """Messages of which the template writes nothing, and tools that it does not name."""
    whole = script.whole
    lost = sum(not _is_in(whole, _said(m)) for m in script.messages if m["role"] != "assistant")
    names = [tool["function"]["name"] for tool in script.tools or ()]
    return lost + (not all(name in whole for name in names))


def _is_in(whole: str, said: str) -> bool:
    """As it stands, or as JSON, which is how some templates show what a tool returned."""
    return (
        said in whole
        or json.dumps(said, ensure_ascii=False)[1:-1] in whole
        or json.dumps(said)[1:-1] in whole
    )
