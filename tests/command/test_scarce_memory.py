"""A run that is short of memory goes on in smaller parts, or says what takes memory."""

from pathlib import Path
from typing import Any

from tests.harness.runs import SMALL, Zygote, result

SCARCE = "tests.harness.scarcity"
LIMITS: dict[str, Any] = {"TOKENS": "40", "CALLS": "40"}  # calls: what is proven and shown before the first step


def told(run: Path, words: str = "out of memory") -> list[str]:
    return [line for line in (run / "log.txt").read_text().splitlines() if words in line]


def test_where_nothing_helps_the_message_says_what_takes_memory(zygote: Zygote, tmp_path: Path) -> None:
    given = LIMITS | {"WHERE": "backward", "RANKS": "0", "TOKENS": "3"}
    ended = zygote.run(tmp_path, *SMALL, "output_dir=run", module=SCARCE, **given, code=2)
    assert "error: out of memory: a single document of" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert result(tmp_path / "run")["status"] == "failed"


FEW = (*SMALL, "training.max_steps=4", "checkpoint.every=2", "eval.samples=0")
PADDED = ("recipe=lora", "batching.packing=false")  # nothing goes backward before the rehearsal
