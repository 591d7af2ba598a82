"""Verification of an export: a fresh process loads it, and its logits must equal those of the run's own model."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The comparison with the fresh process. The differences are None where that gave no logits."""

    passed: bool = False
    tolerance: float
    tolerance_is: str
    tolerance_of: str = "difference"  # or kl, or loss_difference
    difference: float | None = None  # all logits together, relative
    kl: float | None = None  # from the run's model to a quantized one, nats a position
    loss_difference: float | None = None  # in a program that gives no logits: nats, relative to a loss above 1
    lost_margin: float | None = None  # the most, in nats, by which the run's model prefers a token that that does not
    largest_difference: float | None = None  # of one logit, relative to the largest
    same_choice: float | None = None  # share of the positions at which both prefer the same token
    loss_before: float
    loss_after: float | None = None
    rows: int
    positions: int
    rows_are: str
    failure: str | None = None
    note: str | None = None  # on what was not compared
    # the same rows on the base of training, where users of the export load another one
    training_difference: float | None = None
    training_loss: float | None = None

    def lines(self) -> str:
        verdict = "passed" if self.passed else "FAILED"
        if self.failure is not None:
            how = "ended without logits" if self.loss_after is None else "computes something else"
            return f"{verdict}: the fresh process {how}: {self.failure}"
        if self.note is not None:
            return f"{verdict}: {self.note}"
        measured = getattr(self, self.tolerance_of)
        difference, loss = (math.nan if each is None else each for each in (measured, self.loss_after))
        unit = {"kl": " nats a position (KL)", "loss_difference": " in its loss"}.get(self.tolerance_of, "")
        lines = [
            f"{verdict}: a fresh process differs by {difference:.1e}{unit} (tolerance {self.tolerance:.1e}, "
            f"{self.tolerance_is})",
            f"loss {self.loss_before:.4f} -> {loss:.4f} at {self.positions} positions of {self.rows} rows "
            f"({self.rows_are})" + ("" if self.same_choice is None else f", same choice at {self.same_choice:.1%}"),
        ]
        if self.training_loss is not None:
            lines.append(
                f"the base is loaded unquantized; on that of training the loss is {self.training_loss:.4f}, and logits "
                f"differ by {self.training_difference:.1e}"
            )
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Reference:
    """Rows, and the logits of the run's own model that the export must give for them."""

    rows: dict[str, Tensor]  # by the names that reload.py expects
    targets: list[Tensor]
    logits: list[Tensor]
    rows_are: str
    problem: str = "single"  # of the task; otherwise a token or class is chosen

    @property
    def ids(self) -> list[Tensor]:
        """The tokens of each row."""
        return [self.rows[f"ids.{i}"] for i in range(len(self.targets))]

    def loss(self, logits: list[Tensor]) -> float:
        """Mean loss over all positions."""
        losses = [
            CLASS_PROBLEMS[self.problem].of_answers(each.double(), targets, None).sum()
            for each, targets in zip(logits, self.targets, strict=True)
        ]
        return float(sum(losses)) / sum(len(targets) for targets in self.targets)

    def same_choice(self, ours: Tensor, theirs: Tensor) -> float | None:
        """The share of all choices that both make alike; None where numbers are learnt, which are no choices."""
        if not PROBLEMS[self.problem].named:
            return None
        chosen = CLASS_PROBLEMS[self.problem].predictions
        return float((chosen(theirs) == chosen(ours)).double().mean())


class Reloaded(NamedTuple):
    """The rows of a reference as a program computes them that has loaded an export."""

    ids: list[Tensor]  # of the tokens that it reads in each row
    loss: float | None  # mean cross-entropy over all positions; None: no program here reads the export
    logits: list[Tensor] | None  # None: the program gives none, and losses are compared
    digest: str | None = None  # of all tensors, where that was asked for
    choices: list[Tensor] | None = None  # the likeliest tokens, of a program that gives no logits
    failure: str | None = None
    note: str | None = None  # on what was not compared


def reference_of(evaluation: Evaluation) -> Reference:
    """Compute reference logits from the run's weights in fp32 arithmetic; the model is freed afterwards."""
    model = evaluation.model(tuned=True).eval()
    reload.in_fp32(model)
    torch.set_float32_matmul_precision("highest")
    rows, targets = _labeled(evaluation, model)
    found = reload.logits(model.language_model, rows, str(evaluation.runtime.device))
    del model
    gc.collect()
    torch.cuda.empty_cache()
    return Reference(
        rows, targets, [found[str(i)] for i in range(len(targets))], evaluation.rows_are, evaluation.run.task.problem
    )


def verify(
    reference: Reference,
    reloaded: Reloaded | str,
    allowed: tuple[float, str],
    trained: Reference | None = None,
    measure: str = "difference",
) -> Verification:
    """Compare an export, as a fresh process computes with it, with the run's own model; a text: why that failed.

    `trained`: the model of training, where that computed with another base than was exported. `measure`: the field
    that must be `allowed`.
    """
    verification = Verification(
        tolerance=allowed[0],
        tolerance_is=allowed[1],
        tolerance_of=measure,
        loss_before=reference.loss(reference.logits),
        rows=len(reference.targets),
        positions=sum(len(each) for each in reference.targets),
        rows_are=reference.rows_are,
        training_difference=None if trained is None else _relative(reference.logits, trained.logits),
        training_loss=None if trained is None else reference.loss(trained.logits),
    )
    if isinstance(reloaded, str):
        return replace(verification, failure=reloaded)
    if reloaded.loss is None:
        return replace(verification, passed=True, note=reloaded.note)
    found = replace(verification, loss_after=finite_or_none(reloaded.loss))
    other = [i for i, both in enumerate(zip(reference.ids, reloaded.ids, strict=True)) if not torch.equal(*both)]
    failure = f"it reads other tokens in row {other[0]} of those compared" if other else reloaded.failure
    if failure is not None:
        return replace(found, failure=failure)
    if reloaded.logits is None:
        found = _with_loss(found, reference, reloaded.loss, reloaded.choices)
    else:
        found = _with_logits(found, reference, reloaded.logits)
    measured: float | None = getattr(found, measure)
    if found.lost_margin is not None and found.lost_margin > MAX_LOST_MARGIN * found.tolerance:
        return replace(found, failure=f"it gives up a token that the run prefers by {found.lost_margin:.2g} nats")
    return replace(found, passed=measured is not None and measured <= found.tolerance)


