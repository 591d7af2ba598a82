"""What is shown of training rows is what is trained."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from app.config.schema import TaskConfig
from app.data.objectives import NEXT_TOKEN
from app.data.prepare import Data
from app.data.token_dataset import TokenRows
from app.tasks import causal
from app.tasks.masked import MaskedTokens
from app.tasks.table import build_objective
from app.training.samples import preview, sampler
from tests.training.conftest import Notebook, small_run, trainee_of
from tests.training.rows import token_rows


def rows_of(*rows: tuple[list[int], list[int]]) -> TokenRows:
    """Each as ids and the flags of what is trained."""
    return token_rows([(ids, [bool(flag) for flag in flags]) for ids, flags in rows])


class Letters:
    """A tokenizer that drops a space at the beginning, as some do."""

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(code) for code in ids).removeprefix(" ")


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def test_preview_of_shipped_rows_has_their_labels(data: Data, tokenizer: Any) -> None:
    shown = preview(
        data.train, build_objective(TaskConfig(kind="causal"), tokenizer, 0, bidirectional=False), tokenizer
    )
    places = [data.train.source_location(i) for i in range(len(data.train))]
    assert [row["place"] for row in shown["rows"]] == [places[i] for i in (0, 21, 42, 63)]
    for row in shown["rows"]:
        i = places.index(row["place"])
        assert "".join(piece["text"] for piece in row["pieces"]) == tokenizer.decode(data.train.ids(i))
        trained = "".join(piece["text"] for piece in row["pieces"] if piece["trained"])
        assert trained == tokenizer.decode(data.train.ids(i)[data.train.loss_mask(i)])
        assert (row["tokens"], row["trained_tokens"]) == (len(data.train.ids(i)), data.train.loss_mask(i).sum())
    assert sum(shown["lengths"]["samples"]) == len(data.train)


def test_preview_keeps_spaces_between_pieces() -> None:
    rows = rows_of((letters("ask me now"), [0] * 3 + [1] * 3 + [0] * 4))
    (row,) = preview(rows, NEXT_TOKEN, Letters())["rows"]
    assert [(piece["text"], piece["trained"]) for piece in row["pieces"]] == [
        ("ask", False),
        (" me", True),
        (" now", False),
    ]


def test_preview_shortens_long_rows() -> None:
    rows = rows_of((letters("a" * 500 + "b" * 3), [0] * 500 + [1] * 3), (letters("cd" * 300), [0, 1] * 300))
    long, striped = preview(rows, NEXT_TOKEN, Letters())["rows"]
    assert [piece["text"] for piece in long["pieces"]] == [f"{'a' * 80} … (340 tokens) … {'a' * 80}", "bbb"]
    assert len(striped["pieces"]) == 201
    assert striped["pieces"][-1] == {"text": " … (400 more tokens)", "trained": False}


class Bytes:
    """A tokenizer of bytes: a character is several tokens."""

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")


@pytest.mark.parametrize("before", ["", "a", "ab"])
def test_preview_cuts_between_characters(before: str) -> None:
    ids = list(f"{before}{'据' * 100}".encode())
    (row,) = preview(rows_of((ids, [0] * len(ids))), NEXT_TOKEN, Bytes())["rows"]
    text = row["pieces"][0]["text"]
    assert "\N{REPLACEMENT CHARACTER}" not in text
    head, left_out, tail = text.split(" … ")
    assert int(left_out[1:].split()[0]) == len(ids) - len(f"{head}{tail}".encode())


def test_preview_masks_tokens_of_the_first_epoch() -> None:
    rows = rows_of((letters("abcdefghij"), [0] * 10))
    labels = MaskedTokens(0.3, ord("_"), np.array([0]), np.array(letters("xyz"), np.int32), seed=1)
    shown = preview(rows, labels, Letters())
    marked = "".join(piece["text"] for piece in shown["rows"][0]["pieces"] if piece["trained"])
    assert sorted(marked) == sorted(chr(code) for code in labels.label(rows, 0, epoch=0)[0].targets)
    assert len(marked) == 3
    assert "masked" in shown["marked"]


@pytest.mark.parametrize("lengths", [[2], [1, 32, 33], [5, 64, 1000], [3] * 7])
def test_preview_histogram_counts_lengths(lengths: list[int]) -> None:
    rows = rows_of(*((letters("a" * n), [0] * n) for n in lengths))
    counted = preview(rows, NEXT_TOKEN, Letters())["lengths"]
    edges, samples = counted["edges"], counted["samples"]
    assert len(samples) <= 32
    assert samples == [sum(start <= n < end for n in lengths) for start, end in pairwise(edges)]
    assert sum(samples) == len(lengths)


def test_answers_that_do_not_fit_into_memory_are_left_out(
    data: Data, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def generate(*_: Any, **_named: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(causal, "generate", generate)
    run, notebook = small_run("recipe=lora"), Notebook()
    model = trainee_of(run).train()
    rows = SimpleNamespace(data=data, objective=NEXT_TOKEN, tokenizer=tokenizer)
    plan: Any = SimpleNamespace(run=run, rows=rows)
    sampler(plan, model, notebook)(3)
    (message,) = notebook.messages
    assert "step 3: out of memory" in message
    assert model.training
