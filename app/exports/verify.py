"""Verification of an export: a new process loads it, and its logits must equal those of the run's model."""

import gc
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from app.config.kinds import PROBLEMS
from app.evaluation.run import Evaluation
from app.exports import reload
from app.layers.attention import own_attention
from app.model.training_model import TrainingModel
from app.tasks.classification import CLASS_PROBLEMS
from app.tracking.output_dir import finite_or_none

MAX_ROWS = 8
SHORT_ROW_TOKENS = 512  # such rows are taken first
MAX_POSITIONS = 64  # of each row
MAX_LOST_MARGIN = 25  # tolerances of the mean loss, at one position
MAX_KL_RATIO = 2  # KL from the run's model over that from its base; above it, training is lost
MIN_IMPROVEMENT = 0.1  # nats; a share of less would be decided by the noise of few positions


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Comparison with the reloaded export. Differences are None if it returned no logits."""

    passed: bool = False
    tolerance: float
    tolerance_is: str
    tolerance_of: str = "difference"  # or kl, or loss_difference
    loss_tolerance: float | None = None  # a second limit, of loss_difference
    difference: float | None = None  # all logits together, relative
    kl: float | None = None  # from the run's model to a quantized one, nats per position
    base_kl: float | None = None  # from its base without the adapter
    base_loss: float | None = None  # of the base without the adapter
    kept_share: float | None = None  # of the loss improvement from training
    kept_share_limit: float | None = None  # the lowest allowed
    loss_difference: float | None = None  # quantized, or without logits: nats, relative to a loss above 1
    lost_margin: float | None = None  # largest margin, in nats, of a token that only the run's model prefers
    largest_difference: float | None = None  # of one logit, relative to the largest
    same_choice: float | None = None  # share of positions at which both prefer the same token
    loss_before: float
    loss_after: float | None = None
    rows: int
    positions: int
    rows_are: str
    failure: str | None = None
    note: str | None = None  # on comparisons left out
    # the same rows on the training base, if users of the export load another one
    training_difference: float | None = None
    training_loss: float | None = None

    def lines(self) -> str:
        verdict = "passed" if self.passed else "FAILED"
        if self.failure is not None:
            how = "reload failed" if self.loss_after is None else "the reloaded model differs"
            return f"{verdict}: {how}: {self.failure}"
        if self.note is not None:
            return f"{verdict}: {self.note}"
        measured = getattr(self, self.tolerance_of)
        difference, loss = (math.nan if value is None else value for value in (measured, self.loss_after))
        unit = {"kl": " nats per position (KL)", "loss_difference": " in loss"}.get(self.tolerance_of, "")
        lines = [
            f"{verdict}: the reloaded model differs by {difference:.1e}{unit} (tolerance {self.tolerance:.1e}, "
            f"{self.tolerance_is})",
            f"loss {self.loss_before:.4f} -> {loss:.4f} at {self.positions} positions of {self.rows} rows "
            f"({self.rows_are})" + ("" if self.same_choice is None else f", same choice at {self.same_choice:.1%}"),
        ]
        if self.kept_share is not None:
            lines.append(f"{self.improvement} (base loss {self.base_loss:.4f})")
        if self.training_loss is not None:
            lines.append(
                f"the base is loaded unquantized; on the training base the loss is {self.training_loss:.4f}, and "
                f"logits differ by {self.training_difference:.1e}"
            )
        return "\n".join(lines)

    @property
    def improvement(self) -> str:
        """Statement of the share of the loss improvement, empty without one."""
        return "" if self.kept_share is None else f"keeps {self.kept_share:.1%} of the loss improvement from training"


@dataclass(frozen=True, slots=True)
class Reference:
    """Rows, and the logits of the run's model that the export must reproduce."""

    rows: dict[str, Tensor]  # by the names that reload.py expects
    targets: list[Tensor]
    logits: list[Tensor]
    rows_are: str
    problem: str = "single"  # of the task; otherwise a token or class is chosen
    base: list[Tensor] | None = None  # logits without the adapter

    @property
    def ids(self) -> list[Tensor]:
        """Tokens of each row."""
        return [self.rows[f"ids.{i}"] for i in range(len(self.targets))]

    def loss(self, logits: list[Tensor]) -> float:
        """Return the mean loss over all positions."""
        losses = [
            CLASS_PROBLEMS[self.problem].of_answers(row_logits.double(), targets, None).sum()
            for row_logits, targets in zip(logits, self.targets, strict=True)
        ]
        return float(sum(losses)) / sum(len(targets) for targets in self.targets)

    def same_choice(self, ours: Tensor, theirs: Tensor) -> float | None:
        """Return the share of equal choices; None for regression, which has no choices."""
        if not PROBLEMS[self.problem].named:
            return None
        chosen = CLASS_PROBLEMS[self.problem].predictions
        return float((chosen(theirs) == chosen(ours)).double().mean())


