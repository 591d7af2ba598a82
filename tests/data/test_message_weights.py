"""What a message says it counts is what its tokens count, from the row to the batch; and nothing where none says so."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.data.prepare import Data, prepare
from app.data.token_dataset import TokenRows
from tests.data.small import THINKING, chat, config, tokenizer, write_jsonl

LONG = ["What is the capital of France?", "Paris.", "Write one line about rain.", "Rain falls on the roof."]


def weighed(*pairs: tuple[str, float | None]) -> list[dict[str, Any]]:
    """Messages of user and assistant in turn, each with its weight or none."""
    messages: list[dict[str, Any]] = [*chat(*(text for text, _ in pairs))]
    for message, (_, weight) in zip(messages, pairs, strict=True):
        message.update({} if weight is None else {"weight": weight})
    return messages


def prepared(folder: Path, rows: Sequence[Any], made: Any = None, name: str = "chat", **changes: Any) -> Data:
    path = write_jsonl(folder / f"{name}.jsonl", [{"messages": row} for row in rows])
    return prepare(config(path, **changes), made or tokenizer("chatml"), str(folder / "cache"))


def weighted_texts(made: Any, rows: TokenRows, i: int) -> list[tuple[str, float]]:
    """Each stretch of tokens of one weight, and its text; what is not trained is left out."""
    weights = rows.weights(i)
    weights = rows.loss_mask(i).astype(np.float32) if weights is None else weights
    assert ((weights > 0) == rows.loss_mask(i)).all()
    edges = [0, *(np.flatnonzero(np.diff(weights)) + 1).tolist(), len(weights)]
    parts = [(made.decode(rows.ids(i)[a:b]), float(weights[a])) for a, b in pairwise(edges)]
    return [(text, pytest.approx(weight, rel=1e-7)) for text, weight in parts if weight]  # type: ignore[misc]


TALK = weighed((LONG[0], None), (LONG[1], 0.3), (LONG[2], None), (LONG[3], 2.5))


def test_message_weights_reach_tokens(tmp_path: Path) -> None:
    made = tokenizer("chatml")
    data = prepared(tmp_path, [TALK, chat(*LONG), [*TALK[:3], {**TALK[3], "weight": 0}]], made)
    assert weighted_texts(made, data.train, 0) == [
        ("Paris.<|im_end|>", 0.3),
        ("Rain falls on the roof.<|im_end|>", 2.5),
    ]
    assert data.train.weights(1) is None
    assert weighted_texts(made, data.train, 2) == [("Paris.<|im_end|>", 0.3)]
    counts = data.report.train
    first, second = (int((data.train.weights(0) == np.float32(w)).sum()) for w in (0.3, 2.5))  # type: ignore[union-attr]
    whole = int(data.train.loss_mask(1).sum())
    assert whole == first + second
    assert counts.trained_tokens == 2 * whole + first
    assert counts.label_weight == pytest.approx(0.3 * 2 * first + 2.5 * second + whole, rel=1e-6)
    assert counts.weighted_samples == 2
    [line] = [line for line in data.report.lines() if "weight" in line]
    count = f"trained tokens count as {counts.label_weight:,.1f}"
    assert line.startswith(f"train: 2 samples with message weights other than 1: {count}, ")


def test_message_weights_under_train_on_all(tmp_path: Path) -> None:
    made = tokenizer("chatml")
    talk = weighed((LONG[0], 0.5), (LONG[1], None), (LONG[2], 0), (LONG[3], 3))
    rows = prepared(tmp_path, [talk], made, train_on="all").train
    opened = "<|im_start|>"  # the very first token is never trained
    assert weighted_texts(made, rows, 0) == [
        (f"user\n{LONG[0]}<|im_end|>\n", 0.5),
        (f"{opened}assistant\nParis.<|im_end|>\n", 1.0),
        (f"{opened}assistant\n{LONG[3]}<|im_end|>\n", 3.0),
    ]


def test_message_weights_survive_unstable_template(tmp_path: Path) -> None:
    made = tokenizer("thinking")
    assert made.chat_template == THINKING
    said = ("a", "<think>x</think>b", "c", "<think>y</think>d", "e", "f")
    talk = weighed(*zip(said, (None, 0.25, None, 4, None, 1), strict=True))
    data = prepared(tmp_path, [talk], made)
    assert data.report.train.expanded_into == 3
    assert [weighted_texts(made, data.train, i) for i in range(3)] == [
        [("<think>x</think>b<|im_end|>", 0.25)],
        [("<think>y</think>d<|im_end|>", 4.0)],
        [("f<|im_end|>", 1.0)],
    ]
    assert [data.train.weights(i) is None for i in range(3)] == [False, False, True]


def test_message_weights_survive_truncation(tmp_path: Path) -> None:
    made = tokenizer("chatml")
    rows = prepared(tmp_path, [TALK], made).train
    ids, weights = rows.ids(0), rows.weights(0)
    assert weights is not None
    first, last = (np.flatnonzero(weights == np.float32(w)) for w in (0.3, 2.5))
    cut = int(last[1])
    shorter = prepared(tmp_path, [TALK], made, max_length=cut, on_overflow="truncate").train
    assert shorter.ids(0).tolist() == ids[:cut].tolist()
    assert shorter.weights(0).tolist() == weights[:cut].tolist()  # type: ignore[union-attr]
    back = [TALK[0], {**TALK[1], "weight": 1}, *TALK[2:]]  # now the other weight is all behind the cut
    plain = prepared(tmp_path, [back], made, max_length=int(first[-1]) + 1, on_overflow="truncate").train
    assert plain.weights(0) is None
    unweighted = prepared(tmp_path, [chat(*LONG)], made, max_length=int(first[-1]) + 1, on_overflow="truncate").train
    assert plain.content_hashes.tolist() == unweighted.content_hashes.tolist()


def test_message_weights_of_chosen_rows_are_theirs(tmp_path: Path) -> None:
    rows = prepared(tmp_path, [TALK, chat(*LONG)]).train
    chosen = TokenRows.concat([rows, rows]).select([3, 2, 0])
    weights = [None if found is None else found.tolist() for found in map(chosen.weights, range(3))]
    assert weights[0] is None
    assert weights[1] == weights[2] == list(rows.weights(0))  # type: ignore[arg-type]
    assert chosen.num_weighted == 2
    assert chosen.label_weight == pytest.approx(2 * sum(weights[1] or ()) + rows.loss_mask(1).sum())


def test_message_weights_distinguish_duplicates(tmp_path: Path) -> None:
    other = [TALK[0], {**TALK[1], "weight": 0.4}, *TALK[2:]]
    data = prepared(tmp_path, [TALK, other, TALK, chat(*LONG)], deduplicate=True)
    assert data.report.train.duplicates == 1
    assert len(data.train) == 3
    assert len(set(data.train.content_hashes.tolist())) == 3
    assert len(set(data.train.ids_hashes.tolist())) == 1
