"""Text generation and classification by a loaded model: single prompts, batches, streaming."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from app.chat_rendering import ConversationRefused, render_chat
from app.config.problems import PROBLEMS
from app.errors import ConfigError, PromptTooLong
from app.layers.head import takes_segments
from app.model.decoding import end_ids, new_ids
from app.tasks.classification import CLASS_PROBLEMS

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TextGenerator:
    """A causal model with its tokenizer and settings; `chat`: prompts go through the chat template."""

    lm: Any
    tokenizer: Any
    chat: bool
    max_new: int
    sampling: dict[str, Any]
    note: Callable[[str], object] = field(default=lambda _text: None)  # of an answer that the positions cut

    @property
    def positions(self) -> int | None:
        """Tokens that the model reads at most, prompt and answer together; None where its config does not say."""
        number = getattr(self.lm.config.get_text_config(), "max_position_embeddings", None)
        return number if isinstance(number, int) else None

    def ids(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a prompt, rendered as in training."""
        try:
            text = (
                render_chat(self.tokenizer, messages, ask=True)
                if self.chat
                else "\n\n".join(message["content"] for message in messages)
            )
        except ConversationRefused as refusal:
            raise ConfigError(f"the chat template refuses this conversation: {refusal}") from refusal
        ids: list[int] = self.tokenizer(text, add_special_tokens=not self.chat).input_ids
        if not ids:
            cause = "the chat template writes nothing. Set chat=false" if self.chat else "it is empty. Give a text"
            raise ConfigError(f"prompt: {cause}.")
        return ids

    def answers(self, conversations: Sequence[Sequence[Message]], batch: int) -> Iterator[tuple[int, str]]:
        """Answers with the indices of their conversations; prompts of similar length share a batch."""
        prompts = [self.ids(messages) for messages in conversations]
        self._require_positions(prompts)
        order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
        for start in range(0, len(order), batch):
            chosen = order[start : start + batch]
            # an answer that the positions cut would be cut earlier beside a longer prompt
            is_cut = self._max_new(len(prompts[chosen[0]])) < self.max_new
            for group in [[i] for i in chosen] if is_cut else [chosen]:
                answers = self._generated([prompts[i] for i in group])
                yield from zip(group, map(self._text, answers), strict=True)

    def stream(self, messages: Sequence[Message], write: Callable[[str], None]) -> str:
        ids = self.ids(messages)
        self._require_positions([ids])
        pieces = _Streamer(self.tokenizer, write, skip=len(ids))
        new = self._generated([ids], streamer=pieces)[0]
        pieces.end()
        return self._text(new)

    def _generated(self, prompts: Sequence[Sequence[int]], streamer: Any = None) -> list[list[int]]:
        width = max(map(len, prompts))
        max_new, ends = self._max_new(width), end_ids(self.lm, self.tokenizer)
        answers = new_ids(self.lm, prompts, ends, max_new, streamer=streamer, **self.sampling)
        if max_new < self.max_new and any(len(answer) == max_new for answer in answers):
            self.note(
                f"an answer ends after {_tokens(max_new)}: the model reads {self.positions:,} at most, and the prompt "
                f"has {width:,}"
            )
        return answers

    def _require_positions(self, prompts: Sequence[Sequence[int]]) -> None:
        """Refuse prompts that leave no position for an answer, all at once."""
        problems = [
            f"{'prompt' if len(prompts) == 1 else f'prompts: number {number}'}: {_tokens(len(prompt))}, and the model "
            f"reads {self.positions:,} at most, the answer included. Shorten it, or choose a model that reads more."
            for number, prompt in enumerate(prompts, 1)
            if self._max_new(len(prompt)) < 1
        ]
        if problems:
            raise PromptTooLong(problems)

    def _max_new(self, prompt_tokens: int) -> int:
        return self.max_new if self.positions is None else min(self.max_new, self.positions - prompt_tokens)

    def _text(self, ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text.strip()


def _tokens(number: int) -> str:
    return f"{number:,} token{'' if number == 1 else 's'}"


class _Streamer:
    """transformers' streamer interface; writes a piece of text when it can no longer change."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None], skip: int) -> None:
        self._tokenizer = tokenizer
        self._write = write
        self._skip = skip
        self._ids: list[int] = []
        self._written = 0

    def put(self, tokens: torch.Tensor) -> None:
        """Receive the prompt first, then token by token."""
        new = tokens.flatten().tolist()
        skipped = min(self._skip, len(new))
        self._skip -= skipped
        self._ids += new[skipped:]
        self._flush(final=False)

    def end(self) -> None:
        self._flush(final=True)

    def _flush(self, *, final: bool) -> None:
        text: str = self._tokenizer.decode(self._ids, skip_special_tokens=True).lstrip()
        if not final and text.endswith("\N{REPLACEMENT CHARACTER}"):  # the first half of a character
            return
        self._write(text[self._written :])
        self._written = max(self._written, len(text))


@dataclass(frozen=True, slots=True)
class Classifier:
    """A classification model with its tokenizer; longer texts are cut to `max_length` tokens."""

    lm: Any
    tokenizer: Any
    max_length: int
    problem: str = "single"

    def answers(self, texts: Sequence[Sequence[str]]) -> Iterator[tuple[dict[str, float], bool]]:
        """The probability of every label, likeliest first, or the numbers, and whether the text or pair was cut; one at
        a time, so that no padding changes them.
        """
        for each in texts:
            cut = len(self.tokenizer(*each, verbose=False).input_ids) > self.max_length
            yield self._values(each), cut

    @torch.no_grad()
    def _values(self, texts: Sequence[str]) -> dict[str, float]:
        read = self.tokenizer(*texts, truncation=True, max_length=self.max_length, return_tensors="pt")
        wanted = ["input_ids", *(["token_type_ids"] if len(texts) > 1 and takes_segments(self.lm) else [])]
        given = {name: read[name].to(self.lm.device) for name in wanted if name in read}
        values = CLASS_PROBLEMS[self.problem].values(self.lm(**given).logits[0].float()).tolist()
        found = {self.lm.config.id2label[at]: value for at, value in enumerate(values)}
        return dict(sorted(found.items(), key=lambda each: -each[1])) if PROBLEMS[self.problem].named else found
