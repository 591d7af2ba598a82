"""compile=auto on a GPU: off for a short run, on where the run repays it, and such a run trains compiled."""

from pathlib import Path

import pytest

from app.training import auto_settings
from app.training.summary import run_table
from tests.training.conftest import plan_of, small_run

RUN = ("recipe=lora", "precision=bf16", "attention=auto", "batching.packing=true", "model.architecture.hidden_size=64")


def test_short_run_is_not_compiled_and_says_so(tmp_path: Path) -> None:
    resolved = plan_of(small_run(*RUN), tmp_path)
    assert resolved.choices.compile == "none"
    (reason,) = resolved.uncompiled_because
    assert reason.startswith("too few steps to repay compilation")
    assert any(reason in text for name, text in run_table(resolved) if name == "note")


def test_run_that_repays_it_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_settings, "REPAYING_FLOPS", 0.0)
    resolved = plan_of(small_run(*RUN), tmp_path)
    assert (resolved.choices.compile, resolved.uncompiled_because) == ("blocks", ())
    assert resolved.sections.compile.kind == "blocks"
    assert resolved.choices.attention in {"flash", "varlen"}
