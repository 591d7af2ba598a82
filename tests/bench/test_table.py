"""scripts/bench/table.py: what the tables say."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.bench.table import BEGIN, END, groups, rates, ratios, report
from tests.conftest import REPO


def line(framework: str, rate: float, **other: Any) -> dict[str, Any]:
    return {
        "framework": framework,
        "model": "tiny",
        "method": "lora",
        "device": "cpu",
        "precision": "fp32",
        "mix": "chat",
        "length": 512,
        "tokens_per_step": 2048,
        "accumulation": 1,
        "recompute": False,
        "rank": 16,
        "threads": 1,
        "settings": [],
        "workload": "w",
        "steps": 8,
        "turn": 0,
        "tokens_per_second": rate,
        "cpu_seconds": 1e4 / rate,
        "losses": [7.0, 6.0],
        "fill": 0.98,
        "peak_memory_bytes": 2**30,
        "mfu": None,
        "first_step_seconds": 0.5,
        "hardware": {"name": "CPU"},
        "versions": {"torch": "2.13"},
        "commit": "c" * 40,
        **other,
    }


ROUNDS = [line("ours", 100.0), line("trl", 40.0), line("ours", 120.0), line("trl", 50.0), line("ours", 90.0)]


def cells(text: list[str], name: str) -> list[str]:
    (row,) = [each for each in text if each.startswith(f"| `{name}`")]
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_report_takes_median_of_rounds() -> None:
    (group,) = groups(ROUNDS)
    assert rates(group) == {"ours": 100.0, "trl": 45.0}
    assert ratios(group) == pytest.approx({"ours": 1.0, "trl": (100 / 40 + 120 / 50) / 2})
    text = report(ROUNDS)
    assert cells(text, "ours")[:5] == ["`ours`", "100", "90 to 120", "1.00", "1.00"]
    assert cells(text, "trl")[1:5] == ["45", "40 to 50", "2.45", "2.45"]
    assert "- at least 2.5 times TRL, packed: 2.45, **missed**" in text
    assert not any("bare loop" in row for row in text), "it was not measured"


def test_ratios_are_taken_within_turns() -> None:
    lines = [line("ours", 100.0), line("trl", 50.0), line("ours", 10.0), line("trl", 5.0)]
    assert ratios(lines) == {"ours": 1.0, "trl": 2.0}
    assert ratios(lines[1:2]) == {}


def test_groups_separate_different_work() -> None:
    apart = [
        line("trl", 1.0, **other)
        for other in ({"workload": "v"}, {"threads": 2}, {"method": "full"}, {"settings": ["a=b"]})
    ]
    assert len(groups([*ROUNDS, *apart, line("trl", 1.0, hardware={"name": "another"})])) == 6


def test_report_names_losses_that_differ() -> None:
    assert "losses agree" in "".join(report(ROUNDS))
    text = report([*ROUNDS, line("plain", 50.0, losses=[7.0, 6.1])])
    assert "DO NOT AGREE" in "".join(text)
    assert cells(text, "plain")[-1] == "2e-02"


def test_report_names_failures_once() -> None:
    failed = {"framework": "unsloth", "model": "tiny", "method": "lora", "error": "needs a GPU"}
    text = report([*ROUNDS, failed, failed, {"stage": "micro", "item": "gemm", "error": "exit code 1"}])
    assert text[-4:] == ["", "- unsloth tiny lora: needs a GPU", "- micro gemm: exit code 1", ""]


def test_table_runs_as_script(tmp_path: Path) -> None:
    file, document = tmp_path / "found.jsonl", tmp_path / "cpu.md"
    file.write_text("".join(json.dumps(each) + "\n" for each in ROUNDS))
    document.write_text(f"{BEGIN}\n{END}\n")
    script = [sys.executable, str(REPO / "scripts" / "bench" / "table.py"), str(file)]
    subprocess.run([*script, "--into", str(document)], cwd=tmp_path, check=True)
    assert "| `ours` | 100 |" in document.read_text()
    printed = subprocess.run(script, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert "| `trl` | 45 |" in printed
