"""Rows to text, and which characters of it are trained, for any chat template.

The template is only ever asked to write prefixes of a conversation: what it adds for an assistant turn, beyond what
asks for that turn, is what the model must learn.
"""

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import repeat

from app.data.chat_template import (
    THOUGHT_END,
    THOUGHT_KEYS,
    RenderedConversation,
    Skeleton,
    TemplateNames,
    common_start,
    placeholders,
    render_conversation,
    thought_of,
    with_merged_answers,
    without_thought,
)
from app.data.rows import (
    AnswerPair,
    Content,
    Conversation,
    Document,
    Example,
    Judged,
    Message,
    RenderedText,
    RowProblem,
    Span,
)
from app.data.tokenizer import Tokenizer
from app.errors import ConfigError

Turn = tuple[str, Span]  # the conversation up to and with a turn, and its trained span
_Pattern = tuple[tuple[str, ...], tuple[int, ...]]  # roles, and which messages are trained
_MAX_PATTERNS = 4096
_NOTHING = r"(?!)"  # a pattern that matches nothing
# An empty thought, as templates write it for a model that is not to think; the prompt may have opened it already.
_EMPTY_THOUGHT = re.compile(r"\s*([<\[]\|?\w+\|?[>\]])?\s*[<\[]\|?/\w+\|?[>\]]\s*")


@dataclass(frozen=True, slots=True)
class JoinedTurns:
    """One text with all trained turns of a conversation whose earlier turns the chat template rewrites.

    Each turn keeps what its own rendering writes: the text after the turn before it. So the trained text of each turn
    is that of a sample of its own. Only the history differs, by the text that the template drops from the opening of
    an answer once it is no longer the last one (an empty thought, say).
    """

    text: str
    spans: list[Span]  # of each turn
    dropped: str  # the first text that later renderings leave out


@dataclass(frozen=True, slots=True)
class RenderedRow:
    """The samples of one row, and counts for the data report."""

    samples: list[RenderedText]
    unstable: bool = False  # the template rewrites earlier turns
    expanded_chars: int = 0  # of an unstable row: characters of a sample for each trained turn
    joined: JoinedTurns | None = None  # of an unstable row, where its turns can be joined
    reasoning: bool = False  # of an unstable row: a turn before the last trained one has reasoning
    unseen: int = 0  # messages, and lists of tools, of which the template writes nothing
    shortened: int = 0  # trained answers of which the template leaves out a part
    empty: tuple[str, ...] = ()  # columns or roles without text
    marked: int = 0  # messages with the text of a special token
    merged: bool = False  # consecutive answers were joined, because the template cannot keep them apart