def _with_loss(found: Verification, reference: Reference, loss: float, choices: list[Tensor] | None) -> Verification:
    """Differences of a program that tells its loss, and the tokens that it chooses, in place of logits."""
    nats = abs(loss - found.loss_before) / max(1.0, found.loss_before)
    difference = finite_or_none(abs(loss / found.loss_before - 1))
    found = replace(found, loss_difference=finite_or_none(nats), difference=difference)
    if choices is None:
        return found
    known, chosen = torch.cat(reference.logits).double().log_softmax(-1), torch.cat(choices)
    lost = known.amax(-1) - known.gather(-1, chosen[:, None])[:, 0]  # the clearest choice that it does not share
    same = float((known.argmax(-1) == chosen).double().mean())
    return replace(found, same_choice=same, lost_margin=float(lost.max()))


def _with_logits(found: Verification, reference: Reference, logits: list[Tensor]) -> Verification:
    ours, theirs = torch.cat(reference.logits), torch.cat(logits)
    kl = None
    if found.tolerance_of == "kl":  # KL(ours || theirs), the mean of all positions
        known, other = ours.log_softmax(-1), theirs.log_softmax(-1)
        kl = finite_or_none(float((known.exp() * (known - other)).sum(-1).mean()))
    return replace(
        found,
        difference=_relative(reference.logits, logits),
        kl=kl,
        largest_difference=finite_or_none(float((theirs - ours).abs().max() / ours.abs().max())),
        same_choice=reference.same_choice(ours, theirs),
    )


def _relative(given: list[Tensor], found: list[Tensor]) -> float | None:
    """The difference of all logits together; None where it is not finite."""
    ours, theirs = torch.cat(given), torch.cat(found)
    difference = float((theirs - ours).norm(dtype=torch.float64) / ours.norm(dtype=torch.float64))
    return difference if math.isfinite(difference) else None


def _labeled(evaluation: Evaluation, model: TrainingModel) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Return the first short rows (or the shortest ones) and the targets of their last labeled positions.

    Of a preference pair, the row is the chosen answer.
    """
    rows = evaluation.rows
    order = np.argsort(np.where(rows.lengths <= SHORT_ROW_TOKENS, 0, rows.lengths), kind="stable")
    batches = [evaluation.layout.batch(rows, [order[i : i + 1]], 1, epoch=0) for i in range(min(MAX_ROWS, len(order)))]
    given: dict[str, Tensor] = {}
    targets: list[Tensor] = []
    for i, batch in enumerate(batches):
        whole = slice(batch.lengths[0])  # the first document, without the padding of the bin
        own = batch.label_rows < batch.lengths[0]
        targets.append(batch.targets[own][-MAX_POSITIONS:])
        given[f"ids.{i}"] = batch.ids[0, whole].contiguous()
        if not model.pooled:
            given[f"at.{i}"] = batch.label_rows[own][-MAX_POSITIONS:]
        if batch.token_type_ids is not None and model.takes_segments:
            given[f"sides.{i}"] = batch.token_type_ids[0, whole].contiguous()
    return given, targets


def by_transformers(
    folder: Path, loading: Mapping[str, Any], reference: Reference, evaluation: Evaluation
) -> Reloaded | str:
    """Load a model by transformers in a fresh process; `loading` says how PEFT loads an adapter, and onto what, and
    whether a digest of the tensors is asked for.
    """
    with tempfile.TemporaryDirectory(prefix="verify-export-") as place:
        sections = evaluation.sections(tuned=True)
        plan = {
            "config": None,
            "base": None,
            "dtype": "float32",
            "bitsandbytes": None,
            "vocab_size": None,
            "stacks": [],
            "digest": False,
            "unpacked": None,
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
        found = load_file(plan["out"])
        with safe_open(plan["out"], "pt") as content:
            digest = (content.metadata() or {}).get("digest")
    logits = [found[str(i)] for i in range(len(reference.targets))]
    return Reloaded(reference.ids, reference.loss(logits), logits, digest)


def run_fresh(program: str, plan: Mapping[str, Any]) -> dict[str, Any] | str:
    """What a program writes as JSON to `out` of its plan; a text: what went wrong."""
    with tempfile.TemporaryDirectory(prefix="verify-export-") as place:
        out = Path(place) / "out.json"
        failure = _run(program, {**plan, "out": str(out)}, Path(place) / "plan.json")
        return failure if failure is not None else dict(json.loads(out.read_text()))


def _run(program: str, plan: Mapping[str, Any], file: Path) -> str | None:
    """Run a file of Python with a plan; returns what went wrong, or None."""
    file.write_text(json.dumps(plan))
    done = subprocess.run(
        [sys.executable, "-P", program, str(file)],  # -P: nothing is imported from its own folder
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        cwd=file.parent,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode < 0:
        return f"killed by signal {-done.returncode}, perhaps for want of memory"
    return done.stderr.strip().splitlines()[-1] if done.returncode else None
