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


def test_step_line() -> None:
    assert step_line(STEP, 100, 62) == (
        "step 5/100 | loss 1.0986 | lr 2.00e-04 | gradient 0.30 | 1.2k tokens/s | 0:01:02 left"
    )
    assert step_line({"step": 5, "loss": float("nan"), "tokens_per_second": None}, None, None) == "step 5 | loss nan"


def test_evaluation_line() -> None:
    values = {"step": 10, "epoch": 0.5, "eval_loss": 1.23456, "eval_tokens": 300}
    assert evaluation_line(values) == "evaluation at step 10 | eval_loss 1.2346 | eval_tokens 300"


def test_samples_text() -> None:
    assert samples_text(10, [Sample("2+2?", "4", "5\nor so"), Sample("a", "b", "c")]) == (
        "samples at step 10\n"
        "prompt    2+2?\n"
        "expected  4\n"
        "answer    5\n"
        "          or so\n"
        "\n"
        "prompt    a\n"
        "expected  b\n"
        "answer    c"
    )


def test_align() -> None:
    assert align([("model", "tiny"), ("data", "x\ny")]) == "model  tiny\ndata   x\n       y"
    assert align([]) == ""


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (999.4, "999"), (1234, "1.2k"), (2_400_000, "2.4M"), (8.03e9, "8.0B"), (3e13, "30.0T")],
)
def test_format_count(number: float, text: str) -> None:
    assert format_count(number) == text


def test_format_bytes_and_duration() -> None:
    assert [format_bytes(5e8), format_bytes(1.25e10)] == ["500 MB", "12.5 GB"]
    assert [format_duration(0), format_duration(59.6), format_duration(3725), format_duration(360000)] == [
        "0:00:00",
        "0:01:00",
        "1:02:05",
        "100:00:00",
    ]


def test_format_number_significant_digits() -> None:
    values = [3.62591, 0.0004, 1.23456e-7, 79146, 0, 1234.56, 0.012345678, 2e9, -4.5, 10.0]
    told = ["3.6259", "0.0004", "1.235e-7", "79,146", "0", "1,234.6", "0.01235", "2e9", "-4.5", "10"]
    assert [format_number(value) for value in values] == told