class Limits(NamedTuple):
    """Limits of an export: a field of `Verification`, its tolerance with the reason, and limits of the loss."""

    measure: str
    tolerance: float
    reason: str
    loss_difference: float | None = None
    kept_share: float | None = None


class Reloaded(NamedTuple):
    """Results of a program that loaded the export, on the rows of a reference."""

    ids: list[Tensor]  # tokens of each row
    loss: float | None  # mean cross-entropy over all positions; None: no program here reads the export
    logits: list[Tensor] | None  # None: the program returns none, and losses are compared
    digest: str | None = None  # of all tensors, if requested
    choices: list[Tensor] | None = None  # the likeliest tokens, of a program that returns no logits
    failure: str | None = None
    note: str | None = None  # on comparisons left out


def reference_of(evaluation: Evaluation, *, with_base: bool = False) -> Reference:
    """Return the logits of the run's model in fp32 arithmetic; the model is freed afterwards.

    `with_base`: also those without its adapter.
    """
    model = evaluation.model(tuned=True).eval()
    reload.in_fp32(model)
    torch.set_float32_matmul_precision("highest")
    rows, targets = _labeled(evaluation, model)
    device, base = str(evaluation.runtime.device), None
    network: Any = model.network
    logits = _in_order(reload.logits(model.language_model, rows, device))
    if with_base and network is not model.language_model:
        with network.disable_adapter():
            base = _in_order(reload.logits(model.language_model, rows, device))
    del model, network
    gc.collect()
    torch.cuda.empty_cache()
    return Reference(rows, targets, logits, evaluation.rows_are, evaluation.run.task.problem, base)


def _in_order(logits: Mapping[str, Tensor]) -> list[Tensor]:
    """Return logits by row number as a list."""
    return [logits[str(number)] for number in range(len(logits))]


def verify(
    reference: Reference, reloaded: Reloaded | str, limits: Limits, trained: Reference | None = None
) -> Verification:
    """Compare a reloaded export with the run's model. `reloaded`: the results, or an error as text.

    `trained`: the logits on the training base, if another base was exported.
    """
    verification = Verification(
        tolerance=limits.tolerance,
        tolerance_is=limits.reason,
        tolerance_of=limits.measure,
        loss_tolerance=limits.loss_difference,
        kept_share_limit=limits.kept_share,
        loss_before=reference.loss(reference.logits),
        rows=len(reference.targets),
        positions=sum(len(targets) for targets in reference.targets),
        rows_are=reference.rows_are,
        training_difference=None if trained is None else _relative(reference.logits, trained.logits),
        training_loss=None if trained is None else reference.loss(trained.logits),
    )
    if isinstance(reloaded, str):
        return replace(verification, failure=reloaded)
    if reloaded.loss is None:
        return replace(verification, passed=True, note=reloaded.note)
    verification = replace(verification, loss_after=finite_or_none(reloaded.loss))
    other = [i for i, both in enumerate(zip(reference.ids, reloaded.ids, strict=True)) if not torch.equal(*both)]
    failure = f"tokens differ in row {other[0]} of the compared rows" if other else reloaded.failure
    if failure is not None:
        return replace(verification, failure=failure)
    if reloaded.logits is None:
        verification = _with_loss(verification, reference, reloaded.loss, reloaded.choices)
    else:
        verification = _with_logits(verification, reference, reloaded.logits)
    measured: float | None = getattr(verification, limits.measure)
    failure = _failure(verification)
    passed = failure is None and measured is not None and measured <= limits.tolerance
    return replace(verification, passed=passed, failure=failure)