class Renderer:
    """Applies one chat template under one `dataset.train_on` and `dataset.thinking`.

    `on_unstable` is the policy for conversations with earlier turns that the template rewrites: `expand` makes a sample
    of each trained turn, `join` one of all (or as `expand`, where they cannot be joined), `last` one of the last.
    """

    def __init__(self, tokenizer: Tokenizer, train_on: str, on_unstable: str, thinking: str = "train") -> None:
        self._tokenizer = tokenizer
        self._eos = str(tokenizer.special_tokens_map.get("eos_token", ""))
        named = [[tokens] if isinstance(tokens, str) else tokens for tokens in tokenizer.special_tokens_map.values()]
        special = [re.escape(str(token)) for tokens in named for token in tokens if str(token).strip()]
        self._special = re.compile("|".join(special) or _NOTHING)
        self._added = re.compile("|".join(map(re.escape, filter(str.strip, tokenizer.get_added_vocab()))) or _NOTHING)
        self._train_on = train_on
        self._on_unstable = on_unstable
        self._thinking = thinking
        self._skeletons: dict[_Pattern, Skeleton | None] = {}
        self.names = TemplateNames(tokenizer)

    def render(self, content: Content) -> RenderedRow:
        """The texts of a row with their loss masks; of a comparison both answers, the wanted one first."""
        if isinstance(content, AnswerPair):
            return self._both(self.render(content.chosen), self.render(content.rejected))
        if isinstance(content, Judged):
            return _labeled(self.render(content.answer), str(content.wanted).lower())
        if isinstance(content, Document):
            assert self._train_on in ("auto", "completion", "all"), self._train_on
            start = 0 if self._train_on == "all" else content.completion_start
            return RenderedRow([RenderedText(content.text, ((start, len(content.text)),), raw=True)])
        if isinstance(content, Example):
            text = RenderedText(content.text, (), raw=True, label=content.label, second=content.second)
            return RenderedRow([replace(text, words=content.words)])
        marked = sum(self._special.search(message["content"]) is not None for message in content.messages)
        known = ("auto", "assistant", "last", "all", *(["completion"] if content.completion_start else []))
        assert self._train_on in known, self._train_on
        if self._thinking == "drop":
            content = replace(content, messages=[without_thought(message) for message in content.messages])
        content = self.names.adapt(content)
        row = None
        try:
            row = self._conversation(content)
        except RowProblem:
            if merged := with_merged_answers(content):
                with suppress(RowProblem):
                    row = replace(self._conversation(merged), merged=True)
            if row is None:
                raise
        return replace(row, marked=marked)

    def _conversation(self, content: Conversation) -> RenderedRow:
        rendered = render_conversation(content, self._tokenizer, self.names)
        return self._from_skeleton(rendered, content) or self._from_prefixes(rendered, content)

    def _both(self, chosen: RenderedRow, rejected: RenderedRow) -> RenderedRow:
        sides = (chosen, rejected)
        _require_whole(*sides)
        return RenderedRow(
            [*chosen.samples, *rejected.samples],
            unseen=max(side.unseen for side in sides),
            shortened=sum(side.shortened for side in sides),
            marked=max(side.marked for side in sides),
        )

    def _from_skeleton(self, rendered: RenderedConversation, content: Conversation) -> RenderedRow | None:
        """Find spans without rendering prefixes; None where the skeleton does not give the text of this row.

        Equal text is not enough: where an answer is blank, or begins with what asks for it, only prefixes tell. So
        blank messages have no skeleton, nor has a pattern where an answer is not all that follows its prompt.
        """
        if self._train_on == "all" or content.tools is not None or content.options:
            return None
        if any(m.keys() != {"role", "content"} or not m["content"].strip() for m in rendered.messages):
            return None
        if self._thinking == "mask" and any(thought_of(message) for message in rendered.messages):
            return None
        whole = rendered.whole
        pattern = tuple(message["role"] for message in rendered.messages), tuple(self._trained(content))
        if pattern not in self._skeletons:
            if len(self._skeletons) >= _MAX_PATTERNS:
                return None
            self._skeletons[pattern] = self._skeleton(*pattern)
        skeleton = self._skeletons[pattern]
        text, spans = skeleton.fill(rendered.messages) if skeleton else ("", [])
        if text != whole:
            return None
        return RenderedRow([_with_spans(text, spans, [content.weights.get(index, 1.0) for index in pattern[1]])])

    def _skeleton(self, roles: Sequence[str], trained: Sequence[int]) -> Skeleton | None:
        rendered = RenderedConversation(self._tokenizer, placeholders(roles))
        try:
            spans = [self._turn(rendered, index)[1] for index in trained]
            if _unseen(rendered) or not all(map(_only_adds, repeat(rendered), trained, spans)):
                return None
        except (RowProblem, ConfigError):  # a template may refuse the placeholders, or fail at them
            return None
        return Skeleton.from_text(rendered.whole, spans)

    def _from_prefixes(self, rendered: RenderedConversation, content: Conversation) -> RenderedRow:
        whole, unseen = rendered.whole, _unseen(rendered)
        if self._train_on == "all":
            return RenderedRow([_with_spans(whole, *_all_but_untrained(rendered, content))], unseen=unseen)
        indices = self._trained(content)
        turns = [self._turn(rendered, index) for index in indices]
        weights = [content.weights.get(index, 1.0) for index in indices]
        cut = sum(not _is_whole(rendered.messages[at], text) for at, (text, _) in zip(indices, turns, strict=True))
        if all(whole.startswith(text[:end]) for text, (_, end) in turns):  # what follows a turn does not matter
            return RenderedRow([_with_spans(whole, [span for _, span in turns], weights)], unseen=unseen, shortened=cut)
        row = RenderedRow([], unstable=True, unseen=unseen, shortened=cut)
        return self._unstable(row, rendered, indices, turns, weights)

    def _unstable(
        self,
        row: RenderedRow,
        rendered: RenderedConversation,
        indices: Sequence[int],
        turns: Sequence[Turn],
        weights: Sequence[float],
    ) -> RenderedRow:
        """The row with its samples under the policy for templates that rewrite earlier turns."""
        thinking = [index for index in range(indices[-1]) if thought_of(rendered.messages[index]).strip()]
        if thinking and self._on_unstable == "join" and len(turns) > 1:
            raise RowProblem(
                f"message {thinking[0]} has reasoning, which the chat template drops from earlier turns and"
                " dataset.on_unstable_template=join would keep. Set dataset.on_unstable_template=expand, or"
                " dataset.thinking=drop to train without reasoning"
            )
        joined = None if thinking else join_turns(rendered, indices, turns, self._added)
        if self._on_unstable == "join" and joined:
            samples = [_with_spans(joined.text, joined.spans, weights)]
        else:
            kept = slice(-1, None) if self._on_unstable == "last" else slice(None)
            each = zip(turns[kept], weights[kept], strict=True)
            samples = [_with_spans(text, [span], [weight]) for (text, span), weight in each]
        expanded = sum(len(text) for text, _ in turns)
        return replace(row, samples=samples, expanded_chars=expanded, joined=joined, reasoning=bool(thinking))

    def _trained(self, content: Conversation) -> list[int]:
        """The indices of the messages that are trained."""
        first = content.completion_start if self._train_on in ("auto", "completion") else 0
        roles = [message["role"] for message in content.messages]
        wishes = {index: "train=true" for index, trained in content.trained.items() if trained}
        wishes |= {index: f"weight={weight:g}" for index, weight in content.weights.items()}
        for index, wish in wishes.items():
            if roles[index] != "assistant" or index < first:
                where = f"has the role {roles[index]}" if index >= first else "is in the prompt"
                what = "the completion" if first else "assistant messages"
                raise RowProblem(
                    f"message {index} {where} and has {wish}, but dataset.train_on={self._train_on} trains only {what}"
                )
        answers = [index for index, role in enumerate(roles) if role == "assistant" and index >= first]
        if not answers:
            where = " in the completion" if first else ""
            raise RowProblem(
                f"no assistant message{where}, so there is nothing to train on (dataset.train_on={self._train_on});"
                " prompts without answers (RL data) are not supported"
            )
        wanted = answers[-1:] if self._train_on == "last" else answers
        kept = [index for index in wanted if content.trained.get(index, True)]
        if not kept:
            raise RowProblem(
                f"no assistant message to train on with dataset.train_on={self._train_on}: train=false or"
                f" weight=0 excludes message {', '.join(map(str, wanted))}"
            )
        return kept

    def _turn(self, rendered: RenderedConversation, index: int) -> Turn:
        through = rendered.prefix(index + 1)
        start = _start(rendered, index, through)
        if start is None:
            raise RowProblem(
                f"the chat template changes the text before message {index} when that message is added, so the"
                " answer cannot be located in the rendered text"
            )
        text = self._without_final_eos(rendered, index, through)
        if self._thinking == "mask":
            start += _written_thought(rendered.messages[index], text[start:])
        return text, (start, max(start, len(text.rstrip())))  # white space after the end is no answer

    def _without_final_eos(self, rendered: RenderedConversation, index: int, through: str) -> str:
        """Drop the token that closes a whole conversation, where the turn has an end of its own and is not the last."""
        if rendered.whole.startswith(through):
            return through
        shorter = through.rstrip().removesuffix(self._eos).rstrip()
        has_end = not shorter.endswith(_text_of(rendered.messages[index]))
        return shorter if has_end and rendered.whole.startswith(shorter) else through


