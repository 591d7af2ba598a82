"""What this folder asks of a tokenizer of transformers."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from app.config.dataset import CHAT_FORMATS, LABELLED_FORMATS
from app.data.types import Message, RenderedText, Span
from app.errors import ConfigError


class Encoding(Protocol):
    """One tokenised text of the fast backend."""

    @property
    def ids(self) -> list[int]:
        """Token ids."""

    @property
    def type_ids(self) -> list[int]:
        """Of each token the side of a pair, as models count them."""

    @property
    def sequence_ids(self) -> list[int | None]:
        """Of each token the text that it is of; None for what frames them."""

    def char_to_token(self, char_pos: int) -> int | None:
        """The token that holds a character, if one does."""

    def token_to_chars(self, token_index: int) -> tuple[int, int] | None:
        """The characters that a token holds."""


class Backend(Protocol):
    """The Rust tokenizer inside."""

    def encode_batch(
        self, input: Sequence[str | tuple[str, str]], *, add_special_tokens: bool
    ) -> list[Encoding]:
        """Many texts at once, on all threads."""

    def to_str(self) -> str:
        """Everything that decides its tokens, as JSON."""


class Tokenizer(Protocol):
    """The part of `PreTrainedTokenizerFast` that is used here."""

    is_fast: bool
    eos_token_id: int | None
    sep_token_id: int | None
    mask_token_id: int | None
    pad_token_id: int | None
    chat_template: str | dict[str, str] | None
    all_special_ids: list[int]
    model_input_names: list[str]

    @property
    def backend_tokenizer(self) -> Backend:
        """The Rust tokenizer inside."""

    @property
    def special_tokens_map(self) -> Mapping[str, Any]:
        """Which token plays which part."""

    def __call__(
        self, text: str, text_pair: str | None = None, *, add_special_tokens: bool, verbose: bool
    ) -> Mapping[str, Any]:
        """Tokens of one text, or of a pair."""

    def get_vocab(self) -> dict[str, int]:
        """Every token and its id."""

    def get_added_vocab(self) -> dict[str, int]:
        """Tokens that were added to the trained vocabulary."""

    def apply_chat_template(
        self,
        conversation: list[list[Message]],
        *,
        tools: list[dict[str, Any]] | None,
        tokenize: bool,
        add_generation_prompt: bool,
    ) -> list[str]:
        """Each conversation as text."""


def check_tokenizer(tokenizer: Tokenizer, fmt: str) -> None:
    """ConfigError if it cannot serve rows of the format `fmt`."""
    if not tokenizer.is_fast:
        raise ConfigError(
            "model.tokenizer: only tokenizers of the fast kind (tokenizer.json) are supported: the others"
            " cannot tell which characters a token stands for"
        )
    if fmt in CHAT_FORMATS:
        if tokenizer.chat_template is None:
            raise ConfigError(
                f"model.chat_template: the tokenizer has none, and dataset.format={fmt} needs one;"
                " set model.chat_template=FILE or one of the names that ship"
            )
    elif fmt not in LABELLED_FORMATS and tokenizer.eos_token_id is None and tokenizer.sep_token_id is None:
        raise ConfigError(f"model.tokenizer: it has no end-of-text token, and dataset.format={fmt} needs one")


def parts_pairs(tokenizer: Tokenizer) -> bool:
    """Whether something of the tokenizer's own stands between the texts of a pair."""
    (encoding,) = tokenizer.backend_tokenizer.encode_batch([("a", "b")], add_special_tokens=True)
    owners = encoding.sequence_ids
    return None in owners[owners.index(0) : owners.index(1)]


Ids = NDArray[np.int32]
Mask = NDArray[np.bool_]
Weights = NDArray[np.float32]
Parts = NDArray[np.int8]