def _failure(verification: Verification) -> str | None:
    """Return why an export fails for another reason than its tolerance."""
    margin, kl, base_kl = verification.lost_margin, verification.kl, verification.base_kl
    if margin is not None and margin > MAX_LOST_MARGIN * verification.tolerance:
        return f"it does not prefer a token that the run's model prefers by {margin:.2g} nats"
    if kl is not None and base_kl is not None and kl > MAX_KL_RATIO * base_kl:
        return (
            f"training is lost: the KL divergence to the export is {kl:.2g} nats per position from the run's model, "
            f"but {base_kl:.2g} from the base"
        )
    share, least = verification.kept_share, verification.kept_share_limit
    if share is not None and least is not None and share < least:
        return (
            f"training is lost in rounding: the export {verification.improvement} (at least {least:.0%}): loss "
            f"{verification.base_loss:.4f} of the base, {verification.loss_before:.4f} of the run's model, "
            f"{verification.loss_after:.4f} of the export. Set quant=fp8, or kind=merged"
        )
    difference, limit = verification.loss_difference, verification.loss_tolerance
    if difference is not None and limit is not None and difference > limit:
        after = verification.loss_after
        return f"its loss is {after:.4f}, that of the run's model {verification.loss_before:.4f} (tolerance {limit:g})"
    return None


def _with_loss(
    verification: Verification, reference: Reference, loss: float, choices: list[Tensor] | None
) -> Verification:
    """Add the differences of a program that returns its loss and preferred tokens, but no logits."""
    difference = finite_or_none(abs(loss / verification.loss_before - 1))
    verification = replace(verification, loss_difference=_in_nats(verification, loss), difference=difference)
    if choices is None:
        return verification
    log_probs, chosen = torch.cat(reference.logits).double().log_softmax(-1), torch.cat(choices)
    margins = log_probs.amax(-1) - log_probs.gather(-1, chosen[:, None])[:, 0]
    same = float((log_probs.argmax(-1) == chosen).double().mean())
    return replace(verification, same_choice=same, lost_margin=float(margins.max()))


def _with_logits(verification: Verification, reference: Reference, logits: list[Tensor]) -> Verification:
    ours, theirs = torch.cat(reference.logits), torch.cat(logits)
    if verification.tolerance_of == "kl":
        loss = reference.loss(logits)
        verification = replace(verification, kl=_kl(ours, theirs), loss_difference=_in_nats(verification, loss))
        if reference.base is not None:
            base_loss = reference.loss(reference.base)
            verification = replace(
                verification,
                base_kl=_kl(torch.cat(reference.base), theirs),
                base_loss=finite_or_none(base_loss),
                kept_share=kept_share(base_loss, verification.loss_before, loss),
            )
    return replace(
        verification,
        difference=_relative(reference.logits, logits),
        largest_difference=finite_or_none(float((theirs - ours).abs().max() / ours.abs().max())),
        same_choice=reference.same_choice(ours, theirs),
    )


def kept_share(base: float, trained: float, exported: float) -> float | None:
    """Return the share of the loss improvement in an export; None if training improved the loss by too little."""
    improvement = base - trained
    if not improvement >= MIN_IMPROVEMENT:  # also if it is not finite
        return None
    share: float | None = finite_or_none((base - exported) / improvement)
    return share


def _in_nats(verification: Verification, loss: float) -> float | None:
    """Return the difference of a loss in nats, relative to a loss above 1; None if it is not finite."""
    nats: float | None = finite_or_none(abs(loss - verification.loss_before) / max(1.0, verification.loss_before))
    return nats


def _kl(ours: Tensor, theirs: Tensor) -> float | None:
    """Return KL(ours || theirs), the mean over all positions; None if it is not finite."""
    log_probs = ours.log_softmax(-1)
    kl: float | None = finite_or_none(float((log_probs.exp() * (log_probs - theirs.log_softmax(-1))).sum(-1).mean()))
    return kl