def _require_whole(*answers: RenderedRow) -> None:
    if any(len(each.samples) > 1 or (each.unstable and len(each.samples[0].spans) > 1) for each in answers):
        raise RowProblem(
            "the chat template rewrites earlier turns of an answer, which preference data does not support"
        )
    if any(sample.weights for each in answers for sample in each.samples):
        raise RowProblem("preference data supports only message weights of 0 and 1")


def _labeled(answer: RenderedRow, label: str) -> RenderedRow:
    _require_whole(answer)
    return replace(answer, samples=[replace(each, label=label) for each in answer.samples])


def _only_adds(rendered: RenderedConversation, index: int, span: Span) -> bool:
    """Whether an answer is all that follows its prompt, without an empty thought, and stays in later prefixes."""
    through, prompt = rendered.prefix(index + 1), rendered.prefix(index, ask=True)
    if index == 0 or not through.startswith(prompt) or not rendered.whole.startswith(through):
        return False
    thought = _EMPTY_THOUGHT.fullmatch(rendered.answer_head(index)[len(prompt) :])
    return span[0] == len(prompt) and thought is None and _is_whole(rendered.messages[index], through)


def _start(rendered: RenderedConversation, index: int, through: str) -> int | None:
    """First character of the answer in `through`; None if `through` does not begin with the messages before it."""
    if index == 0:  # there is no prompt
        return len(_shared_start(rendered.answer_head(0), through))
    prompt = rendered.prefix(index, ask=True)
    start = len(prompt)
    if not through.startswith(prompt):
        before = rendered.prefix(index)  # the template asks with more than it writes before an answer
        if not through.startswith(before):
            return None
        start = max(len(before), len(_shared_start(prompt, rendered.answer_head(index), through)))
    return start + _empty_thought(rendered, index, start, through[start:])


