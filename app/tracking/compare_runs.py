"""Comparison of two runs: their provenance, and their metrics line by line."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from app.tracking.formatting import format_number
from app.tracking.output_dir import finite_or_none

COMPARED = ("loss", "grad_norm", "lr", "tokens", "trained_tokens", "eval_loss")
_ABSENT = "none"
_MIN_VISIBLE_DIFFERENCE = 1e-3  # relative, in five digits


@dataclass(frozen=True, slots=True)
class Difference:
    """A fact that differs between the first run (`then`) and the second (`now`)."""

    name: str
    then: str
    now: str

    def __str__(self) -> str:
        return f"{self.name}: {self.then} then, {self.now} now"


def compare_programs(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """Return differences between two manifests that may change results: versions, commit, hardware."""
    return [
        *_different({"python": then.get("python")}, {"python": now.get("python")}),
        *_different(then.get("packages", {}), now.get("packages", {})),
        *_different(_code(then), _code(now)),
        *_different(then.get("hardware", {}), now.get("hardware", {})),
    ]


def compare_content(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """Return different hashes of rows, tokenizer and base; hashes missing in the older manifest are omitted."""
    names = {
        "train": "training data",
        "eval": "eval data",
        "tokenizer": "tokenizer",
        "base": "weights of the base",
        "transform": "dataset.transform",
    }
    hashes = {key: value for key, value in then.get("hashes", {}).items() if key in names}
    short = [{names[key]: _short(side.get(key)) for key in hashes} for side in (hashes, now.get("hashes", {}))]
    return _different(*short)


@dataclass(frozen=True, slots=True)
class MetricDifference:
    """A metric that differs. `relative` is to the larger value, and infinite if one is missing."""

    step: int
    name: str
    then: float | None
    now: float | None
    relative: float

    def __str__(self) -> str:
        is_visible = self.relative > _MIN_VISIBLE_DIFFERENCE  # else all digits are shown
        values = (self.then, self.now)
        then, now = (format_number(value) if value is not None and is_visible else str(value) for value in values)
        return f"{self.name} at step {self.step}: {then} then, {now} now (relative difference {self.relative:.1e})"

    def as_dict(self) -> dict[str, Any]:
        """Fields for JSON, which has no infinity."""
        return {**asdict(self), "relative": finite_or_none(self.relative)}


@dataclass(frozen=True, slots=True)
class LineComparison:
    """The lines that both runs have; a resumed run may have others."""

    lines: int
    last_step: int | None
    first: MetricDifference | None
    largest: MetricDifference | None

    def summary(self) -> str:
        if not self.lines:
            return "no steps in common"
        compared = f"{self.lines:,} lines up to step {self.last_step:,}"
        if self.first is None or self.largest is None:
            return f"{compared}, bit-identical"
        return f"{compared}\nfirst:   {self.first}\nlargest: {self.largest}"


def compare_lines(then: Iterable[Mapping[str, Any]], now: Iterable[Mapping[str, Any]]) -> LineComparison:
    """Compare the lines of two metrics.jsonl with equal step and kind."""
    before, after = _by_step(then), _by_step(now)
    shared = sorted(before.keys() & after.keys())
    differences = [diff for place in shared for diff in _metric_differences(place[0], before[place], after[place])]
    return LineComparison(
        lines=len(shared),
        last_step=shared[-1][0] if shared else None,
        first=differences[0] if differences else None,
        largest=max(differences, key=lambda diff: diff.relative, default=None),
    )


def _different(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    names = [*then, *(name for name in now if name not in then)]
    pairs = [(name, _shown(then.get(name)), _shown(now.get(name))) for name in names]
    return [Difference(name, before, after) for name, before, after in pairs if before != after]


def _code(manifest: Mapping[str, Any]) -> dict[str, Any]:
    program = manifest.get("program", {})
    git = program.get("git") or {}
    changes = " with uncommitted changes" if git.get("dirty") else ""
    commit = f"{_short(git['commit'])}{changes}" if git else None
    return {"program": program.get("version"), "commit": commit}


def _short(hash_: str | None) -> str | None:
    return None if hash_ is None else hash_[:12]


def _shown(value: Any) -> str:
    return _ABSENT if value is None else str(value)


def _by_step(lines: Iterable[Mapping[str, Any]]) -> dict[tuple[int, bool], Mapping[str, Any]]:
    return {(line["step"], "eval_loss" in line): line for line in lines}


def _metric_differences(step: int, then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterable[MetricDifference]:
    for name in COMPARED:
        before, after = then.get(name), now.get(name)
        if before != after:
            relative = (
                math.inf if before is None or after is None else abs(before - after) / max(abs(before), abs(after))
            )
            yield MetricDifference(step, name, before, after, relative)
