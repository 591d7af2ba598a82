"""The proof of an export: a fresh process reloads it, and its logits are those of the run's own model."""

import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from app.evaluation.run import Scoring
from app.exports import reload
from app.model.attention import own_attention
from app.model.build import ModelSections
from app.model.dtypes import DTYPES
from app.model.quantization import other_linear_layers
from app.model.tasks import task_of
from app.model.training_model import TrainingModel
from app.model.weights import build_on_meta

_ROWS = 8
_SHORT = 512  # tokens: such rows first
_POSITIONS = 64  # of each row
# Of logits computed twice in fp32 by kernels that add in another order.
_EXACT = 1e-5
# Half the distance of neighbouring numbers: the most that rounding takes of a weight, relative.
_ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 0.0}


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far the logits may be apart, relative to their size, and why."""

    value: float
    because: str


@dataclass(frozen=True, slots=True)
class Certificate:
    """What the fresh process found. The differences are None where it gave nothing to compare."""

    passed: bool
    tolerance: float
    tolerance_is: str
    difference: float | None  # all logits together, relative
    largest_difference: float | None  # of one logit, relative to the largest
    same_choice: float | None  # share of the positions at which both prefer the same token
    loss_before: float
    loss_after: float | None
    rows: int
    positions: int
    rows_are: str
    failure: str | None = None
    # where training computed with another base than whoever loads the export: the same rows as it had them
    training_difference: float | None = None
    training_loss: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """For export.json."""
        return asdict(self)

    def lines(self) -> str:
        """For people."""
        verdict = "passed" if self.passed else "FAILED"
        if self.failure is not None:
            return f"{verdict}: the fresh process ended without logits: {self.failure}"
        return (
            f"{verdict}: a fresh process differs by {self.difference:.1e} (tolerance {self.tolerance:.1e}, "
            f"{self.tolerance_is})\nloss {self.loss_before:.4f} -> {self.loss_after:.4f} at {self.positions} positions "
            f"of {self.rows} rows ({self.rows_are}), same choice at {self.same_choice:.1%}{self._in_training()}"
        )

    def _in_training(self) -> str:
        if self.training_loss is None:
            return ""
        return (
            f"\nthe base is loaded unquantised; on that of training the loss is {self.training_loss:.4f}, and logits "
            f"differ by {self.training_difference:.1e}"
        )


@dataclass(frozen=True, slots=True)
class Expected:
    """What the export must give: rows, and the logits of the run's own model."""

    rows: dict[str, Tensor]  # as files take them
    targets: list[Tensor]
    logits: list[Tensor]
    rows_are: str

    def loss(self, logits: list[Tensor]) -> float:
        """The mean over all positions."""
        losses = [
            torch.nn.functional.cross_entropy(each.double(), targets, reduction="sum")
            for each, targets in zip(logits, self.targets, strict=True)
        ]
        return float(sum(losses)) / sum(len(targets) for targets in self.targets)


def tolerance(dtype: str, rounded: int) -> Tolerance:
    """Each rounded matrix moves its outputs by less than the rounding of a weight, and independent errors add up as
    the square root of their number.
    """
    if not rounded or dtype == "fp32":
        return Tolerance(_EXACT, "fp32 arithmetic in another order")
    value = _EXACT + _ROUNDING[dtype] * rounded**0.5
    return Tolerance(value, f"{rounded} matrices rounded to {dtype}")


def expected(scoring: Scoring) -> Expected:
    """From the run's weights as training held them, in fp32 arithmetic; the model is let go again."""
    trainee = scoring.trainee(tuned=True).eval()
    reload.in_fp32(trainee)
    torch.set_float32_matmul_precision("highest")
    rows, targets = _labelled(scoring, trainee)
    found = reload.logits(trainee.language_model, rows, str(scoring.runtime.device))
    del trainee
    gc.collect()
    torch.cuda.empty_cache()
    return Expected(rows, targets, [found[str(i)] for i in range(len(targets))], scoring.rows_are)