def _shared_start(*texts: str) -> str:
    """How all texts begin; a space before a word belongs to the word."""
    return common_start(*texts).rstrip(" ")


def _empty_thought(rendered: RenderedConversation, index: int, start: int, answer: str) -> int:
    """Count the characters of an empty thought that the template itself writes; they are not trained."""
    text = _text_of(rendered.messages[index])
    if text and answer.lstrip().startswith(text) and not _EMPTY_THOUGHT.match(text):
        return 0
    head = rendered.answer_head(index)[start:]
    return len(head) if answer.startswith(head) and _EMPTY_THOUGHT.fullmatch(head) else 0


def _written_thought(message: Message, answer: str) -> int:
    """Count the characters of an answer through the end of its thought, and what closes it where that is known."""
    thought = thought_of(message).strip()
    start = answer.find(thought) if thought else -1
    if start < 0:
        return 0
    end = start + len(thought)
    closed = THOUGHT_END.match(answer, end)
    return closed.end() if closed else end


def _text_of(message: Message) -> str:
    return str(message.get("content", "")).strip()


def _is_whole(message: Message, text: str) -> bool:
    """Whether `text` has all of a message's thought and content, white space aside."""
    for part in (_text_of(message), *(message.get(key) for key in THOUGHT_KEYS)):
        if isinstance(part, str) and part not in text and "".join(part.split()) not in "".join(text.split()):
            return False
    return True


def _with_spans(text: str, spans: Sequence[Span], weights: Sequence[float]) -> RenderedText:
    """Weights are only given where one is not 1."""
    return RenderedText(text, tuple(spans), False, tuple(weights) if {*weights} - {1.0} else ())