_PIECE_CHARS = 1 << 18  # of a long document that are one text to the tokenizer
_PIECES = 8  # of them tokenised at once: a token takes some hundred bytes until it is a number
_CUT = re.compile(r"(?<=\S)\n(?=\S)")  # a lone line break: byte-level tokenizers join nothing across it


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids, and which of them the model must predict."""

    ids: Ids
    trained: Mask
    glued: bool = False  # a token reaches over the edge of what is trained, and so is not trained
    endless: bool = False  # what is trained ends in an ordinary token: the model will not learn to stop
    weights: Weights | None = (
        None  # how much each token counts, 0 where it is not trained; None: trained ones count 1
    )
    label: str | None = None  # of an example: the class to be predicted, in place of tokens
    owner: Parts | None = None  # of an example: which text each token is of, -1 for what frames them
    second: int = -1  # of a pair, for models that tell its sides apart: the first token of the second side


class Encoder:
    """One tokenizer. The special tokens of a chat come from its template, those of a document from here."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # The first call also switches off whatever truncation and padding tokenizer.json asks for.
        inside = _as_ids(tokenizer("a", add_special_tokens=False, verbose=False)["input_ids"])
        framed = _as_ids(tokenizer("a", add_special_tokens=True, verbose=False)["input_ids"])
        start = _find(framed, inside)
        self._opening, after = framed[:start], framed[start + len(inside) :]
        # an encoder's tokenizer has no end of its own, but closes what it frames
        self._closing = after if tokenizer.eos_token_id is None else _as_ids([tokenizer.eos_token_id])
        self._special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}

    def encode(self, drafts: Sequence[RenderedText]) -> list[Tokens]:
        """One sample for each draft. Its first token is never trained: nothing comes before it."""
        if drafts and drafts[0].label is not None:  # then all are: a format has them or has not
            return list(self._examples(drafts))
        short = [draft.text for draft in drafts if not _is_long(draft)]
        encodings = iter(self._encodings(short))
        return [
            self._long(draft) if _is_long(draft) else self._short(draft, next(encodings)) for draft in drafts
        ]

    def _examples(self, drafts: Sequence[RenderedText]) -> Iterator[Tokens]:
        """As the tokenizer frames them by itself, which is how they will be asked about."""
        tokenizer, first = self._tokenizer, drafts[0]
        texts = [d.text if d.second is None else (d.text, d.second) for d in drafts]
        encodings = tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=True)
        _require_same(
            encodings[0], tokenizer(first.text, first.second, add_special_tokens=True, verbose=False)
        )
        has_sides = first.second is not None and "token_type_ids" in tokenizer.model_input_names
        for draft, encoding in zip(drafts, encodings, strict=True):
            owner = np.array([-1 if at is None else at for at in encoding.sequence_ids], np.int8)
            second = _second_side(encoding.type_ids) if has_sides else -1
            nothing = np.zeros(len(owner), np.bool_)
            yield Tokens(_as_ids(encoding.ids), nothing, label=draft.label, owner=owner, second=second)

    def _encodings(self, texts: list[str]) -> list[Encoding]:
        """Straight from the backend: the wrapper around it takes as long again."""
        if not texts:
            return []
        encodings = self._tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
        _require_same(encodings[0], self._tokenizer(texts[0], add_special_tokens=False, verbose=False))
        return encodings

    def _short(self, draft: RenderedText, encoding: Encoding) -> Tokens:
        ids = _as_ids(encoding.ids)
        trained = np.zeros(len(ids), np.bool_)
        glued = False
        weights = np.zeros(len(ids), np.float32) if draft.weights else None
        for at, span in enumerate(draft.spans):
            first, stop, cut = _inside(encoding, len(ids), len(draft.text), span)
            trained[first:stop] = True
            glued = glued or cut
            if weights is not None:
                weights[first:stop] = draft.weights[at]
        if draft.raw:
            return self._raw(ids, trained, glued)
        return self._chat(ids, trained, glued, weights)

    def _long(self, draft: RenderedText) -> Tokens:
        """In pieces, so that memory does not grow with the document; all of it is trained."""
        texts, ids = _pieces(draft.text), [np.zeros(0, np.int32)]
        while group := list(islice(texts, _PIECES)):
            ids += (_as_ids(encoding.ids) for encoding in self._encodings(group))
        joined = np.concatenate(ids)
        return self._raw(joined, np.ones(len(joined), np.bool_), glued=False)

    def _chat(self, ids: Ids, trained: Mask, glued: bool, weights: Weights | None) -> Tokens:
        trained[:1] = False
        if weights is not None:
            weights[:1] = 0.0
        last = np.flatnonzero(trained)[-1:]
        endless = any(int(token) not in self._special for token in ids[last])
        return Tokens(ids, trained, glued, endless, weights)

    def _raw(self, ids: Ids, trained: Mask, glued: bool) -> Tokens:
        """A document with exactly one beginning and one end, whatever its text already has."""
        opening, closing = self._opening, self._closing
        if np.array_equal(ids[: len(opening)], opening):
            opening = opening[:0]
        if np.array_equal(ids[len(ids) - len(closing) :], closing):
            closing = closing[:0]
        ids = np.concatenate([opening, ids, closing])
        trained = np.concatenate([np.zeros(len(opening), np.bool_), trained, np.ones(len(closing), np.bool_)])
        trained[:1] = False
        return Tokens(ids, trained, glued)