def certify(
    folder: Path, base: Path | None, want: Expected, scoring: Scoring, allowed: Tolerance
) -> Certificate:
    """`base` is what an adapter in `folder` is loaded onto."""
    with tempfile.TemporaryDirectory(prefix="certificate-") as place:
        plan = _plan(folder, base, scoring, Path(place))
        save_file(want.rows, plan["rows"])
        failure = _run(plan, Path(place) / "plan.json")
        found = {} if failure else load_file(plan["out"])
    loss = want.loss(want.logits)
    known: dict[str, Any] = {
        "tolerance": allowed.value,
        "tolerance_is": allowed.because,
        "loss_before": loss,
        "rows": len(want.targets),
        "positions": sum(len(each) for each in want.targets),
        "rows_are": want.rows_are,
        "failure": failure,
    }
    if failure:
        return Certificate(
            passed=False, difference=None, largest_difference=None, same_choice=None, loss_after=None, **known
        )
    return _verdict(want, [found[str(i)] for i in range(len(want.targets))], known)


def beside_training(certificate: Certificate, want: Expected, trained: Expected) -> Certificate:
    """With what the model of training gives for the same rows, where that is not what was exported."""
    known, theirs = torch.cat(want.logits), torch.cat(trained.logits)
    apart = (theirs - known).norm(dtype=torch.float64) / known.norm(dtype=torch.float64)
    return replace(certificate, training_difference=_finite(apart), training_loss=want.loss(trained.logits))


def _verdict(want: Expected, found: list[Tensor], known: dict[str, Any]) -> Certificate:
    ours, theirs = torch.cat(want.logits), torch.cat(found)
    difference = _finite((theirs - ours).norm(dtype=torch.float64) / ours.norm(dtype=torch.float64))
    return Certificate(
        passed=difference is not None and difference <= known["tolerance"],
        difference=difference,
        largest_difference=_finite((theirs - ours).abs().max() / ours.abs().max()),
        same_choice=float((theirs.argmax(-1) == ours.argmax(-1)).double().mean()),
        loss_after=_finite(torch.tensor(want.loss(found))),
        **known,
    )


def _finite(number: Tensor) -> float | None:
    return float(number) if bool(number.isfinite()) else None


def _labelled(scoring: Scoring, trainee: TrainingModel) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The first short rows, else the shortest; of each the last positions that predict something, and what."""
    rows = scoring.rows
    order = np.argsort(np.where(rows.lengths <= _SHORT, 0, rows.lengths), kind="stable")
    batches = [
        scoring.layout.batch(rows, [order[i : i + 1]], 1, epoch=0) for i in range(min(_ROWS, len(order)))
    ]
    given: dict[str, Tensor] = {}
    for i, batch in enumerate(batches):
        whole = slice(batch.lengths[0])  # what fills a bin up is no part of the row
        given[f"ids.{i}"] = batch.ids[0, whole].contiguous()
        if not trainee.pooled:
            given[f"at.{i}"] = batch.label_rows[-_POSITIONS:]
        if batch.token_type_ids is not None and trainee.takes_segments:
            given[f"sides.{i}"] = batch.token_type_ids[0, whole].contiguous()
    return given, [batch.targets[-_POSITIONS:] for batch in batches]


def _plan(folder: Path, base: Path | None, scoring: Scoring, place: Path) -> dict[str, Any]:
    sections = scoring.sections(tuned=True)
    lm = build_on_meta(sections.model, task_of(sections.task), "eager")
    adapter = base is not None
    own_classes = adapter and task_of(sections.task).pooled
    return {
        "config": str(folder) if own_classes else None,
        "auto_class": task_of(sections.task).auto_class,
        "folder": str(folder),
        "base": str(base) if adapter else None,
        "dtype": plain_name(DTYPES[sections.precision].base) if adapter else "float32",
        "four_bit": four_bit_options(sections) if adapter else None,
        "attention": own_attention(lm),
        "trust_remote_code": sections.model.trust_remote_code,
        "device": str(scoring.runtime.device),
        "threads": scoring.runtime.threads if scoring.runtime.device.type == "cpu" else None,
        "rows": str(place / "rows.safetensors"),
        "out": str(place / "logits.safetensors"),
    }


def four_bit_options(sections: ModelSections) -> dict[str, Any] | None:
    """What BitsAndBytesConfig is told, as plain values."""
    if sections.quantizer is None:
        return None
    lm = build_on_meta(sections.model, task_of(sections.task), "eager")
    return sections.quantizer.bitsandbytes_arguments(other_linear_layers(lm))


def plain_name(dtype: torch.dtype) -> str:
    """As transformers takes it from a text."""
    return str(dtype).removeprefix("torch.")


def _run(plan: Mapping[str, Any], file: Path) -> str | None:
    """What went wrong, in words."""
    file.write_text(json.dumps(plan))
    done = subprocess.run(
        [sys.executable, "-P", reload.__file__, str(file)],  # -P: its own folder is no place to import from
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
