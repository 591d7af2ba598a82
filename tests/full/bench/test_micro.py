"""The arithmetic that is timed is that of training."""

from pathlib import Path

import torch

from scripts.bench.micro import Lines, rows_in_fp8
from tests.conftest import REPO
from tests.full.bench.conftest import Bench, lines_of

CPU = torch.device("cpu")


def test_rows_in_fp8_are_near_original() -> None:
    x = torch.randn(16, 64) * torch.logspace(-3, 3, 16)[:, None]
    packed, scale = rows_in_fp8(x)
    assert packed.dtype == torch.float8_e4m3fn
    assert float((packed.float() * scale - x).abs().amax(1).div(x.abs().amax(1)).max()) < 2**-4


def test_failed_measurement_is_a_line(tmp_path: Path) -> None:
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


def test_micro_measures_all_operations(bench: Bench) -> None:
    for item in ("attention", "gemm", "nf4", "head", "rounding"):
        options = ["--device", "cpu", "--tiny", "--out", str(bench.out)]
        command = [bench.env["APP_PYTHON"], "-m", "scripts.bench.micro", item, *options]
        ended = bench.run(command, PYTHONPATH=str(REPO))
        assert ended.returncode == 0, ended.stdout + ended.stderr
    found = bench.lines
    wrong = {line["name"]: line["error"] for line in found if "error" in line}
    assert wrong.keys() <= {"varlen", "flash"}, wrong
    assert all("needs an NVIDIA GPU" in error for error in wrong.values())
    assert all(line.keys() >= {"hardware", "versions", "commit"} for line in found)
    attention = {line["name"]: line for line in found if line["item"] == "attention" and "error" not in line}
    assert all(line["difference"] < 1e-5 > line["gradient_difference"] for line in attention.values())
    assert {line["numbers"] for line in found if line["item"] == "gemm"} == {"run", "fp8", "fp8 slow sums"}
    ways = {(line["item"], line["way"]): line for line in found if line["item"] in ("nf4", "head")}
    timed = {way for (_, way), line in ways.items() if line["milliseconds"] is not None}
    assert timed == {"unpack", "product alone", "unpack and product", "at once", "chunks"}
