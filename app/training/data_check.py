"""`app.check data`: what a run would learn from, all rows, before it is started. No weights, and no row stops it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from app.config.dataset import formats_of, has_chats, sources_of
from app.config.schema import DatasetConfig, RunConfig
from app.config.tasks import task_of
from app.data import length_statistics
from app.data.chat_template import other_template
from app.data.data_report import Counts, stop_reasons, without_stops
from app.data.loader import Loader, StepSplit
from app.data.prepare import Data, prepare
from app.data.sources import Source
from app.data.token_dataset import TokenRows
from app.errors import ConfigError
from app.model.source import config_numbers, positions_of
from app.model.tokenizer import load_tokenizer
from app.training.auto_settings import has_auto_bins, suggested_bin, with_bins
from app.training.resolve import (
    StepPlan,
    build_meta_model,
    layout_of,
    limit_to_positions,
    objective_of,
    plan_steps,
    require_known_ids,
    resolve_classes,
    resolve_format,
)
from app.training.samples import preview


@dataclass(frozen=True, slots=True, kw_only=True)
class DataCheck:
    """Facts about the data. `stops` are the errors that a run with these settings would end with."""

    run: RunConfig
    data: Data
    packing: length_statistics.Packing
    padded_fill: float | None
    loader: Loader
    plan: StepPlan | None  # None where no row is left
    processes: int
    positions: int | None  # that the model has
    other_template: str  # what model.chat_template may be instead
    preview: dict[str, Any]
    stops: list[str]

    def facts(self) -> dict[str, Any]:
        """`data` of check.json, without the advice."""
        train, held = self.data.report.train, self.data.report.eval
        return {
            "format": formats_of(self.run.dataset),
            "max_length": self.run.dataset.max_length,
            **_split(train),
            "duplicate_rows": train.duplicates,  # held-out ones included: equal rows are on the same side
            "held_out": train.held_out,
            **self._packing(),
            **self._steps(),
            "length_percentiles": length_statistics.percentiles(self.data.train.lengths, train),
            "lengths": length_statistics.histogram(self.data.train.lengths),
            "overlong_lengths": length_statistics.over_long(train),
            "sources": self._sources(),
            "eval": None if held is None or self.data.eval is None else self._held(held, self.data.eval),
            "preview": self.preview,
            "lines": self.data.report.lines(),
            "notes": self.data.report.notes,
            "counts": self.data.report.as_dict(),
            "stops": self.stops,
        }

    def _held(self, counts: Counts, rows: TokenRows) -> dict[str, Any]:
        return {
            **_split(counts),
            "duplicate_rows": int(rows.is_duplicate.sum()),
            "also_trained_on": self.data.report.shared,
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

    def _packing(self) -> dict[str, Any]:
        return {
            "packing": self.run.batching.packing,
            "bin_tokens": self.run.batching.bin_tokens,
            "bins": self.packing.bins,
            "fill": self.packing.fill,
            "lower_bound_bins": self.packing.least,
            "padded_fill": self.padded_fill,
        }

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
    """Resolve and prepare the data as a run in `processes` would, and collect what stops it instead of raising."""
    run, notes = resolve_format(limit_to_positions(run, say))
    if has_auto_bins(run):
        run = with_bins(run, suggested_bin(run))
        notes = [*notes, f"batching.tokens=auto is found by a run; here bins have {run.batching.bin_tokens:,} tokens"]
    found: list[str] = []

    def judge(section: DatasetConfig, source: Source, counts: Counts) -> None:
        asked = replace(run.dataset, path=section.path, format=section.format, columns=section.columns)
        found.extend(stop_reasons(asked, source, counts, positions_of(run.model)))

    tokenizer = load_tokenizer(run.model, needs_template=has_chats(run.dataset))
    data = prepare(without_stops(run.dataset), tokenizer, run.cache_dir, notes, judge, run.task.labels)
    try:
        run = resolve_classes(run, data.classes)
    except ConfigError as problem:
        found += problem.problems
    ids_fit = _fits_config(run, data)
    # building the model, even without memory, takes longer than the rest of a small check
    meta_model = None if ids_fit and task_of(run.task).sees != "either" else build_meta_model(run)
    objective = objective_of(run, tokenizer, meta_model)
    found += [] if ids_fit else _unknown_ids(run, data, meta_model)
    share = StepSplit(run.batching.accumulation, processes)
    loader = Loader(data.train, layout_of(run, run.batching.rows, tokenizer, objective), share, run.seed)
    lengths = data.train.lengths
    rows_per_step = run.batching.rows * share.micro_batches * processes  # in padded micro-batches
    return DataCheck(
        run=run,
        data=data,
        packing=length_statistics.packed(lengths, max(run.batching.bin_tokens, run.dataset.max_length)),
        padded_fill=length_statistics.padded_fill(lengths, run.batching.rows, rows_per_step),
        loader=loader,
        plan=plan_steps(run.training, loader.steps_per_epoch) if loader.num_units else None,
        processes=processes,
        positions=positions_of(run.model),
        other_template=other_template(tokenizer),
        preview=preview(data.train, objective, tokenizer, first=True),
        stops=found,
    )


def _fits_config(run: RunConfig, data: Data) -> bool:
    """Whether config.json alone says that the model knows all ids."""
    vocabulary = config_numbers(run.model).get("vocab_size")
    largest = max(rows.largest_id for rows in (data.train, data.eval) if rows is not None)
    return isinstance(vocabulary, int) and largest < vocabulary


def _unknown_ids(run: RunConfig, data: Data, meta_model: Any) -> list[str]:
    vocabulary = meta_model.get_input_embeddings().num_embeddings
    try:
        require_known_ids(run.model, [data.train, data.eval], vocabulary)
    except ConfigError as problem:
        return list(problem.problems)
    return []


def _split(counts: Counts) -> dict[str, Any]:
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
