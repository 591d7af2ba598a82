"""What one pass over a row says of its answers is what greedy generation would have written."""

import random
from typing import Any

import pytest

from app.data.collate import Layout, Packed, Padded
from app.data.loader import eval_batches
from app.data.token_dataset import TokenRows
from app.distributed.process_group import Runtime
from app.model.decoding import generate
from app.model.training_model import TrainingModel
from app.tasks.interface import ANSWERS, EXACT, LABELS, Sums
from app.tasks.table import counts_of
from app.training.scores import score_rows
from tests.model.small import VOCABULARY, training_model_of
from tests.training.conftest import small_run
from tests.training.rows import Row, stretches, token_rows

COUNTS = counts_of(small_run())
NEW = 7
ENDLESS = -1


def conversation(lm: Any, draw: random.Random) -> tuple[Row, int]:
    """A few turns, answered as the model itself answers, but for some that it is not to find; and its end token."""
    ids: list[int] = []
    trained: list[bool] = []
    end = draw.choice([ENDLESS, draw.randrange(3, VOCABULARY)])
    for _ in range(draw.choice([1, 1, 2, 3])):
        ids += [draw.randrange(3, VOCABULARY) for _ in range(draw.randint(1, 6))]
        trained += [False] * (len(ids) - len(trained))
        answer = generate(lm, [ids], [] if end == ENDLESS else [end], NEW)[0]
        if answer and draw.random() < 0.4:
            at = draw.randrange(len(answer))
            answer[at] = next(t for t in range(3, VOCABULARY) if t not in {answer[at], end})
        ids += answer if end == ENDLESS else [*answer, end]
        trained += [True] * (len(ids) - len(trained))
    return (ids, trained), end


def would_be_written(lm: Any, rows: TokenRows, ends: list[list[int]]) -> list[list[bool]]:
    """Of each row, whether each answer is what the real generation gives after the true conversation before it."""
    by_row = []
    for i, of_row in enumerate(ends):
        ids = rows.ids(i).tolist()
        is_exact = []
        for at in stretches(rows.loss_mask(i)):
            expected = ids[at]
            written = generate(lm, [ids[: at.start]], of_row, len(expected))[0]
            is_exact.append(written == (expected[:-1] if expected[-1] in of_row else expected))
        by_row.append(is_exact)
    return by_row


def layouts_of(longest: int) -> list[Layout]:
    return [
        *(Padded(size, pad_id=0) for size in (1, 5)),
        *(Packed(longest * n, pad_id=0, max_length=longest) for n in (1, 3)),
    ]


def sums_of(model: TrainingModel, rows: TokenRows, layout: Layout, runtime: Runtime) -> Sums:
    return score_rows(model, eval_batches(rows, layout), runtime, len(rows), COUNTS)


@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt2", "gemma2", "gpt_oss"])
def test_exact_match_equals_greedy_answers(kind: str, runtime: Runtime) -> None:
    model = training_model_of(kind)
    draw = random.Random(1)
    conversations = [conversation(model.language_model, draw) for _ in range(10)]
    rows = token_rows([row for row, _ in conversations])
    assert {end == ENDLESS for _, end in conversations} == {True, False}
    expected = would_be_written(
        model.language_model, rows, [[] if end == ENDLESS else [end] for _, end in conversations]
    )
    assert len({len(row) for row in expected}) > 1
    assert {right for row in expected for right in row} == {True, False}
    for layout in layouts_of(int(rows.lengths.max())):
        sums = sums_of(model, rows, layout, runtime)
        assert sums[:, ANSWERS].tolist() == [len(row) for row in expected]
        assert sums[:, EXACT].tolist() == [sum(row) for row in expected]
        assert sums[:, LABELS].tolist() == [int(rows.loss_mask(i).sum()) for i in range(len(rows))]
