"""What one pass over a row says of its answers is what greedy generation would have written."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from app.data.collate import Layout, Packed, Padded
from app.data.loader import Loader, StepSplit, eval_batches
from app.data.prepare import Data
from app.data.token_dataset import TokenRows
from app.distributed.process_group import Runtime
from app.evaluation.compare import Comparison
from app.model.generate import end_ids, generate
from app.model.training_model import TrainingModel
from app.training.counts import ANSWERS, EXACT, LABELS, Sums
from app.training.scores import counts_of, score, score_rows
from tests.model.small import VOCABULARY, training_model_of
from tests.training.conftest import small_run, stepper_of
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
        ids += [draw.randrange(3, VOCABULARY) for _ in range(draw.randint(2, 6))]
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
    found = []
    for i, of_row in enumerate(ends):
        ids = rows.ids(i).tolist()
        told = []
        for at in stretches(rows.loss_mask(i)):
            expected = ids[at]
            written = generate(lm, [ids[: at.start]], of_row, len(expected))[0]
            told.append(written == (expected[:-1] if expected[-1] in of_row else expected))
        found.append(told)
    return found


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
    made = [conversation(model.language_model, draw) for _ in range(16)]
    rows = token_rows([row for row, _ in made])
    assert {end == ENDLESS for _, end in made} == {True, False}
    expected = would_be_written(model.language_model, rows, [[] if end == ENDLESS else [end] for _, end in made])
    assert len({len(told) for told in expected}) > 1
    assert {right for told in expected for right in told} == {True, False}
    for layout in layouts_of(int(rows.lengths.max())):
        found = sums_of(model, rows, layout, runtime)
        assert found[:, ANSWERS].tolist() == [len(told) for told in expected]
        assert found[:, EXACT].tolist() == [sum(told) for told in expected]
        assert found[:, LABELS].tolist() == [int(rows.loss_mask(i).sum()) for i in range(len(rows))]


@pytest.fixture(scope="module")
def learnt(data: Data) -> tuple[TrainingModel, Runtime]:
    """Taught so that it knows some answers and not others."""
    from app.distributed.process_group import start

    assert data.eval is not None
    run = small_run("recipe=full", "model.weights=random")
    runtime = start(run.launch, "fp32", seed=0)
    stepper = stepper_of(run, runtime)
    loader = Loader(data.eval, Padded(10, pad_id=0), StepSplit(1), seed=0)
    for step in range(28):
        stepper.run(loader.batches(step), 1e-2)
    return stepper.model, runtime


def test_exact_match_on_chats_equals_greedy_answers(
    data: Data, learnt: tuple[TrainingModel, Runtime], tokenizer: Any
) -> None:
    assert data.eval is not None
    rows, (model, runtime) = data.eval, learnt
    lm = model.language_model
    ends = end_ids(lm, tokenizer)
    expected = would_be_written(lm, rows, [ends] * len(rows))
    found = sums_of(model, rows, Padded(7, pad_id=0), runtime)
    assert found[:, EXACT].tolist() == [sum(told) for told in expected]
    share = sum(map(sum, expected)) / sum(map(len, expected))
    assert 0.1 < share < 0.9
    assert max(map(len, expected)) > 1
    whole = score(model, eval_batches(rows, Padded(7, pad_id=0)), runtime, COUNTS)
    assert whole["exact_match"] == share
    assert np.isnan(
        score(model, eval_batches(rows, Padded(7, pad_id=0)), runtime, replace(COUNTS, answers=False))["exact_match"]
    )


def test_metrics_do_not_depend_on_batches_or_row_order(data: Data, learnt: tuple[TrainingModel, Runtime]) -> None:
    assert data.eval is not None
    model, runtime = learnt
    shuffled = data.eval.select(np.random.default_rng(0).permutation(len(data.eval)))
    found = []
    for rows in (data.eval, shuffled):
        for layout in layouts_of(int(rows.lengths.max())):
            sums = sums_of(model, rows, layout, runtime)
            other = sums * [1.5, 1.0, 0.5, 1.0, 0.5, 1.0]
            found.append(Comparison.of({"tuned": sums, "base": other}, rows.split_hashes, COUNTS).as_dict())
    assert found[0]["exact_match_interval"][0] < found[0]["exact_match"] < found[0]["exact_match_interval"][1]
    for other_way in found[1:]:
        assert other_way.keys() == found[0].keys()
        for key, value in found[0].items():
            assert other_way[key] == pytest.approx(value, rel=1e-5), key
