"""Prepare token rows from the section `dataset`: training and eval sets, mixtures, and a report of all rows.

A weight is a repetition count: 2 has each row of the source twice per epoch, 0.25 has a quarter of its rows, those with
the lowest hashes. So shares are exact and independent of the seed, and added rows hardly change them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.chat_rendering import ConversationRefused, render_chat
from app.config.dataset import has_chats, has_pairs, paths_of, sources_of
from app.config.kinds import LABELED_FORMATS, ROW_FORMATS, fields_of
from app.config.schema import DatasetConfig
from app.data.chat_template import missing_markers, other_template
from app.data.data_report import (
    MAX_PLACES,
    DataReport,
    LongestRow,
    RowCounts,
    SourceShare,
    split_lines,
    stop_reasons,
    without_stops,
)
from app.data.detect_format import detect_format
from app.data.labels import LABELINGS, KnownLabels
from app.data.row_pipeline import policy_for, write_rows
from app.data.row_sample import RowSample
from app.data.rows import escaped
from app.data.sources import RandomRows, Source, eval_source, open_source, train_source, unread_splits
from app.data.token_dataset import TokenRows, cache_key, cached_rows
from app.data.tokenizer import Tokenizer, check_tokenizer, separates_pairs
from app.data.transform import origin_of
from app.errors import DataError
from app.safe_text import listed, many

_HASH_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # makes the selection independent of the train/eval split


@dataclass(frozen=True, slots=True)
class Pool:
    """Rows of all sources, each once, in source order."""

    rows: TokenRows
    source_of: NDArray[np.int64]  # source index of each row
    counts: Mapping[str, RowCounts]  # by source
    weights: Sequence[float]

    @classmethod
    def from_sources(cls, sources: Mapping[str, tuple[TokenRows, RowCounts]], weights: Sequence[float]) -> "Pool":
        parts = [rows for rows, _ in sources.values()]
        source_of = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        rows = parts[0] if len(parts) == 1 else TokenRows.concat(parts)
        return cls(rows, source_of, {name: counts for name, (_, counts) in sources.items()}, weights)

    def keep(self, mask: NDArray[np.bool_]) -> "Pool":
        """Keep only some of the rows and recount."""
        rows = self.rows.select(np.flatnonzero(mask))
        pool = Pool(rows, self.source_of[mask], self.counts, self.weights)
        for number, counts in enumerate(self.counts.values()):
            recount(counts, rows.select(pool.rows_of(number)))
        return pool

    def deduplicated(self, *, drop: bool) -> "Pool":
        """Count duplicates across all sources, and drop them if `drop`."""
        duplicate = self.rows.is_duplicate
        for counts, number in zip(self.counts.values(), self._per_source(duplicate), strict=True):
            counts.duplicates = number
            counts.duplicates_dropped = number if drop else 0
        return self.keep(~duplicate) if drop and duplicate.any() else self

    def without_held_out(self, out: NDArray[np.bool_]) -> "Pool":
        for counts, number in zip(self.counts.values(), self._per_source(out), strict=True):
            counts.held_out = number
        return self.keep(~out)

    def rows_of(self, number: int) -> NDArray[np.int64]:
        """Return the indices of the rows of a source."""
        return np.flatnonzero(self.source_of == number)

    def epoch(self) -> tuple[TokenRows, dict[str, SourceShare]]:
        """Return the rows of an epoch, repeated by weight, and the share of each source."""
        if "" in self.counts:  # a single source without a mix
            return self.rows, {}
        drawn = [times(self.rows, self.rows_of(n), weight) for n, weight in enumerate(self.weights)]
        shares = {}
        for number, (name, weight) in enumerate(zip(self.counts, self.weights, strict=True)):
            rows = self.rows.select(drawn[number])
            tokens = int(rows.lengths.sum(dtype=np.int64))
            shares[name] = SourceShare(weight, len(self.rows_of(number)), len(rows), tokens, rows.num_trained)
        return self.rows.select(np.concatenate(drawn)), shares

    def total(self) -> RowCounts:
        return total(list(self.counts.values()))

    def _per_source(self, chosen: NDArray[np.bool_]) -> list[int]:
        counted: list[int] = np.bincount(self.source_of[chosen], minlength=len(self.counts)).tolist()
        return counted


def times(rows: TokenRows, chosen: NDArray[np.int64], weight: float) -> NDArray[np.int64]:
    """Repeat the chosen rows `weight` times; for the fraction, take the rows with the lowest hashes."""
    whole = int(weight)
    rest = round((weight - whole) * len(chosen))
    # samples of one conversation share the hash, so they are selected together, except at the end
    order = np.argsort(rows.split_hashes[chosen] * _HASH_FACTOR, kind="stable")
    return np.concatenate([np.repeat(chosen, whole), np.sort(chosen[order[:rest]])])


def recount(counts: RowCounts, rows: TokenRows) -> None:
    """Recount samples, tokens, weights and classes after rows were removed."""
    counts.samples = len(rows)
    counts.tokens = int(rows.lengths.sum(dtype=np.int64))
    counts.trained_tokens = rows.num_trained
    counts.label_weight = rows.label_weight
    counts.weighted_samples = rows.num_weighted
    counts.classes = rows.class_counts()


def total(parts: Sequence[RowCounts]) -> RowCounts:
    """Merge the counts of several sources: sums, the longest sample, the first locations."""
    if len(parts) == 1:
        return parts[0]
    merged: dict[str, Any] = {
        field.name: _together(field.name, [getattr(c, field.name) for c in parts]) for field in fields(RowCounts)
    }
    return RowCounts(**merged)


def _together(name: str, values: Sequence[Any]) -> Any:
    if isinstance(values[0], int | float):
        return max(values) if name == "longest" else sum(values)
    if isinstance(values[0], list):
        return [item for value in values for item in value][:MAX_PLACES]
    if isinstance(values[0], dict):
        merged: dict[str, Any] = {}
        for key, inner in (item for value in values for item in value.items()):
            merged[key] = merged.get(key, 0) + inner if isinstance(inner, int) else merged.get(key, inner)
        return merged
    texts = [value for value in values if value]
    return " + ".join(texts) if name == "source" else next(iter(texts), "")


# ---- prepare


_LARGE_NUMBER = 20.0  # a larger mean or standard deviation gets a note
_RARE_ROWS = 8  # a label with fewer rows gets a note
_SETTINGS_IN_KEY = ("format", "leave_out", "max_length", "train_on", "on_overflow", "on_unstable_template")


@dataclass(frozen=True, slots=True)
class Data:
    """Token rows of both splits; `eval` is None without an eval set."""

    train: TokenRows
    eval: TokenRows | None
    report: DataReport
    classes: tuple[str, ...] = ()  # all labels, in the order of the model


RowsOfSource = tuple[TokenRows, RowCounts]
Judge = Callable[[DatasetConfig, Source, RowCounts], None]  # raises if the rows of a source are not usable


def stop_if_wrong(
    config: DatasetConfig, source: Source, counts: RowCounts, longest_row: LongestRow = int, *, trains: bool = True
) -> None:
    """Raise DataError with all errors of a source that stop a run."""
    problems = list(stop_reasons(config, source, counts, longest_row, trains=trains))
    if problems:
        raise DataError(problems)


def prepare(
    config: DatasetConfig,
    tokenizer: Tokenizer,
    cache_dir: str,
    notes: Sequence[str] = (),
    judge: Judge = stop_if_wrong,
    classes: Sequence[str] = (),
    labeling: str = "single",
) -> Data:
    """Return the token rows of both splits, from the cache if their inputs have not changed.

    `notes` are added to the report. `classes` are the allowed labels; if empty, all labels of the training source.
    `labeling` is the label type.
    """
    labels = KnownLabels(labeling, tuple(classes))
    rows_of = partial(_rows, tokenizer=tokenizer, cache_dir=cache_dir, judge=judge, labels=labels)
    eval_rows = eval_source(config)
    pool = _pool(config, rows_of)
    label_names = tuple(classes or pool.rows.class_counts())
    _require_equal_labels(pool.rows, config, () if classes else label_names)
    report = DataReport(pool.total(), notes=[*notes, *unread_splits(config), *_notes(config, tokenizer)])
    if eval_rows is not None:
        labels = replace(labels, classes=label_names)
        chosen, report.eval = rows_of(eval_rows, config.eval_max_rows, replace(config, sample=None), labels=labels)
        report.shared = int(np.isin(chosen.ids_hashes, pool.rows.ids_hashes).sum())
        data = _with_epoch(pool, chosen, report)
    else:
        data = _hold_out(pool, config, report)
    report.notes += _class_notes(label_names, data.train) if LABELINGS[labeling].named else _number_notes(data.train)
    return replace(data, classes=label_names)


def rows_to_score(
    config: DatasetConfig,
    tokenizer: Tokenizer,
    cache_dir: str,
    notes: Sequence[str] = (),
    judge: Judge = stop_if_wrong,
    classes: Sequence[str] = (),
    labeling: str = "single",
) -> Data:
    """Return the eval set of a run as `eval`, without reading training rows; all rows if there is no eval set."""
    labels = KnownLabels(labeling, tuple(classes))
    rows_of = partial(_rows, tokenizer=tokenizer, cache_dir=cache_dir, judge=judge, labels=labels)
    eval_rows = eval_source(config)
    if eval_rows is not None:
        rows, counts = rows_of(eval_rows, config.eval_max_rows, replace(config, sample=None))
    elif config.eval_fraction == 0:
        pool = _pool(config, rows_of, most=config.eval_max_rows)
        counts = pool.total()
        rows = _first(pool.rows, config.eval_max_rows, counts)
    else:
        pool = _pool(config, rows_of)
        held = _hold_out(pool, config, DataReport(pool.total()))
        if held.eval is None or held.report.eval is None:
            raise DataError(
                f"dataset.eval_fraction={config.eval_fraction} of {len(pool.rows):,} samples is empty, so there "
                "is nothing to evaluate; set dataset.eval_fraction=0 to evaluate all of them"
            )
        rows, counts = held.eval, held.report.eval
    return Data(rows.select([]), rows, DataReport(RowCounts(), counts, notes=[*notes, *_notes(config, tokenizer)]))


def extra_eval_rows(
    path: str,
    config: DatasetConfig,
    formats: Sequence[str],
    tokenizer: Tokenizer,
    cache_dir: str,
    judge: Judge,
    labels: KnownLabels,
) -> tuple[TokenRows, list[str]]:
    """Return the rows of `eval.also` and report lines.

    The format is detected among `formats`; other settings are those of the run if the format allows them.
    """
    config = replace(config, transform=None)  # these rows have columns of their own
    source = open_source(path, "eval.also", config, None)
    section, _ = detect_format(config, source, "dataset", formats, lambda: bool(tokenizer.chat_template))
    shape = ROW_FORMATS[section.format]
    section = replace(
        section,
        train_on=config.train_on if config.train_on in shape.train_on else "auto",
        on_overflow="auto" if config.on_overflow == "split" else config.on_overflow,
        sample=None,
    )
    reader = {"tokenizer": tokenizer, "cache_dir": cache_dir, "judge": judge, "labels": labels}
    rows, counts = _rows(source, config.eval_max_rows, section, **reader)
    return rows, [*split_lines("also", counts), f"also: read as dataset={section.format}"]


def _pool(config: DatasetConfig, rows_of: Callable[..., RowsOfSource], most: int | None = None) -> Pool:
    """Load each source from its cache entry; weights are not part of the key. `most` limits the rows per source."""
    sections = sources_of(config)
    sources = {}
    for name, section in sections.items():
        limit = min((n for n in (section.max_rows, most) if n is not None), default=None)
        sources[name] = rows_of(train_source(section, name), limit, section)
    weights = [config.mix[name].weight if name else 1.0 for name in sections]
    return Pool.from_sources(sources, weights).deduplicated(drop=config.deduplicate)


def _with_epoch(pool: Pool, held_out: TokenRows | None, report: DataReport) -> Data:
    train, report.shares = pool.epoch()
    if report.shares:
        report.sources = dict(pool.counts)
    report.train = pool.total()
    recount(report.train, train)
    return Data(train, held_out, report)


def _rows(
    source: Source,
    max_rows: int | None,
    config: DatasetConfig,
    tokenizer: Tokenizer,
    cache_dir: str,
    judge: Judge,
    labels: KnownLabels,
) -> RowsOfSource:
    """Load the rows of one source. `max_rows` limits the rows read and the samples made from them."""
    check_tokenizer(tokenizer, config.format)
    if isinstance(source, RandomRows) and config.on_overflow == "auto":
        config = replace(config, on_overflow=source.on_overflow)
    # bad rows stop the reading; other errors are reported when all rows are known
    lenient = replace(without_stops(config), on_bad_row=config.on_bad_row)
    has_classes = config.format in LABELED_FORMATS and labels.labeling == "single"
    sample = RowSample(config.sample, config.columns.label if has_classes else None) if config.sample else None
    key = cache_key(source.fingerprint(), tokenizer, _settings(lenient, max_rows, sample))
    rows, facts = cached_rows(
        cache_dir, key, lambda writer: asdict(write_rows(source, max_rows, lenient, tokenizer, writer, sample))
    )
    counts = RowCounts.from_facts(facts)
    counts.source = source.name  # the cache entry may have another path with the same content
    shape = ROW_FORMATS[config.format]
    column = str(getattr(config.columns, shape.needs[-1]))  # the last field has labels or tags
    # answers may have either label, independent of the training rows
    classes = () if shape.learnt_by else labels.classes
    rows = _of_classes(rows.labeled_as(labels.labeling), classes, counts, column)
    judge(config, source, counts)
    return _first(rows, max_rows, counts), counts


def _of_classes(rows: TokenRows, classes: Sequence[str], counts: RowCounts, column: str) -> TokenRows:
    """Drop rows with an invalid or unknown label, and count them as bad."""
    if not rows.labels:
        return rows
    labeling, first = LABELINGS[rows.labeling], rows.class_of(0)

    def problem(label: str) -> str:
        if wrong := labeling.problem(label):
            return f"column {column!r} {wrong}"
        names = labeling.classes(label)
        if not labeling.named:
            size = len(classes) or len(labeling.classes(first))
            wrong = f"column {column!r} has {many(len(names), 'number')}, expected {size} per row"
            return wrong if len(names) != size else ""
        unknown = [name for name in names if name not in classes] if classes else []
        return f"unknown label {unknown[0]!r}; labels: {listed(classes)}" if unknown else ""

    wrong = np.flatnonzero(rows.where_label(lambda label: bool(problem(label))))
    for i in wrong.tolist():
        counts.bad(rows.source_location(i), escaped(problem(rows.class_of(i))))
    counts.rows_kept -= len(wrong)
    chosen = rows.select(np.setdiff1d(np.arange(len(rows)), wrong))
    recount(counts, chosen)
    return chosen


def _require_equal_labels(rows: TokenRows, config: DatasetConfig, classes: Sequence[str]) -> None:
    """Raise DataError for different counts of numbers in a mix, and for classes with two spellings."""
    sizes = {len(LABELINGS[rows.labeling].classes(label)) for label in rows.labels}
    if not LABELINGS[rows.labeling].named and len(sizes) > 1:
        raise DataError(
            f"dataset.mix: sources have {' and '.join(map(str, sorted(sizes)))} numbers per row. Use sources with the "
            "same count."
        )
    for name in ("False", "True"):  # CSV spelling of false and true in JSON
        if {name, name.lower()} <= {*classes}:
            raise DataError(
                f"dataset.path={paths_of(config)}: the labels {name} and {name.lower()} would be two classes. "
                "Use one of them in all rows."
            )


def _settings(config: DatasetConfig, max_rows: int | None, sample: RowSample | None) -> dict[str, Any]:
    """Return the settings that determine the rows of a cache entry."""
    fields = {name: getattr(config, name) for name in _SETTINGS_IN_KEY}
    fields["on_overflow"] = policy_for(fields["on_overflow"], config.format)
    columns = {name: getattr(config.columns, name) for name in fields_of(config.format)}
    thinking = {} if config.thinking == "train" else {"thinking": config.thinking}
    sampling = {} if sample is None else {"sample": asdict(sample)}
    transform = {} if config.transform is None else {"transform": origin_of(config)}
    return {**fields, **thinking, **sampling, **transform, "columns": columns, "max_rows": max_rows}


def _notes(config: DatasetConfig, tokenizer: Tokenizer) -> list[str]:
    """Return notes on the data that counts do not show."""
    notes = []
    if has_chats(config):
        notes += _marker_notes(tokenizer)
    if has_chats(config) and "strftime_now" in str(tokenizer.chat_template):
        notes.append("the chat template writes the current date: the day on which the rows were tokenized")
    if has_pairs(config) and not separates_pairs(tokenizer):
        notes.append(
            "the tokenizer adds no separator between the two texts of a pair; end the first text with one, such as a"
            " line break"
        )
    return notes


def _marker_notes(tokenizer: Tokenizer) -> list[str]:
    try:
        text = render_chat(tokenizer, [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    except ConversationRefused:
        return []
    missing = missing_markers(tokenizer, text)
    if not missing:
        return []
    return [
        f"the chat template writes {listed(missing)}, which are not tokens of this tokenizer: the model reads them as"
        f" ordinary text; choose a model of the same family, or set model.chat_template={other_template(tokenizer)}"
    ]


def _class_notes(classes: Sequence[str], rows: TokenRows) -> list[str]:
    """Return notes on labels with few or no rows, and on texts with several labels."""
    if not classes:
        return []
    counts = rows.class_counts()
    notes = []
    absent = [name for name in classes if name not in counts]
    if absent:
        notes.append(f"no training row has the label {listed(absent)}: it cannot be learned")
    rare = [f"{name} ({number})" for name, number in counts.items() if number < _RARE_ROWS]
    if rare:
        notes.append(f"very few rows have the label {listed(rare)}: expect poor accuracy")
    ambiguous = len(np.unique(rows.content_hashes)) - len(np.unique(rows.ids_hashes))
    if ambiguous:
        notes.append(f"texts with more than one label: {ambiguous:,}; the model can only learn their frequencies")
    return notes


def _number_notes(rows: TokenRows) -> list[str]:
    """Return notes with mean, spread and range of target numbers, and a hint if they are large."""
    if not rows.labels:
        return []
    numbers = np.concatenate([LABELINGS[rows.labeling].targets(rows.class_of(i), ()) for i in range(len(rows))])
    mean, spread = numbers.mean(axis=0, dtype=np.float64), numbers.std(axis=0, dtype=np.float64)
    notes = [
        f"target numbers: mean {m:.4g}, standard deviation {s:.4g}, from {low:.4g} to {high:.4g}"
        for m, s, low, high in zip(mean, spread, numbers.min(axis=0), numbers.max(axis=0), strict=True)
    ]
    if max(np.abs(mean).max(), spread.max()) > _LARGE_NUMBER:
        notes.append(
            "large target numbers are learned slowly, because outputs start near 0; scale them to about -1 to 1"
        )
    return notes


def _hold_out(pool: Pool, config: DatasetConfig, report: DataReport) -> Data:
    """Split by a hash of the tokens of each row: a row stays in its split when others are added or removed."""
    out = pool.rows.split_hashes < np.uint64(int(config.eval_fraction * 2**64))
    if not out.any():
        return _with_epoch(pool, None, report)
    if out.all():
        raise DataError(
            f"dataset.eval_fraction={config.eval_fraction} leaves none of {len(out):,} samples for training;"
            " lower it, or set dataset.eval_path=FILE"
        )
    report.eval = RowCounts(source=report.train.source)
    held_out = _first(pool.rows.select(np.flatnonzero(out)), config.eval_max_rows, report.eval)
    return _with_epoch(pool.without_held_out(out), held_out, report)


def _first(rows: TokenRows, limit: int | None, counts: RowCounts) -> TokenRows:
    """Keep at most `limit` rows and recount."""
    first = rows if limit is None else rows.select(np.arange(min(limit, len(rows))))
    counts.left_over += len(rows) - len(first)
    recount(counts, first)
    return first