def _relative(reference: list[Tensor], logits: list[Tensor]) -> float | None:
    """Return the relative difference of all logits together; None if it is not finite."""
    ours, theirs = torch.cat(reference), torch.cat(logits)
    difference = float((theirs - ours).norm(dtype=torch.float64) / ours.norm(dtype=torch.float64))
    return difference if math.isfinite(difference) else None


def _labeled(evaluation: Evaluation, model: TrainingModel) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Return the first short rows (or the shortest ones) and the targets of their last labeled positions.

    The row of a preference pair is the chosen answer.
    """
    rows = evaluation.rows
    order = np.argsort(np.where(rows.lengths <= SHORT_ROW_TOKENS, 0, rows.lengths), kind="stable")
    batches = [evaluation.layout.batch(rows, [order[i : i + 1]], 1, epoch=0) for i in range(min(MAX_ROWS, len(order)))]
    inputs: dict[str, Tensor] = {}
    targets: list[Tensor] = []
    for i, batch in enumerate(batches):
        whole = slice(batch.lengths[0])  # the first document, without the padding of the bin
        in_row = batch.label_rows < batch.lengths[0]
        targets.append(batch.targets[in_row][-MAX_POSITIONS:])
        inputs[f"ids.{i}"] = batch.ids[0, whole].contiguous()
        if not model.pooled:
            inputs[f"at.{i}"] = batch.label_rows[in_row][-MAX_POSITIONS:]
        if batch.token_type_ids is not None and model.takes_segments:
            inputs[f"sides.{i}"] = batch.token_type_ids[0, whole].contiguous()
    return inputs, targets


def by_transformers(
    folder: Path, loading: Mapping[str, Any], reference: Reference, evaluation: Evaluation
) -> Reloaded | str:
    """Return the logits of a model that transformers loads in a new process, or an error as text.

    `loading`: how PEFT loads an adapter, its base, and whether to compute a digest of the tensors.
    """
    with tempfile.TemporaryDirectory(prefix="verify-export-") as place:
        sections = evaluation.sections(tuned=True)
        plan = {
            "config": None,
            "base": None,
            "dtype": "float32",
            "bitsandbytes": None,
            "vocab_size": None,
            "rope": None,
            "stacks": [],
            "digest": False,
            "unpacked": None,
            "rounded_rows": None,
            "auto_class": evaluation.base.auto_class,
            **loading,
            "folder": str(folder),
            "attention": own_attention(evaluation.base.on_meta()),
            "trust_remote_code": sections.model.trust_remote_code,
            "device": str(evaluation.runtime.device),
            "threads": evaluation.runtime.threads if evaluation.runtime.device.type == "cpu" else None,
            "rows": str(Path(place) / "rows.safetensors"),
            "out": str(Path(place) / "logits.safetensors"),
        }
        save_file(reference.rows, plan["rows"])
        failure = _run(reload.__file__, plan, Path(place) / "plan.json")
        if failure is not None:
            return failure
        outputs = load_file(plan["out"])
        with safe_open(plan["out"], "pt") as content:
            digest = (content.metadata() or {}).get("digest")
    logits = [outputs[str(i)] for i in range(len(reference.targets))]
    return Reloaded(reference.ids, reference.loss(logits), logits, digest)


def run_fresh(program: str, plan: Mapping[str, Any]) -> dict[str, Any] | str:
    """Return the JSON that a program writes to `out` of its plan, or an error as text."""
    with tempfile.TemporaryDirectory(prefix="verify-export-") as place:
        out = Path(place) / "out.json"
        failure = _run(program, {**plan, "out": str(out)}, Path(place) / "plan.json")
        return failure if failure is not None else dict(json.loads(out.read_text()))


def _run(program: str, plan: Mapping[str, Any], file: Path) -> str | None:
    """Run a Python file with a plan; return the error, or None."""
    file.write_text(json.dumps(plan))
    done = subprocess.run(
        [sys.executable, "-P", program, str(file)],  # -P: no imports from the folder of the program
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        cwd=file.parent,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode < 0:
        return f"killed by signal {-done.returncode}, possibly out of memory"
    return done.stderr.strip().splitlines()[-1] if done.returncode else None
