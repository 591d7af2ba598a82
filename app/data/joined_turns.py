"""One text with all trained turns of a conversation whose earlier turns the chat template rewrites.

Each turn keeps what its own rendering writes: the text after the turn before it. So the trained text of each turn is
that of a sample of its own. Only the history differs, by the text that the template drops from the opening of an
answer once it is no longer the last one (an empty thought, say).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from app.data.chat_template import RenderedConversation, common_start
from app.data.types import Span

Turn = tuple[str, Span]  # the conversation up to and with a turn, and its trained span


@dataclass(frozen=True, slots=True)
class JoinedTurns:
    """The text, the trained span of each turn, and the first text that later renderings leave out."""

    text: str
    spans: list[Span]
    dropped: str


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