def _all_but_untrained(rendered: RenderedConversation, content: Conversation) -> tuple[list[Span], list[float]]:
    """Spans of everything but the messages that are taken out, and their weights."""
    spans: list[tuple[Span, float]] = []
    start = 0
    untrained = {index: 0.0 for index, trained in content.trained.items() if not trained}
    for index, weight in sorted({**content.weights, **untrained}.items()):
        before, through = rendered.prefix(index), rendered.prefix(index + 1)
        is_stable = through.startswith(before) and rendered.whole.startswith(through)
        if not is_stable or not _is_in(through[len(before) :], _text_of(rendered.messages[index])):
            wish = f"has weight={weight:g}" if weight else "is excluded from training"
            raise RowProblem(
                f"message {index} {wish}, but it cannot be located in the rendered text, as dataset.train_on=all"
                " requires"
            )
        spans += [((start, len(before)), 1.0), ((len(before), len(through)), weight)]
        start = len(through)
    spans.append(((start, len(rendered.whole)), 1.0))
    kept = [(span, weight) for span, weight in spans if span[1] > span[0] and weight]
    return [span for span, _ in kept], [weight for _, weight in kept]


def _unseen(rendered: RenderedConversation) -> int:
    """Count the messages of which the template writes nothing, and 1 for tools that it does not name."""
    whole = rendered.whole
    others = [message for message in rendered.messages if message["role"] != "assistant"]
    names = [tool["function"]["name"] for tool in rendered.tools or ()]
    return sum(not _is_in(whole, _text_of(m)) for m in others) + (not all(name in whole for name in names))


def _is_in(whole: str, text: str) -> bool:
    """Whether `text` is written as it is, or as JSON, which is how some templates show what a tool returned."""
    return text in whole or json.dumps(text, ensure_ascii=False)[1:-1] in whole or json.dumps(text)[1:-1] in whole


@dataclass(slots=True)
class _Segment:
    """Text that a turn adds to the turns before it. `opening` and `answer` are the first characters of these."""

    text: str
    opening: int
    answer: int
    later: str = field(init=False)  # how the rendering of the last turn looked at has it

    def __post_init__(self) -> None:
        self.later = self.text

    def is_found(self, rendering: str, at: int) -> bool:
        """Whether a later rendering has it at this character, as it is or without one part of the opening."""
        if rendering.startswith(self.later, at):
            return True
        if not rendering.startswith(self.text[: self.opening], at):
            return False
        rest, window = self.text[self.answer :], (at + self.opening, at + len(self.text))
        start = rendering.find(rest, *window)
        if start < 0 or start != rendering.rfind(rest, *window):
            return False
        opening, written = self.text[self.opening : self.answer], rendering[window[0] : start]
        if not opening.endswith(written[len(common_start(opening, written)) :]):
            return False
        self.later = rendering[at:start] + rest
        return True

    @property
    def dropped(self) -> str:
        length = len(self.text) - len(self.later)
        start = min(len(common_start(self.text, self.later)), self.answer - length)
        return self.text[start : start + length]


def join_turns(
    rendered: RenderedConversation, indices: Sequence[int], turns: Sequence[Turn], token: re.Pattern[str]
) -> JoinedTurns | None:
    """Join the turns of the messages `indices`; None where a later rendering differs by more than dropped openings.

    `token` finds tokens at which the tokenizer always divides a text: one in each answer makes its tokens, and those
    after it, independent of what the template drops before it.
    """
    first = next((index for index in indices if index), 0)
    asked = rendered.prefix(first, ask=True).removeprefix(rendered.prefix(first))
    segments: list[_Segment] = []
    spans: list[Span] = []
    dropped, joined = "", 0
    for index, (text, (start, end)) in zip(indices, turns, strict=True):
        at = 0
        for segment in segments:
            if not segment.is_found(text, at):
                return None
            dropped = dropped or segment.dropped
            at += len(segment.later)
        prompt = rendered.prefix(index, ask=True)
        opening = len(prompt.removesuffix(asked))
        is_opened = text.startswith(prompt) and (not index or prompt.endswith(asked)) and at <= opening <= start
        if not is_opened or (index != indices[-1] and not token.search(text, start)):
            return None
        segments.append(_Segment(text[at:], opening - at, start - at))
        spans.append((joined + start - at, joined + end - at))
        joined += len(text) - at
    return JoinedTurns("".join(segment.text for segment in segments), spans, dropped)
