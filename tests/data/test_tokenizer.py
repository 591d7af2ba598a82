"""Tokens, and the mask that follows from characters."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, normalizers, pre_tokenizers

from app.data.rows import RenderedText
from app.data.tokenizer import Encoder
from app.errors import ConfigError
from tests.data.small import LINES, tokenizer

TEXT = "\n".join(LINES)


def document(text: str, start: int = 0) -> RenderedText:
    return RenderedText(text, ((start, len(text)),), raw=True)


def by_offsets(made: Any, text: RenderedText) -> list[bool]:
    """The rule as it is written: a token is trained if it lies wholly in a span."""
    offsets = made(text.text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    return [any(a <= start and end <= b for a, b in text.spans) for start, end in offsets]


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("marked", [False, True])
def test_encode_document_begins_and_ends_once(adds_bos: bool, marked: bool) -> None:
    made = tokenizer(None, adds_bos=adds_bos)
    inner = made("two and two", add_special_tokens=False)["input_ids"]
    text = "two and two"
    if marked:
        text = ("<s>" if adds_bos else "") + text + "</s>"
    [sample] = Encoder(made).encode([document(text)])
    bos = [made.bos_token_id] if adds_bos else []
    assert sample.ids.tolist() == [*bos, *inner, made.eos_token_id]
    assert sample.loss_mask.tolist() == [False] + [True] * (len(sample.ids) - 1)


def test_encode_completion_and_end_trained() -> None:
    made = tokenizer(None, adds_bos=True)
    [sample] = Encoder(made).encode([document("two and two make four", start=11)])
    assert made.decode(sample.ids[sample.loss_mask]) == " make four</s>"
    assert not sample.glued


def test_encode_token_across_edge_untrained() -> None:
    made = tokenizer(None)
    [sample] = Encoder(made).encode([document("two and two make four", start=12)])  # " make" is one token
    assert made.decode(sample.ids[sample.loss_mask]) == " four</s>"
    assert sample.glued
    [ending] = Encoder(made).encode([RenderedText("two make four", ((3, 9),), raw=False)])
    assert made.decode(ending.ids[ending.loss_mask]) == " make"
    assert ending.glued


def test_encode_endless_answer_flagged() -> None:
    encoder = Encoder(tokenizer("chatml"))
    texts = [RenderedText("two and<|im_end|>", ((3, end),), raw=False) for end in (7, 17)]
    assert [sample.endless for sample in encoder.encode(texts)] == [True, False]


def test_encode_ignores_truncation_and_padding() -> None:
    made = tokenizer(None)
    made.backend_tokenizer.enable_truncation(4)
    made.backend_tokenizer.enable_padding(length=4000)
    plain = tokenizer(None)(TEXT, add_special_tokens=False)["input_ids"]
    [sample] = Encoder(made).encode([document(TEXT)])
    assert sample.ids.tolist() == [*plain, made.eos_token_id]


def test_encode_other_than_backend_refused() -> None:
    made = tokenizer(None)

    class Lowering(type(made)):  # type: ignore[misc]
        def __call__(self, text: str, **how: Any) -> Any:
            return super().__call__(text.lower(), **how)

    made.__class__ = Lowering
    with pytest.raises(ConfigError, match="changing text before the fast backend is not supported"):
        Encoder(made).encode([document("TWO")])


def test_encode_chat_far_beyond_max_length_counts_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.data.tokenizer.PIECE_CHARS", 100)
    monkeypatch.setattr("app.data.tokenizer.MAX_TOKEN_CHARS", 20)
    made = tokenizer()
    text = "\n".join([TEXT] * 9)
    chat = RenderedText(text, ((0, 10), (90, 150), (1000, 1100)), raw=False, weights=(1.0, 0.5, 2.0))
    whole, blank = made(text, add_special_tokens=False)["input_ids"], " \n" * 500
    [exact] = Encoder(made).encode([chat])
    [cut, same] = Encoder(made, max_length=10).encode([chat, replace(chat, text="two", spans=((0, 3),), weights=())])
    assert len(cut.ids) < len(whole) // 3
    assert len(whole) <= len(cut.ids) + cut.more <= len(whole) + 40  # a token more where pieces have no line break
    assert (cut.ids[:20].tolist(), exact.ids.tolist()) == (whole[:20], whole)
    assert cut.loss_mask[:20].tolist() == exact.loss_mask[:20].tolist()
    assert cut.weights is not None
    assert (made.decode(same.ids), same.more, exact.more) == ("two", 0, 0)
    [sparse] = Encoder(made, max_length=900).encode([RenderedText(blank, ((0, 9),), raw=False)])
    assert (sparse.ids.tolist(), sparse.more) == (made(blank, add_special_tokens=False)["input_ids"], 0)


@pytest.mark.parametrize("size", [400, 40])
def test_encode_long_document_in_pieces(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr("app.data.tokenizer.PIECE_CHARS", size)
    made = tokenizer(None)
    text = "\n\n".join([TEXT] * 9)
    assert len(text) > 3 * 400
    [long, short] = Encoder(made).encode([document(text), document("two")])
    assert made.decode(long.ids) == text + "</s>"
    assert long.loss_mask.tolist() == [False] + [True] * (len(long.ids) - 1)
    assert made.decode(short.ids) == "two</s>"
    if size == 400:  # each piece has a line break to end at, and then the tokens are those of the whole
        whole = made(text, add_special_tokens=False)["input_ids"]
        assert long.ids.tolist() == [*whole, made.eos_token_id]


def test_encode_long_completion_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.data.tokenizer.PIECE_CHARS", 10)
    made = tokenizer(None)
    [sample] = Encoder(made).encode([document(TEXT, start=len(TEXT) - 8)])
    assert made.decode(sample.ids[sample.loss_mask]) == TEXT[-8:] + "</s>"


def other_tokenizer(kind: str) -> Any:
    """Tokenizers whose tokens and characters fit less neatly."""
    made = tokenizer(None)
    backend = made.backend_tokenizer
    if kind == "metaspace":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        backend.decoder = decoders.Metaspace()
    elif kind == "normalized":
        backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase(), normalizers.Strip()])
    elif kind == "trimmed":
        from tokenizers import processors

        backend.post_processor = processors.ByteLevel(trim_offsets=True)
    return made


@given(data=st.data(), kind=st.sampled_from(["bytes", "metaspace", "normalized", "trimmed"]))
def test_encode_loss_mask_follows_characters(data: st.DataObject, kind: str) -> None:
    made = other_tokenizer(kind)
    alphabet = st.sampled_from([*"ab  \n\n", "two", " make", "é", "ﬁ", "日本", "<|im_end|>", "🙂"])
    text = data.draw(st.lists(alphabet, max_size=30).map("".join))
    places = st.lists(st.integers(0, len(text)), max_size=6, unique=True)
    edges = sorted(data.draw(places))
    spans = tuple(zip(edges[::2], edges[1::2], strict=False))
    [sample] = Encoder(made).encode([RenderedText(text, spans, raw=False)])
    expected = by_offsets(made, RenderedText(text, spans, raw=False))
    assert sample.loss_mask.tolist() == [False, *expected[1:]][: len(expected)]
