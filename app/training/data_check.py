"""`finetune check data`: all training data of a run, and advice on settings, without reading weights."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.base.base_model import BaseModel, open_base
from app.config.dataset import formats_of, has_chats, sources_of, trains_answers
from app.config.schema import RunConfig
from app.data import length_statistics
from app.data.chat_template import other_template
from app.data.data_report import MAX_DROPPED_SHARE, MAX_EVAL_FRACTION, MIN_EVAL_ROWS, RowCounts, eval_remedy
from app.data.loader import Loader
from app.data.prepare import Data
from app.data.roles import has_role
from app.data.row_pipeline import policy_for
from app.data.sources import train_source
from app.distributed.context import readers_of
from app.errors import AppError
from app.safe_text import many
from app.training.auto_settings import has_auto_bins, suggested_bin, with_bins
from app.training.rows import StepPlan, loader_of, plan_steps, read_rows, rows_of_also
from app.training.samples import preview


@dataclass(frozen=True, slots=True, kw_only=True)
class DataCheck:
    """Facts about the data. `stops` are the errors with which a run with these settings would fail."""

    run: RunConfig
    data: Data
    documents_per_row: int
    packing: length_statistics.Packing
    padded_fill: float | None
    loader: Loader
    plan: StepPlan | None  # None without rows
    processes: int
    base: BaseModel
    other_template: str  # alternative model.chat_template
    preview: dict[str, Any]
    stops: list[str]

    @property
    def sample_lengths(self) -> NDArray[np.int32]:
        """Tokens limited by dataset.max_length; of a pair, those of the longer answer."""
        rows = self.data.train
        return rows.longer_answers if self.documents_per_row > 1 else rows.lengths

    def facts(self) -> dict[str, Any]:
        """Return `data` of check.json without the advice."""
        train, held = self.data.report.train, self.data.report.eval
        return {
            "format": formats_of(self.run.dataset),
            "max_length": self.run.dataset.max_length,
            **_split(train),
            "duplicate_rows": train.duplicates,  # including eval rows: duplicates are in the same split
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
        """Return one entry per source of a mix: rows read, and its share of an epoch."""
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
    """Prepare the data as a run with `processes` would, and collect errors instead of raising them."""
    stops: list[str] = []
    prepared = read_rows(run, open_base(run.model, run.task), say, problems=stops)
    try:
        prepared.data.report.notes += rows_of_also(prepared)[1]
    except AppError as refused:
        stops.extend(refused.problems)
    auto = prepared.run
    config = with_bins(auto, suggested_bin(auto)) if has_auto_bins(auto) else auto
    readers = readers_of(processes, config.parallel.context)
    loader = loader_of(prepared, config, readers)
    batching, lengths = config.batching, prepared.data.train.lengths
    rows_per_step = batching.rows * batching.accumulation * readers  # in padded micro-batches
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


# ---- data advice


KEPT_SHARE = 0.99  # of samples that the suggested max_length keeps whole
MAX_BAD_SHARE = 0.01  # of the rows
MIN_BIN_FILL = 0.9
MIN_PADDED_FILL = 0.85  # of padded micro-batches
MIN_TRAINED_SHARE = 0.05  # of the tokens
LONG_TEXT_CHARS = 100  # per row, of an unread column
MIN_STEPS = 20  # fewer steps make a poor schedule

Advice = tuple[str, str]  # setting to type, with placeholders for unknown values, and reason


def advice(check: DataCheck) -> Iterator[Advice]:
    """Yield advice, most harmful problem first."""
    for rule in (_bad_rows, _unread, _over_long, _trained_share, _template, _duplicates, _held_out, _filling, _steps):
        yield from rule(check)


def _bad_rows(check: DataCheck) -> Iterator[Advice]:
    counts, dataset = check.data.report.train, check.run.dataset
    if counts.bad_rows > MAX_BAD_SHARE * counts.rows_read and dataset.on_bad_row == "skip":
        first = f"first: {counts.first_problem}"
        yield (
            "dataset.on_bad_row=error",
            f"{counts.bad_rows:,} of {counts.rows_read:,} rows are skipped ({first}); fix them, or the column setting",
        )


def _over_long(check: DataCheck) -> Iterator[Advice]:
    run, counts, lengths = check.run, check.data.report.train, check.sample_lengths
    limit = run.dataset.max_length
    needed = length_statistics.length_that_keeps(KEPT_SHARE, lengths, counts)
    if not counts.tokens_lost or needed is None or needed <= limit:
        return
    lost = f"{many(counts.tokens_lost, 'token')} lost now"
    length = check.base.longest_row(needed)
    then, now = (length_statistics.share_within(maximum, lengths, counts) for maximum in (length, limit))
    if length > limit and then > now:
        room = length * check.documents_per_row
        bins = f" batching.tokens={room}" if run.batching.packing and room > run.batching.bin_tokens else ""
        remedy = "choose a model with a longer context for the others"
        most = "" if length == needed else f"; {check.base.limit_text(length)}, {remedy}"
        most_dropped = {"auto": MAX_DROPPED_SHARE, "error": 0.0}.get(run.dataset.on_overflow, 1.0)
        ends = " dataset.on_overflow=drop" if counts.dropped and 1 - then > most_dropped else ""
        yield (
            f"dataset.max_length={length}{bins}{ends}",
            f"keeps {then:.1%} of the samples whole instead of {now:.1%}{most}; {lost}",
        )
    elif policy_for(run.dataset.on_overflow, run.dataset.format) != "truncate":
        most = check.base.limit_text(length)
        remedy = "truncation keeps the start of each sample; or choose a model with a longer context"
        yield "dataset.on_overflow=truncate", f"{most}, {lost}: {remedy}"


def _unread(check: DataCheck) -> Iterator[Advice]:
    counts, dataset = check.data.report.train, check.run.dataset
    reported = counts.missed_places if check.stops else {}
    chars = {name: counts.missed_chars[name] // rows for name, rows in counts.missed.items() if name not in reported}
    long = [name for name in chars if chars[name] >= LONG_TEXT_CHARS and 2 * counts.missed[name] > counts.rows_kept]
    if long:
        shown = ", ".join(f"{name} ({chars[name]:,} characters per row)" for name in long)
        yield (
            f"dataset.leave_out=[{','.join([*dataset.leave_out, *long])}]",
            f"not read: {shown}. dataset.columns.FIELD=NAME reads a column, this setting ignores all of them",
        )
    for name, rows in counts.unread_columns.items():
        if dataset.format == "text" and has_role(name, "label") and 2 * rows > counts.rows_kept:
            yield (
                f"task=classification dataset=labelled_text dataset.columns.label={name}",
                f"column {name} is not read; if it is the class of each text, this trains a classifier instead",
            )
    for marker, rows in counts.foreign_markers.items():
        yield (
            "dataset=messages",
            f"{many(rows, 'text')} with {marker}: chats already rendered for a model, so prompts are trained too;"
            " rows of messages train only the answers, with the chat template of this model",
        )


def _duplicates(check: DataCheck) -> Iterator[Advice]:
    report, dataset = check.data.report, check.run.dataset
    if report.train.duplicates and not dataset.deduplicate:
        repeated = f"{many(report.train.duplicates, 'sample')} of {report.train.samples + report.train.held_out:,}"
        yield (
            "dataset.deduplicate=true",
            f"{repeated} repeat an earlier one and are trained more often than others; drop them, unless that "
            "is intended",
        )
    if report.shared:
        named = "eval_path" if dataset.eval_path is not None else "eval_split"
        yield (
            f"dataset.{named}=null dataset.eval_fraction=0.02",
            f"{many(report.shared, 'eval sample')} also in the training set: eval_loss will be too low; hold out part "
            f"of the training rows, without duplicates across the split, or remove them from dataset.{named}",
        )


def _held_out(check: DataCheck) -> Iterator[Advice]:
    held, samples, dataset = check.data.eval, len(check.data.train), check.run.dataset
    has_own = dataset.mix or dataset.eval_path or dataset.eval_split
    unread = () if has_own else train_source(dataset).other_splits
    if unread and (held is None or len(held) < MIN_EVAL_ROWS):
        split = "validation" if "validation" in unread else unread[0]
        few = "no eval set" if held is None else f"only {many(len(held), 'eval sample')}"
        yield f"dataset.eval_split={split} dataset.eval_fraction=0", f"{few}, and the split {split} is not read"
    elif held is None:
        if samples:
            yield eval_remedy(samples), "no eval set: overfitting would go unnoticed"
    elif 0 < len(held) < MIN_EVAL_ROWS and dataset.eval_max_rows is None:
        total, is_part = samples + len(held), dataset.eval_path is None and dataset.eval_split is None
        is_enough = is_part and total * MAX_EVAL_FRACTION >= MIN_EVAL_ROWS
        remedy = eval_remedy(total) if is_enough else "dataset.eval_path=FILE"
        few = f"{many(len(held), 'eval sample')} {'is' if len(held) == 1 else 'are'} too few for a reliable loss"
        yield remedy, f"{few}; use at least {MIN_EVAL_ROWS}"


def _trained_share(check: DataCheck) -> Iterator[Advice]:
    run, counts = check.run, check.data.report.train
    share = counts.trained_tokens / max(counts.tokens, 1)
    is_partial = trains_answers(run.dataset) and counts.tokens
    if not is_partial or share >= MIN_TRAINED_SHARE:
        return
    only = f"only {share:.1%} of the tokens are trained"
    if run.dataset.train_on == "last":
        yield "dataset.train_on=assistant", f"{only}; `assistant` trains all answers, not only the last"
    elif not counts.expanded_into:  # otherwise the template is the cause, with separate advice
        yield "dataset.train_on=all", f"{only}; `all` also trains the prompts"


def _template(check: DataCheck) -> Iterator[Advice]:
    counts = check.data.report.train
    if counts.expanded_into and not counts.joined:
        samples = f"{counts.expanded_into:,} samples that repeat each other"
        rewritten = (
            f"the chat template rewrites earlier turns, so {many(counts.unstable, 'conversation')} became {samples}"
        )
        if counts.join_saves and not counts.unstable_reasoning:
            length = counts.unstable_tokens["join"] / counts.unstable_tokens["expand"]
            joined = f"`join` trains the same answers in one sample per conversation, with {length:.0%} of the tokens"
            cut = " dataset.on_overflow=truncate" if counts.dropped else ""  # a dropped sample has all answers
            yield f"dataset.on_unstable_template=join{cut}", f"{rewritten}; {joined}"
        else:
            yield "dataset.on_unstable_template=last", f"{rewritten}; `last` trains only the last turn of each"
    if counts.endless and has_chats(check.run.dataset):  # no template writes rows of token IDs
        ends = f"no special token ends the answer in {many(counts.endless, 'sample')}"
        yield f"model.chat_template={check.other_template}", f"{ends}: the model will not learn to stop"
    if counts.unseen:
        omitted = f"the content of {many(counts.unseen, 'system, user or tool message')}"
        yield f"model.chat_template={check.other_template}", f"this template omits {omitted}"
    if counts.glued:
        yield (
            "dataset.columns.prompt=...",
            f"{many(counts.glued, 'sample')} with a token across prompt and answer, which is not trained: move "
            "whitespace from the end of prompts to the start of answers",
        )


def _filling(check: DataCheck) -> Iterator[Advice]:
    batching, fill, padded = check.run.batching, check.packing.fill, check.padded_fill
    if fill is None or padded is None:
        return
    if not batching.packing:
        if padded < MIN_PADDED_FILL:
            bins = f"bins of {batching.bin_tokens:,} tokens {fill:.1%}"
            yield "batching.packing=true", f"padded micro-batches are {padded:.0%} full, {bins}"
    elif fill < MIN_BIN_FILL and check.packing.bins > 1:
        larger = 2 * batching.bin_tokens
        then = length_statistics.packed(check.data.train.lengths, larger).fill or 0.0
        if then > fill:
            yield f"batching.tokens={larger}", f"bins are {fill:.0%} full, these would be {then:.0%}"


def _steps(check: DataCheck) -> Iterator[Advice]:
    plan, run = check.plan, check.run
    if plan is None:
        return
    if run.training.max_steps is None:
        if plan.steps < MIN_STEPS:
            number = f"only {many(plan.steps, 'training step')}"
            if run.batching.accumulation > 1:
                yield "batching.accumulation=1", f"{number}: smaller steps would give more"
            yield f"training.epochs={-(-MIN_STEPS // plan.steps_per_epoch)}", number
    elif plan.steps < plan.steps_per_epoch:
        seen = f"{plan.steps:,} steps cover {plan.epoch(plan.steps):.1%} of the rows"
        yield "training.max_steps=null", f"{seen}; an epoch has {plan.steps_per_epoch:,}"
