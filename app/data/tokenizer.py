"""Text to token IDs and loss mask, with a fast tokenizer of transformers."""

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding

from app.config.kinds import CHAT_FORMATS, LABELED_FORMATS, TAGGED_FORMATS, TOKEN_FORMATS
from app.data.rows import RenderedText, Span, TokenIds
from app.errors import ConfigError

Ids = NDArray[np.int32]
Mask = NDArray[np.bool_]
Weights = NDArray[np.float32]
Tokenizer = Any  # a fast tokenizer of transformers

PIECE_CHARS = 1 << 18  # of a long document, per tokenizer call
MAX_TOKEN_CHARS = 64  # on average: a longer text is overlong before it is tokenized
_PIECES_AT_ONCE = 8  # a token takes several hundred bytes before it is a number
_PROBE = " Two  words,\nÉ "  # text that a wrapper may strip, lowercase or normalize
_LONE_LINE_BREAK = re.compile(r"(?<=\S)\n(?=\S)")  # byte-level tokenizers have no tokens across it


def check_tokenizer(tokenizer: Tokenizer, fmt: str) -> None:
    """Raise ConfigError if the tokenizer does not support the format `fmt`."""
    if fmt in CHAT_FORMATS and tokenizer.chat_template is None:
        raise ConfigError(
            f"model.chat_template: the tokenizer has none, and dataset.format={fmt} needs one;"
            " set model.chat_template=FILE or the name of a built-in template"
        )
    has_end = tokenizer.eos_token_id is not None or tokenizer.sep_token_id is not None
    if fmt not in (*CHAT_FORMATS, *LABELED_FORMATS, *TAGGED_FORMATS, *TOKEN_FORMATS) and not has_end:
        raise ConfigError(f"model.tokenizer: no end-of-text token, which dataset.format={fmt} needs")


def separates_pairs(tokenizer: Tokenizer) -> bool:
    """Return whether the tokenizer adds a special token between the texts of a pair."""
    (encoding,) = tokenizer.backend_tokenizer.encode_batch([("a", "b")], add_special_tokens=True)
    owners = encoding.sequence_ids
    return None in owners[owners.index(0) : owners.index(1)]


@dataclass(frozen=True, slots=True)
class Tokens:
    """One tokenized sample."""

    ids: Ids
    loss_mask: Mask  # tokens in the loss, or the first tokens of tagged words
    glued: bool = False  # a token crosses the start or end of the trained text, so it is not trained
    endless: bool = False  # the trained text has no end token: the model will not learn to stop
    weights: Weights | None = None  # loss weights, 0 outside the mask; None: 1 inside the mask
    label: str | None = None  # of an example: the predicted class instead of tokens; of an answer: its label
    text_ids: NDArray[np.int8] | None = None  # of an example: text index of each token, -1 for special tokens
    second_start: int = -1  # of a pair, for models with token types: first token of the second text
    more: int = 0  # further tokens, only counted, because the text is much longer than the limit


