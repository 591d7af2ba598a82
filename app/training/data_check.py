"""`app.check data`: what a run would learn from, all rows, before it is started. No weights, and no row stops it."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.base.structure import BaseModel, open_base
from app.config.dataset import formats_of, sources_of
from app.config.schema import RunConfig
from app.data import length_statistics
from app.data.chat_template import other_template
from app.data.data_report import RowCounts
from app.data.loader import Loader
from app.data.prepare import Data
from app.errors import AppError
from app.training.auto_settings import has_auto_bins, suggested_bin, with_bins
from app.training.rows import StepPlan, loader_of, plan_steps, read_rows, rows_of_also
from app.training.samples import preview


@dataclass(frozen=True, slots=True, kw_only=True)
class DataCheck:
    """Facts about the data. `stops` are the errors that a run with these settings would end with."""

    run: RunConfig
    data: Data
    documents_per_row: int
    packing: length_statistics.Packing
    padded_fill: float | None
    loader: Loader
    plan: StepPlan | None  # None where no row is left
    processes: int
    base: BaseModel
    other_template: str  # what model.chat_template may be instead
    preview: dict[str, Any]
    stops: list[str]

    @property
    def sample_lengths(self) -> NDArray[np.int32]:
        """Tokens that dataset.max_length bounds: of a pair those of its longer answer."""
        rows = self.data.train
        return rows.longer_answers if self.documents_per_row > 1 else rows.lengths

    def facts(self) -> dict[str, Any]:
        """`data` of check.json, without the advice."""
        train, held = self.data.report.train, self.data.report.eval
        return {
            "format": formats_of(self.run.dataset),
            "max_length": self.run.dataset.max_length,
            **_split(train),
            "duplicate_rows": train.duplicates,  # held-out ones included: equal rows are on the same side
            "held_out": train.held_out,
            "packing": self.run.batching.packing,
            "bin_tokens": self.run.batching.bin_tokens,
            "bins": self.packing.bins,
            "fill": self.packing.fill,
            "lower_bound_bins": self.packing.least,
            "padded_fill": self.padded_fill,
            **self._steps(),
            "length_percentiles": length_statistics.percentiles(self.sample_lengths, train),
            "lengths": length_statistics.histogram(self.sample_lengths),
            "overlong_lengths": length_statistics.over_long(train),
            "sources": self._sources(),
            "eval": None
            if held is None or self.data.eval is None
            else {
                **_split(held),
                "duplicate_rows": int(self.data.eval.is_duplicate.sum()),
                "also_trained_on": self.data.report.shared,
            },
            "preview": self.preview,
            "lines": self.data.report.lines(),
            "notes": self.data.report.notes,
            "counts": asdict(self.data.report),
            "stops": self.stops,
        }

    def _sources(self) -> list[dict[str, Any]]:
        """One entry for each source of a mix: what was read of it, and what an epoch has of it."""
        report, sections = self.data.report, sources_of(self.run.dataset)
        return [
            {
                "name": name,
                "format": sections[name].format,
                **_split(counts),
                "duplicate_rows": counts.duplicates,
                "held_out": counts.held_out,
                "weight": share.weight,
                "drawn": share.drawn,
                "tokens": share.tokens,
                "trained_tokens": share.trained_tokens,
                "share": share.tokens / max(report.train.tokens, 1),
            }
            for (name, counts), share in zip(report.sources.items(), report.shares.values(), strict=True)
        ]

    def _steps(self) -> dict[str, Any]:
        plan, train = self.plan, self.data.report.train
        an_epoch = plan.steps_per_epoch if plan else 0
        return {
            "steps": plan.steps if plan else 0,
            "steps_per_epoch": an_epoch,
            "epochs": plan.epoch(plan.steps) if plan else 0.0,
            "units_per_step": self.loader.units_per_step,
            "unit_name": self.loader.unit_name,
            "processes": self.processes,
            "tokens_per_step": train.tokens / an_epoch if an_epoch else 0.0,
            "trained_tokens_per_step": train.trained_tokens / an_epoch if an_epoch else 0.0,
        }


def check_data(run: RunConfig, processes: int, say: Callable[[str], None]) -> DataCheck:
    """Prepare the data as a run in `processes` would, and collect what stops it instead of raising."""
    stops: list[str] = []
    prepared = read_rows(run, open_base(run.model, run.task), say, problems=stops)
    try:
        prepared.data.report.notes += rows_of_also(prepared)[1]
    except AppError as refused:
        stops.extend(refused.problems)
    auto = prepared.run
    config = with_bins(auto, suggested_bin(auto)) if has_auto_bins(auto) else auto
    loader = loader_of(prepared, config, processes)
    batching, lengths = config.batching, prepared.data.train.lengths
    rows_per_step = batching.rows * batching.accumulation * processes  # in padded micro-batches
    return DataCheck(
        run=config,
        data=prepared.data,
        documents_per_row=prepared.objective.documents_per_row,
        packing=length_statistics.packed(lengths, max(batching.bin_tokens, config.dataset.max_length)),
        padded_fill=length_statistics.padded_fill(lengths, batching.rows, rows_per_step),
        loader=loader,
        plan=plan_steps(config.training, loader.steps_per_epoch) if loader.num_units else None,
        processes=processes,
        base=prepared.base,
        other_template=other_template(prepared.tokenizer),
        preview=preview(
            prepared.data.train,
            prepared.objective,
            prepared.tokenizer,
            prepared.data.report.shares.values(),
            first=True,
        ),
        stops=stops,
    )


def _split(counts: RowCounts) -> dict[str, Any]:
    return {
        "source": counts.source,
        "rows": counts.rows_read,
        "bad_rows": counts.bad_rows,
        "bad": [
            {"reason": reason, "rows": number, "first": counts.bad_first[reason]}
            for reason, number in counts.bad_by_reason.items()
        ],
        "bad_places": counts.bad_places,
        "empty": counts.empty,
        "overlong_rows": counts.over_long,
        "overlong_tokens": counts.tokens_lost,
        "dropped": counts.dropped,
        "truncated": counts.truncated,
        "split": counts.split,
        "samples": counts.samples,
        "total_tokens": counts.tokens,
        "trained_tokens": counts.trained_tokens,
        "trained_share": counts.trained_tokens / counts.tokens if counts.tokens else None,
        "weights": None
        if not counts.weighted_samples
        else {
            "samples": counts.weighted_samples,
            "trained_tokens_count_as": counts.label_weight,
            "share": counts.label_weight / counts.tokens,
        },
        "labels": counts.classes,
        "longest": counts.longest,
    }
