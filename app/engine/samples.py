"""A few held-out prompts, answered by the model as it is now."""

from collections.abc import Callable
from typing import Any

import numpy as np

from app.config.schema import EvalConfig
from app.data.rows import TokenRows
from app.model.generation import end_ids, generate
from app.model.trainee import Trainee
from app.record.lines import Sample
from app.record.record import Record


def sampler(
    config: EvalConfig, rows: TokenRows | None, trainee: Trainee, tokenizer: Any, record: Record
) -> Callable[[int], None]:
    """A function that shows the answers at a step. Greedy, so that it draws no random number of the run."""
    if rows is None or config.samples == 0:
        return lambda _step: None
    chosen = np.linspace(0, len(rows) - 1, min(config.samples, len(rows))).astype(int)
    pairs = [_split(rows, int(i)) for i in chosen]
    lm = trainee.language_model
    ends = end_ids(lm, tokenizer)

    def show(step: int) -> None:
        with trainee.arithmetic(lm.device):
            answers = generate(lm, [prompt for prompt, _ in pairs], ends, config.sample_tokens)
        record.samples(
            step,
            [
                Sample(
                    prompt=tokenizer.decode(prompt, skip_special_tokens=True),
                    expected=tokenizer.decode(expected, skip_special_tokens=True),
                    answer=tokenizer.decode(answer, skip_special_tokens=True),
                )
                for (prompt, expected), answer in zip(pairs, answers, strict=True)
            ],
        )

    return show


def _split(rows: TokenRows, i: int) -> tuple[list[int], list[int]]:
    """The tokens before the first trained one, and that stretch of trained ones."""
    ids, trained = rows.ids(i), rows.trained(i)
    start = int(np.argmax(trained))
    untrained_after = np.flatnonzero(~trained[start:])
    end = start + int(untrained_after[0]) if len(untrained_after) else len(ids)
    return ids[:start].tolist(), ids[start:end].tolist()