class Encoder:
    """Encoder for one tokenizer. Chats have special tokens from the template, documents get them here."""

    def __init__(self, tokenizer: Tokenizer, max_length: int = sys.maxsize) -> None:
        self._tokenizer = tokenizer
        self._max_length = max_length
        # The first call also turns off truncation and padding of tokenizer.json.
        whole = tokenizer(_PROBE, add_special_tokens=False, verbose=False)["input_ids"]
        if list(whole) != self._encodings([_PROBE])[0].ids:
            raise ConfigError("model.tokenizer: changing text before the fast backend is not supported")
        inside = _as_ids(tokenizer("a", add_special_tokens=False, verbose=False)["input_ids"])
        framed = _as_ids(tokenizer("a", add_special_tokens=True, verbose=False)["input_ids"])
        starts = range(len(framed) - len(inside) + 1)
        matches = (at for at in starts if np.array_equal(framed[at : at + len(inside)], inside))
        start = next(matches, 0)  # 0 if special tokens also changed the other tokens
        self._opening, after = framed[:start], framed[start + len(inside) :]
        # the tokenizer of an encoder has no end-of-text token, but a closing token
        self._closing = after if tokenizer.eos_token_id is None else _as_ids([tokenizer.eos_token_id])
        self._special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}

    def encode(self, texts: Sequence[RenderedText]) -> list[Tokens]:
        """Tokenize in one batch, to use all tokenizer threads. The first token is never trained."""
        if texts and texts[0].is_example:  # then all are, because they have one format
            return list(self._encode_examples(texts))
        if texts and texts[0].ready is not None:
            return [self._as_tokens(text.ready) for text in texts if text.ready is not None]
        max_chars = max(PIECE_CHARS, MAX_TOKEN_CHARS * self._max_length)
        heads = [text if _is_long(text) else _head(text, max_chars) for text in texts]
        encodings = iter(self._encodings([head.text for head in heads if not _is_long(head)]))
        encoded = (
            self._encode_long(text) if _is_long(head) else self._encode_head(head, next(encodings), text)
            for text, head in zip(texts, heads, strict=True)
        )
        return [
            tokens if text.label is None else replace(tokens, label=text.label)
            for text, tokens in zip(texts, encoded, strict=True)
        ]

    def _encode_head(self, head: RenderedText, encoding: Encoding, text: RenderedText) -> Tokens:
        """Return the tokens of the head of a text, usually all of it; only count tokens after an overlong head."""
        tokens = self._encode_one(head, encoding)
        if head is text:
            return tokens
        if len(tokens.ids) <= self._max_length:
            return self._encode_one(text, *self._encodings([text.text]))
        more = sum(len(ids) for ids in self._ids_of_pieces(text.text[len(head.text) :]))
        return replace(tokens, endless=False, more=more)

    def _encode_examples(self, texts: Sequence[RenderedText]) -> Iterator[Tokens]:
        """Encode with the special tokens of the tokenizer, as at inference."""
        tokenizer, first = self._tokenizer, texts[0]
        inputs = [text.text if text.second is None else (text.text, text.second) for text in texts]
        encodings = tokenizer.backend_tokenizer.encode_batch(inputs, add_special_tokens=True)
        has_types = first.second is not None and "token_type_ids" in tokenizer.model_input_names
        for text, encoding in zip(texts, encodings, strict=True):
            text_ids = np.array([-1 if at is None else at for at in encoding.sequence_ids], np.int8)
            second_start = _second_start(encoding.type_ids) if has_types else -1
            ids, mask = _as_ids(encoding.ids), np.zeros(len(text_ids), np.bool_)
            mask[[*_first_tokens(encoding, text.words)]] = True
            yield Tokens(ids, mask, label=text.label, text_ids=text_ids, second_start=second_start)

    def _as_tokens(self, ready: TokenIds) -> Tokens:
        """Return the IDs of a row unchanged. With labels, an answer without an end token is counted."""
        mask = ready.loss_mask.copy()
        mask[0] = False
        last = ready.ids[mask][-1:]
        endless = ready.has_labels and any(int(token) not in self._special for token in last)
        return Tokens(_as_ids(ready.ids), mask, endless=endless)

    def _encodings(self, texts: list[str]) -> list[Encoding]:
        """Return the encodings of the backend: the wrapper would double the time."""
        encodings: list[Encoding] = self._tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
        return encodings

    def _encode_one(self, text: RenderedText, encoding: Encoding) -> Tokens:
        ids = _as_ids(encoding.ids)
        mask = np.zeros(len(ids), np.bool_)
        glued = False
        weights = np.zeros(len(ids), np.float32) if text.weights else None
        for at, span in enumerate(text.spans):
            first, stop, cut = _tokens_inside(encoding, len(ids), len(text.text), span)
            mask[first:stop] = True
            glued = glued or cut
            if weights is not None:
                weights[first:stop] = text.weights[at]
        if text.raw:
            return self._as_document(ids, mask, glued)
        mask[:1] = False
        if weights is not None:
            weights[:1] = 0.0
        last = np.flatnonzero(mask)[-1:]
        endless = any(int(token) not in self._special for token in ids[last])
        return Tokens(ids, mask, glued, endless, weights)

    def _encode_long(self, text: RenderedText) -> Tokens:
        """Tokenize a document in pieces, so that memory is bounded; all of it is trained."""
        joined = np.concatenate([np.zeros(0, np.int32), *self._ids_of_pieces(text.text)])
        return self._as_document(joined, np.ones(len(joined), np.bool_), glued=False)

    def _ids_of_pieces(self, text: str) -> Iterator[Ids]:
        pieces = _pieces(text)
        while group := list(islice(pieces, _PIECES_AT_ONCE)):
            yield from [_as_ids(encoding.ids) for encoding in self._encodings(group)]

    def _as_document(self, ids: Ids, mask: Mask, glued: bool) -> Tokens:
        """Add start and end tokens unless the text has them."""
        opening, closing = self._opening, self._closing
        if np.array_equal(ids[: len(opening)], opening):
            opening = opening[:0]
        if np.array_equal(ids[len(ids) - len(closing) :], closing):
            closing = closing[:0]
        ids = np.concatenate([opening, ids, closing])
        mask = np.concatenate([np.zeros(len(opening), np.bool_), mask, np.ones(len(closing), np.bool_)])
        mask[:1] = False
        return Tokens(ids, mask, glued)


