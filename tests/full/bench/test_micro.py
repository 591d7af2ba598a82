"""The arithmetic that is timed is that of training."""

from pathlib import Path

import pytest
import torch

from scripts.bench.micro import Lines, lengths_in, milliseconds, rows_in_fp8, tera_per_second, with_adapter
from tests.full.bench.conftest import lines_of

CPU = torch.device("cpu")


def test_an_adapter_has_the_gradients_of_its_definition() -> None:
    x, w, a, b, dy = (torch.randn(*shape) for shape in ((32, 128), (64, 128), (16, 128), (64, 16), (32, 64)))
    leaves = [t.double().requires_grad_() for t in (x, a, b)]
    y = leaves[0] @ w.double().T + 2.0 * (leaves[0] @ leaves[1].T) @ leaves[2].T
    wanted = (y, *torch.autograd.grad(y, leaves, dy.double()))
    for found, exact in zip(with_adapter(x, w, a, b, dy), wanted, strict=True):
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-4)


def test_rows_in_fp8_are_near_what_they_were() -> None:
    x = torch.randn(16, 64) * torch.logspace(-3, 3, 16)[:, None]
    packed, scale = rows_in_fp8(x)
    assert packed.dtype == torch.float8_e4m3fn
    assert float((packed.float() * scale - x).abs().amax(1).div(x.abs().amax(1)).max()) < 2**-4


@pytest.mark.parametrize("tokens", [64, 16384])
def test_documents_fill_the_row(tokens: int) -> None:
    lengths = lengths_in(tokens)
    assert sum(lengths) == tokens
    assert max(lengths) <= max(8, tokens // 8)
    assert len(lengths) > 4


def test_times_are_those_of_the_call() -> None:
    x = torch.ones(8)
    assert 0 < milliseconds(lambda: x + 1, CPU) < 5
    assert tera_per_second(2e9, 1.0) == pytest.approx(2.0)


def test_what_fails_is_a_line_and_the_next_one_follows(tmp_path: Path) -> None:
    lines = Lines(tmp_path / "found", "gemm", CPU)

    def fail() -> dict[str, float]:
        raise torch.OutOfMemoryError("CUDA out of memory.\nmore")

    lines.attempt("large", fail, rank=16)
    lines.attempt("small", lambda: {"milliseconds": 1.23456789})
    large, small = lines_of(tmp_path / "found")
    assert large["error"] == "OutOfMemoryError: CUDA out of memory."
    assert large["rank"] == 16
    assert small["milliseconds"] == 1.235
    assert {"item", "hardware", "versions", "commit"} <= small.keys()
