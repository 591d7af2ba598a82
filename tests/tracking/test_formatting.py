"""Lines and numbers as people read them."""

from collections.abc import Callable
from typing import Any

import pytest

from app.tracking.formatting import (
    Sample,
    align,
    evaluation_line,
    format_bytes,
    format_count,
    format_duration,
    format_number,
    samples_text,
    step_line,
)
from tests.tracking.test_jsonl_metrics import STEP

OF_STEP = "step 5/100 | loss 1.0986 | lr 2.00e-04 | grad_norm 0.30 | 1.2k tokens/s | 0:01:02 left"
NAN = {"step": 5, "loss": float("nan"), "tokens_per_second": None}
EVALUATION = {"step": 10, "epoch": 0.5, "eval_loss": 1.23456, "eval_tokens": 300}
SAMPLES = [Sample("2+2?", "4", "5\nor so"), Sample("a", "b", "c")]
FIRST, SECOND = "prompt    2+2?\nexpected  4\nanswer    5\n          or so", "prompt    a\nexpected  b\nanswer    c"
NUMBERS: list[tuple[Callable[[Any], str], dict[float, str]]] = [
    (format_count, {0: "0", 999.4: "999", 1234: "1.2k", 2_400_000: "2.4M", 8.03e9: "8.0B", 3e13: "30.0T"}),
    (format_bytes, {5e8: "500 MB", 1.25e10: "12.5 GB"}),
    (format_duration, {0: "0:00:00", 59.6: "0:01:00", 3725: "1:02:05", 360000: "100:00:00"}),
    (format_number, {3.62591: "3.6259", 0.0004: "0.0004", 1.23456e-7: "1.235e-7", 79146: "79,146", 0: "0"}),
    (format_number, {1234.56: "1,234.6", 0.012345678: "0.01235", 2e9: "2e9", -4.5: "-4.5", 10.0: "10"}),
]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (step_line(STEP, 100, 62), OF_STEP),
        (step_line(NAN, None, None), "step 5 | loss nan"),
        (evaluation_line(EVALUATION), "evaluation at step 10 | eval_loss 1.2346 | eval_tokens 300"),
        (samples_text(10, SAMPLES), f"samples at step 10\n{FIRST}\n\n{SECOND}"),
        (align([("model", "tiny"), ("data", "x\ny")]), "model  tiny\ndata   x\n       y"),
        (align([]), ""),
        *((write(number), text) for write, texts in NUMBERS for number, text in texts.items()),
    ],
)  # fmt: skip
def test_formatted_text(text: str, expected: str) -> None:
    assert text == expected
