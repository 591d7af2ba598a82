"""What an export is compared with, and by which measure."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from app.config.finished_run import export_config
from app.evaluation.run import prepare_evaluation
from app.exports import verify
from app.exports.verify import Limits, Reference, Reloaded, Verification, kept_share
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


@pytest.mark.parametrize(
    ("losses", "share"),
    [
        ((3.0, 2.0, 2.0), 1.0),
        ((3.0, 2.0, 2.25), 0.75),
        ((3.0, 2.0, 1.9), 1.1),
        ((3.0, 2.0, 3.5), -0.5),
        ((2.0, 1.91, 1.91), None),  # too small an improvement
        ((2.0, 2.5, 2.1), None),
        ((float("nan"), 2.0, 2.0), None),
        ((3.0, 2.0, float("nan")), None),
    ],
)
def test_kept_share_of_improvement(losses: tuple[float, float, float], share: float | None) -> None:
    assert kept_share(*losses) == (None if share is None else pytest.approx(share))


@pytest.mark.parametrize(("moved", "least", "passed"), [(0.08, 0.9, True), (0.16, 0.9, False), (0.16, None, True)])
def test_export_below_limit_of_kept_share_fails(moved: float, least: float | None, passed: bool) -> None:
    def logits(weight: float) -> torch.Tensor:
        return torch.tensor([[weight, 0.0]] * 4)

    rows = {"ids.0": torch.arange(4)}
    reference = Reference(rows, [torch.zeros(4, dtype=torch.long)], [logits(1.0)], "held_out", base=[logits(0.0)])
    reloaded = Reloaded(reference.ids, reference.loss([logits(1 - moved)]), [logits(1 - moved)])
    verified = verify.verify(reference, reloaded, Limits("kl", 0.5, "", 0.25, least))
    assert verified.passed == passed
    losses = [reference.loss([logits(weight)]) for weight in (0.0, 1.0, 1 - moved)]
    assert [verified.base_loss, verified.loss_before, verified.loss_after] == losses
    share = kept_share(*losses)
    assert verified.kept_share == share
    assert share is not None
    assert (share < 0.9) == (moved == 0.16)
    if passed:
        assert f"keeps {share:.1%} of the loss improvement from training (base loss 0.6931)" in verified.lines()
    else:
        reason = f"training is lost in rounding: the export keeps {share:.1%} of the loss improvement from training"
        assert verified.lines().startswith(f"FAILED: the reloaded model differs: {reason} (at least 90%): loss 0.6931")
        assert verified.lines().endswith("Set quant=fp8, or kind=merged")
