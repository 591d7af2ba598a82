"""Text and loss mask of rows, for any chat template.

The template only renders prefixes of a conversation: the text that an assistant turn adds after its generation prompt
is the trained text.
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
    LabeledAnswer,
    Message,
    RenderedText,
    RowProblem,
    Span,
    TokenIds,
)
from app.data.tokenizer import Tokenizer
from app.errors import ConfigError

Turn = tuple[str, Span]  # text of the conversation up to and including a turn, and its trained span
_Pattern = tuple[tuple[str, ...], tuple[int, ...]]  # roles, and which messages are trained
_MAX_PATTERNS = 4096
_NOTHING = r"(?!)"  # matches nothing
# Empty reasoning, which templates write to turn thinking off; its opening may be in the prompt.
_EMPTY_THOUGHT = re.compile(r"\s*([<\[]\|?\w+\|?[>\]])?\s*[<\[]\|?/\w+\|?[>\]]\s*")


@dataclass(frozen=True, slots=True)
class JoinedTurns:
    """One text with all trained turns of a conversation whose earlier turns the chat template rewrites.

    Each turn keeps the text of its own rendering after the previous turn. So its trained text equals that of a
    separate sample. Only the history differs, by the text that the template drops from the start of an answer that is
    no longer the last one (such as empty reasoning).
    """

    text: str
    spans: list[Span]  # of each turn
    dropped: str  # the first text that later renderings omit


@dataclass(frozen=True, slots=True)
class RenderedRow:
    """Samples of one row, and counts for the data report."""

    samples: list[RenderedText]
    unstable: bool = False  # the template rewrites earlier turns
    expanded_chars: int = 0  # of an unstable row: characters with one sample per trained turn
    joined: JoinedTurns | None = None  # of an unstable row whose turns can be joined
    reasoning: bool = False  # of an unstable row: a turn before the last trained one has reasoning
    unseen: int = 0  # messages and tool lists that the template omits
    shortened: int = 0  # trained answers of which the template omits a part
    empty: tuple[str, ...] = ()  # columns or roles without text
    marked: int = 0  # messages with the text of a special token
    merged: bool = False  # consecutive answers were joined, because the template does not support them


class Renderer:
    """Renderer of rows for one chat template, `dataset.train_on` and `dataset.thinking`.

    `on_unstable` is the policy for conversations with earlier turns that the template rewrites: `expand` makes one
    sample per trained turn, `join` one sample for all turns (or as `expand` if not possible), `last` one for the last.
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
        """Render the texts of a row with their loss masks; for a pair, chosen before rejected."""
        if isinstance(content, AnswerPair):
            return self._both(self.render(content.chosen), self.render(content.rejected))
        if isinstance(content, LabeledAnswer):
            return _labeled(self.render(content.answer), str(content.is_good).lower())
        if isinstance(content, Document):
            assert self._train_on in ("auto", "completion", "all"), self._train_on
            start = 0 if self._train_on == "all" else content.completion_start
            return RenderedRow([RenderedText(content.text, ((start, len(content.text)),), raw=True)])
        if isinstance(content, Example):
            text = RenderedText(content.text, (), raw=True, label=content.label, second=content.second)
            return RenderedRow([replace(text, words=content.words)])
        if isinstance(content, TokenIds):
            self._require_known_ids(content)
            return RenderedRow([RenderedText("", (), raw=True, ready=content)])
        marked = sum(self._special.search(message["content"]) is not None for message in content.messages)
        allowed = ("auto", "assistant", "last", "all", *(["completion"] if content.completion_start else []))
        assert self._train_on in allowed, self._train_on
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

    def _require_known_ids(self, content: TokenIds) -> None:
        """Raise RowProblem for an ID that the tokenizer lacks."""
        count = len(self._tokenizer)
        unknown = content.ids[(content.ids < 0) | (content.ids >= count)]
        if len(unknown):
            raise RowProblem(
                f"token ID {unknown[0]} is not in the tokenizer (0 to {count - 1}); use the model whose tokenizer made"
                " the rows"
            )

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
        """Locate spans without rendering prefixes; None if the skeleton does not give the text of this row.

        Equal text is not sufficient: blank answers, and answers that start like their prompt, need prefixes. So blank
        messages have no skeleton, nor do patterns where other text than the answer follows the prompt.
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
        except (RowProblem, ConfigError):  # a template may reject the placeholders or fail
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
        if all(whole.startswith(text[:end]) for text, (_, end) in turns):  # text after a turn does not matter
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
        """Return the row with the samples of the policy for templates that rewrite earlier turns."""
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
            chosen = slice(-1, None) if self._on_unstable == "last" else slice(None)
            pairs = zip(turns[chosen], weights[chosen], strict=True)
            samples = [_with_spans(text, [span], [weight]) for (text, span), weight in pairs]
        expanded = sum(len(text) for text, _ in turns)
        return replace(row, samples=samples, expanded_chars=expanded, joined=joined, reasoning=bool(thinking))

    def _trained(self, content: Conversation) -> list[int]:
        """Return the indices of the trained messages."""
        first = content.completion_start if self._train_on in ("auto", "completion") else 0
        roles = [message["role"] for message in content.messages]
        flags = {index: "train=true" for index, flag in content.trained.items() if flag}
        flags |= {index: f"weight={weight:g}" for index, weight in content.weights.items()}
        for index, flag in flags.items():
            if roles[index] != "assistant" or index < first:
                where = f"has the role {roles[index]}" if index >= first else "is in the prompt"
                what = "the completion" if first else "assistant messages"
                raise RowProblem(
                    f"message {index} {where} and has {flag}, but dataset.train_on={self._train_on} trains only {what}"
                )
        answers = [index for index, role in enumerate(roles) if role == "assistant" and index >= first]
        if not answers:
            where = " in the completion" if first else ""
            raise RowProblem(
                f"no assistant message{where}, so there is nothing to train on (dataset.train_on={self._train_on});"
                " prompts without answers (RL data) are not supported"
            )
        candidates = answers[-1:] if self._train_on == "last" else answers
        trained = [index for index in candidates if content.trained.get(index, True)]
        if not trained:
            raise RowProblem(
                f"no assistant message to train on with dataset.train_on={self._train_on}: train=false or"
                f" weight=0 excludes message {', '.join(map(str, candidates))}"
            )
        return trained

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
        return text, (start, max(start, len(text.rstrip())))  # trailing whitespace is not part of the answer

    def _without_final_eos(self, rendered: RenderedConversation, index: int, through: str) -> str:
        """Drop the end token of the whole conversation if the turn is not the last and has its own end."""
        if rendered.whole.startswith(through):
            return through
        shorter = through.rstrip().removesuffix(self._eos).rstrip()
        has_end = not shorter.endswith(_text_of(rendered.messages[index]))
        return shorter if has_end and rendered.whole.startswith(shorter) else through


def _require_whole(*answers: RenderedRow) -> None:
    if any(len(answer.samples) > 1 or (answer.unstable and len(answer.samples[0].spans) > 1) for answer in answers):
        raise RowProblem(
            "the chat template rewrites earlier turns of an answer, which preference data does not support"
        )
    if any(sample.weights for answer in answers for sample in answer.samples):
        raise RowProblem("preference data supports only message weights of 0 and 1")


def _labeled(answer: RenderedRow, label: str) -> RenderedRow:
    _require_whole(answer)
    return replace(answer, samples=[replace(sample, label=label) for sample in answer.samples])


def _only_adds(rendered: RenderedConversation, index: int, span: Span) -> bool:
    """Return whether only the answer follows its prompt, without empty reasoning, and later prefixes keep it."""
    through, prompt = rendered.prefix(index + 1), rendered.prefix(index, ask=True)
    if index == 0 or not through.startswith(prompt) or not rendered.whole.startswith(through):
        return False
    thought = _EMPTY_THOUGHT.fullmatch(rendered.answer_head(index)[len(prompt) :])
    return span[0] == len(prompt) and thought is None and _is_whole(rendered.messages[index], through)


def _start(rendered: RenderedConversation, index: int, through: str) -> int | None:
    """Return the start of the answer in `through`; None if `through` does not start with the previous messages."""
    if index == 0:  # there is no prompt
        return len(_shared_start(rendered.answer_head(0), through))
    prompt = rendered.prefix(index, ask=True)
    start = len(prompt)
    if not through.startswith(prompt):
        before = rendered.prefix(index)  # the generation prompt differs from the text before an answer
        if not through.startswith(before):
            return None
        start = max(len(before), len(_shared_start(prompt, rendered.answer_head(index), through)))
    return start + _empty_thought(rendered, index, start, through[start:])


def _shared_start(*texts: str) -> str:
    """Return the common prefix; a space before a word belongs to the word."""
    return common_start(*texts).rstrip(" ")


def _empty_thought(rendered: RenderedConversation, index: int, start: int, answer: str) -> int:
    """Return the length of empty reasoning that the template adds; it is not trained."""
    text = _text_of(rendered.messages[index])
    if text and answer.lstrip().startswith(text) and not _EMPTY_THOUGHT.match(text):
        return 0
    head = rendered.answer_head(index)[start:]
    return len(head) if answer.startswith(head) and _EMPTY_THOUGHT.fullmatch(head) else 0


def _written_thought(message: Message, answer: str) -> int:
    """Return the length of an answer up to the end of its reasoning, including a known closing marker."""
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
    """Return whether `text` has the full reasoning and content of a message, ignoring whitespace."""
    for part in (_text_of(message), *(message.get(key) for key in THOUGHT_KEYS)):
        if isinstance(part, str) and part not in text and "".join(part.split()) not in "".join(text.split()):
            return False
    return True


def _with_spans(text: str, spans: Sequence[Span], weights: Sequence[float]) -> RenderedText:
    """Return the text with its spans, and weights only if one is not 1."""
    return RenderedText(text, tuple(spans), False, tuple(weights) if {*weights} - {1.0} else ())


def _all_but_untrained(rendered: RenderedConversation, content: Conversation) -> tuple[list[Span], list[float]]:
    """Return the spans of everything but excluded messages, and their weights."""
    spans: list[tuple[Span, float]] = []
    start = 0
    untrained = {index: 0.0 for index, trained in content.trained.items() if not trained}
    for index, weight in sorted({**content.weights, **untrained}.items()):
        before, through = rendered.prefix(index), rendered.prefix(index + 1)
        is_stable = through.startswith(before) and rendered.whole.startswith(through)
        if not is_stable or not _is_in(through[len(before) :], _text_of(rendered.messages[index])):
            setting = f"has weight={weight:g}" if weight else "is excluded from training"
            raise RowProblem(
                f"message {index} {setting}, but it cannot be located in the rendered text, as dataset.train_on=all"
                " requires"
            )
        spans += [((start, len(before)), 1.0), ((len(before), len(through)), weight)]
        start = len(through)
    spans.append(((start, len(rendered.whole)), 1.0))
    trained = [(span, weight) for span, weight in spans if span[1] > span[0] and weight]
    return [span for span, _ in trained], [weight for _, weight in trained]


def _unseen(rendered: RenderedConversation) -> int:
    """Count messages that the template omits, plus 1 if it omits a tool."""
    whole = rendered.whole
    others = [message for message in rendered.messages if message["role"] != "assistant"]
    names = [tool["function"]["name"] for tool in rendered.tools or ()]
    return sum(not _is_in(whole, _text_of(m)) for m in others) + (not all(name in whole for name in names))


def _is_in(whole: str, text: str) -> bool:
    """Return whether `text` is rendered unchanged or as JSON, as some templates render tool results."""
    return text in whole or json.dumps(text, ensure_ascii=False)[1:-1] in whole or json.dumps(text)[1:-1] in whole


@dataclass(slots=True)
class _Segment:
    """Text that a turn adds to the previous turns. `opening` and `answer` are character offsets."""

    text: str
    opening: int
    answer: int
    later: str = field(init=False)  # its form in the last compared rendering

    def __post_init__(self) -> None:
        self.later = self.text

    def matches(self, rendering: str, at: int) -> bool:
        """Return whether a later rendering has the segment at `at`, unchanged or without a part of the opening."""
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
    """Join the turns of the messages `indices`; None if a later rendering differs by more than dropped openings.

    `token` matches tokens at which the tokenizer always splits a text: with one in each answer, its tokens and those
    after it do not depend on the dropped text.
    """
    first = next((index for index in indices if index), 0)
    asked = rendered.prefix(first, ask=True).removeprefix(rendered.prefix(first))
    segments: list[_Segment] = []
    spans: list[Span] = []
    dropped, joined = "", 0
    for index, (text, (start, end)) in zip(indices, turns, strict=True):
        at = 0
        for segment in segments:
            if not segment.matches(text, at):
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