def _second_start(types: Sequence[int]) -> int:
    """Return the index of the first token of the second text, which extends to the end."""
    at = types.index(1) if 1 in types else len(types)
    if list(types) != [0] * at + [1] * (len(types) - at):
        raise ConfigError("model.tokenizer: token type ids of a pair other than 0 and 1 are not supported")
    return at


def _as_ids(values: Sequence[int] | NDArray[np.integer[Any]]) -> Ids:
    return np.asarray(values, np.int32)


def _is_long(text: RenderedText) -> bool:
    """Return whether to tokenize in pieces; only for plain text, because other loss masks need characters."""
    return text.raw and len(text.text) > PIECE_CHARS and text.spans == ((0, len(text.text)),)


def _head(text: RenderedText, max_chars: int) -> RenderedText:
    """Return the first characters with their spans."""
    if len(text.text) <= max_chars:
        return text
    spans = tuple((first, min(end, max_chars)) for first, end in text.spans if first < max_chars)
    return replace(text, text=text.text[:max_chars], spans=spans, weights=text.weights[: len(spans)])


def _pieces(text: str) -> Iterator[str]:
    at = 0
    while len(text) - at > PIECE_CHARS:
        end = at + PIECE_CHARS
        breaks = _LONE_LINE_BREAK.finditer(text, at + PIECE_CHARS // 2, end)
        cut = max((line_break.end() for line_break in breaks), default=end)
        yield text[at:cut]
        at = cut
    yield text[at:]


def _tokens_inside(encoding: Encoding, num_tokens: int, num_chars: int, span: Span) -> tuple[int, int, bool]:
    """Return start and end of the tokens inside the span, and whether a token crosses its start or end."""
    first = _first_from(encoding, num_tokens, num_chars, span[0])
    stop = _first_from(encoding, num_tokens, num_chars, span[1])
    across = first > 0 and _chars(encoding, first - 1)[1] > span[0]
    while stop > first and _chars(encoding, stop - 1)[1] > span[1]:
        stop, across = stop - 1, True
    # tokens at the end without their own character
    while stop < num_tokens and _chars(encoding, stop)[1] <= span[1]:
        stop += 1
    return first, max(first, stop), across


def _first_tokens(encoding: Encoding, words: Sequence[Span]) -> Iterator[int]:
    """Yield the first token of each word, which may include the preceding space; words without tokens are skipped."""
    for word in words:
        tokens = (encoding.char_to_token(at) for at in range(*word))
        yield from islice((token for token in tokens if token is not None), 1)


def _first_from(encoding: Encoding, num_tokens: int, num_chars: int, char: int) -> int:
    """Return the first token that starts at or after a character."""
    tokens = (encoding.char_to_token(at) for at in range(char, num_chars))  # some characters have no token
    token = next((index for index in tokens if index is not None), num_tokens)
    while token < num_tokens and _chars(encoding, token)[0] < char:
        token += 1
    while token > 0 and _chars(encoding, token - 1)[0] >= char:  # tokens without their own characters
        token -= 1
    return token


def _chars(encoding: Encoding, token: int) -> Span:
    return encoding.token_to_chars(token) or (0, 0)
