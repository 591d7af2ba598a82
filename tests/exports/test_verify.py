"""What an export is compared with, and by which measure."""

from dataclasses import replace
from pathlib import Path

import pytest

from app.config.finished_run import export_config
from app.evaluation.run import prepare_evaluation
from app.exports import verify
from app.exports.verify import Reference, Verification
from tests.harness.runs import FinishedRuns


def test_reference_of_long_rows_pairs_last_positions_with_their_targets(
    finished: FinishedRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "MAX_POSITIONS", 2)
    config = export_config([f"run={finished()}", f"to={tmp_path}/out", "kind=merged"])
    evaluation = prepare_evaluation(config, config.folder, {}, tuned=True, say=lambda _: None)
    reference = verify.reference_of(evaluation)
    assert len(reference.targets) == verify.MAX_ROWS
    for i, targets in enumerate(reference.targets):
        ids, at = reference.rows[f"ids.{i}"], reference.rows[f"at.{i}"]
        assert ids[at + 1].equal(targets)
        assert at[-1] == len(ids) - 2


def test_loss_without_logits_is_relative_to_a_loss_above_one() -> None:
    found = Verification(tolerance=0.1, tolerance_is="", loss_before=4.0, rows=1, positions=1, rows_are="")
    reference = Reference({}, [], [], "")
    assert verify._with_loss(found, reference, 4.2, None).loss_difference == pytest.approx(0.05)
    below = verify._with_loss(replace(found, loss_before=0.5), reference, 0.7, None)
    assert below.loss_difference == pytest.approx(0.2)