def _require_same(encoding: Encoding, told: Mapping[str, Any]) -> None:
    if encoding.ids != list(told["input_ids"]):
        raise ConfigError("model.tokenizer: it changes text before its fast backend sees it; not supported")


def _second_side(types: Sequence[int]) -> int:
    """Where the second side begins, which goes to the end."""
    at = types.index(1) if 1 in types else len(types)
    if list(types) != [0] * at + [1] * (len(types) - at):
        raise ConfigError(
            "model.tokenizer: it marks the sides of a pair otherwise than by 0 and 1; not supported"
        )
    return at


def _as_ids(values: Sequence[int]) -> Ids:
    return np.asarray(values, np.int32)


def _find(framed: Ids, inside: Ids) -> int:
    """Where `inside` begins in `framed`; 0 if special tokens changed the rest too."""
    width = len(inside)
    starts = range(len(framed) - width + 1)
    return next((at for at in starts if np.array_equal(framed[at : at + width], inside)), 0)


def _is_long(draft: RenderedText) -> bool:
    """Only plain text comes in files of any size; where characters decide what is trained, it stays whole."""
    return draft.raw and len(draft.text) > _PIECE_CHARS and draft.spans == ((0, len(draft.text)),)


def _pieces(text: str) -> Iterator[str]:
    """A long text in pieces that are tokenised one by one, so that memory does not grow with it."""
    at = 0
    while len(text) - at > _PIECE_CHARS:
        end = at + _PIECE_CHARS
        cut = max((found.end() for found in _CUT.finditer(text, at + _PIECE_CHARS // 2, end)), default=end)
        yield text[at:cut]
        at = cut
    yield text[at:]


def _inside(encoding: Encoding, num_tokens: int, num_chars: int, span: Span) -> tuple[int, int, bool]:
    """First and end of the tokens that lie wholly in the span, and whether one lies across an edge."""
    first = _first_from(encoding, num_tokens, num_chars, span[0])
    stop = _first_from(encoding, num_tokens, num_chars, span[1])
    across = first > 0 and _chars(encoding, first - 1)[1] > span[0]
    while stop > first and _chars(encoding, stop - 1)[1] > span[1]:
        stop, across = stop - 1, True
    while (
        stop < num_tokens and _chars(encoding, stop)[1] <= span[1]
    ):  # without a character of its own, at the end
        stop += 1
    return first, max(first, stop), across


def _first_from(encoding: Encoding, num_tokens: int, num_chars: int, char: int) -> int:
    """The first token that begins at or after a character."""
    holders = (encoding.char_to_token(at) for at in range(char, num_chars))
    token = next((held for held in holders if held is not None), num_tokens)  # some characters have no token
    while token < num_tokens and _chars(encoding, token)[0] < char:
        token += 1
    while token > 0 and _chars(encoding, token - 1)[0] >= char:  # tokens without characters of their own
        token -= 1
    return token


def _chars(encoding: Encoding, token: int) -> Span:
    return encoding.token_to_chars(token) or (0, 0)
