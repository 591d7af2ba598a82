"""Data report: counts of rows, printed lines, and the errors that would stop a run."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from app.config.schema import DatasetConfig
from app.data.refused_columns import ColumnPlace, Way, unread_problems
from app.data.rows import escaped
from app.data.sources import Source
from app.safe_text import listed, many

LongestRow = Callable[[int], int]  # maximum row length of the model for a number of tokens

MAX_PLACES = 20
_MAX_REASONS = 20
_MAX_SHOWN_PROBLEMS = 5
MAX_DROPPED_SHARE = 0.05  # of the samples; above it `auto` is an error
_MAX_UNREAD_NAMES = 100  # of columns and keys that are counted separately
MIN_EVAL_ROWS = 30  # fewer give an unreliable loss
MAX_EVAL_FRACTION = 0.2  # of the samples
_MESSAGE_NUMBER = re.compile(r"(?<=message )\d+|(?<=tool call )\d+")
_MAX_DROPPED_CHARS = 80  # shown
_MIN_CLASS_TOKENS = 8  # minimum width of a length class of overlong samples; otherwise 1/32 of the length


@dataclass(slots=True)
class RowCounts:
    """Counts of one split. rows_read = rows_kept + bad_rows + rows_lost; over_long = dropped + truncated + split."""

    source: str = ""
    files_left_out: list[str] = field(default_factory=list)
    reading_notes: list[str] = field(default_factory=list)  # on files that were read in an unusual way
    not_sampled: int = 0  # rows that dataset.sample does not select; they are not in rows_read
    filtered: int = 0  # rows for which dataset.transform returned None; they are not in rows_read
    rows_read: int = 0
    rows_kept: int = 0  # with at least one sample
    rows_lost: int = 0  # good rows without a sample: overlong, or a pair of identical answers
    equal_answers: int = 0  # pairs of answers with the same tokens
    bad_rows: int = 0
    bad_places: list[str] = field(default_factory=list)  # the first MAX_PLACES locations
    bad_by_reason: dict[str, int] = field(default_factory=dict)  # of the first _MAX_REASONS
    bad_first: dict[str, str] = field(default_factory=dict)  # first location by reason
    first_problem: str = ""
    samples: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    label_weight: float = 0.0  # of the trained tokens in the loss: 1 each, or the weights of their messages
    weighted_samples: int = 0  # with a message weight other than 0 and 1
    longest: int = 0  # tokens of the longest sample before truncation
    over_long: int = 0  # samples longer than dataset.max_length
    first_over_long: str = ""  # location of its row
    over_long_up_to: dict[str, int] = field(default_factory=dict)  # by the upper end of a length class
    dropped: int = 0
    truncated: int = 0
    split: int = 0
    pieces: int = 0  # of the split samples
    tokens_lost: int = 0  # of dropped and truncated samples
    unstable: int = 0  # conversations whose earlier turns the template rewrites
    expanded_into: int = 0  # samples after expansion; 0 if only the last turn is trained
    joined: int = 0  # unstable conversations joined to one sample with all turns
    unstable_reasoning: int = 0  # unstable conversations with reasoning before the last trained turn
    # of unstable conversations before truncation, for expand and join
    unstable_tokens: dict[str, int] = field(default_factory=dict)
    dropped_text: str = ""  # the first text that the template drops from earlier turns and `join` keeps
    glued: int = 0  # samples with a token across the start or end of the trained text
    end_tokens: int = 0  # answers from which an end token written as text was removed
    endless: int = 0  # samples with an answer that does not end in a special token
    unseen: int = 0  # messages that the template omits
    shortened: int = 0  # answers of which the template omits a part
    marked: int = 0  # messages with the text of a special token
    merged: int = 0  # conversations whose consecutive answers were joined
    empty: dict[str, int] = field(default_factory=dict)  # blank texts by column or role
    unread_columns: dict[str, int] = field(default_factory=dict)  # rows with a value
    missed: dict[str, int] = field(default_factory=dict)  # rows in which an unread column has text that no sample has
    missed_places: dict[str, ColumnPlace] = field(default_factory=dict)  # where columns that answers need can be read
    missed_chars: dict[str, int] = field(default_factory=dict)  # of the texts
    foreign_markers: dict[str, int] = field(default_factory=dict)  # plain texts with chat markup of another program
    unread_keys: dict[str, int] = field(default_factory=dict)  # of messages; they do not change the rendering
    held_out: int = 0  # samples held out by dataset.eval_fraction
    duplicates: int = 0  # samples with tokens and mask of an earlier one
    duplicates_dropped: int = 0
    left_over: int = 0  # samples after the first dataset.max_rows or eval_max_rows
    classes: dict[str, int] = field(default_factory=dict)  # of examples: samples by label

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> "RowCounts":
        """Return the counts that were stored as JSON."""
        places = {
            name: ColumnPlace(place["field"], tuple(place["paths"]), place["first"], Way(place["way"]))
            for name, place in facts["missed_places"].items()
        }
        return cls(**{**facts, "missed_places": places})

    def bad(self, place: str, reason: str) -> None:
        """Count a bad row and keep the first locations."""
        self.bad_rows += 1
        self.first_problem = self.first_problem or f"{place}: {reason}"
        alike = _MESSAGE_NUMBER.sub("", reason)  # the message number does not distinguish reasons
        reason = next((other for other in self.bad_by_reason if _MESSAGE_NUMBER.sub("", other) == alike), reason)
        if reason in self.bad_by_reason or len(self.bad_by_reason) < _MAX_REASONS:
            self.bad_by_reason[reason] = self.bad_by_reason.get(reason, 0) + 1
            self.bad_first.setdefault(reason, place)
        if len(self.bad_places) < MAX_PLACES:
            self.bad_places.append(place)

    @property
    def join_saves(self) -> bool:
        """Whether dataset.on_unstable_template=join gives fewer tokens than expand."""
        return self.unstable_tokens.get("join", 0) < self.unstable_tokens.get("expand", 0)

    def too_long(self, length: int) -> None:
        """Count an overlong sample by its length class, which shows the max_length that would keep it."""
        self.over_long += 1
        width = max(_MIN_CLASS_TOKENS, (1 << length.bit_length()) >> 6)
        end = str(-(-length // width) * width)  # text, as in the JSON file
        self.over_long_up_to[end] = self.over_long_up_to.get(end, 0) + 1


@dataclass(slots=True)
class SourceShare:
    """Share of one source of a mix in an epoch."""

    weight: float
    samples: int  # of the source
    drawn: int  # samples per epoch, repetitions included
    tokens: int  # of the drawn samples
    trained_tokens: int


@dataclass(slots=True)
class DataReport:
    """Counts of both splits and of the whole data. For a mix, `train` has the samples of an epoch."""

    train: RowCounts
    eval: RowCounts | None = None
    shared: int = 0  # eval samples that are also in the training set
    notes: list[str] = field(default_factory=list)
    sources: dict[str, RowCounts] = field(default_factory=dict)  # of a mix
    shares: dict[str, SourceShare] = field(default_factory=dict)  # the same names

    def lines(self) -> list[str]:
        """Return the lines that a run and finetune check data print: one per split, and one per finding."""
        lines = list(_mix_lines(self)) if self.sources else list(split_lines("train", self.train))
        lines += [f"train: {line}" for line in _join_lines(self.train)]
        if self.eval is not None:
            lines += split_lines("eval", self.eval)
        elif self.train.samples:
            lines.append(f"eval: no eval set: overfitting would go unnoticed; set {eval_remedy(self.train.samples)}")
        if self.shared:
            lines.append(f"eval: {many(self.shared, 'sample')} also in the training set: eval_loss is too low")
        return lines + self.notes


def _mix_lines(report: DataReport) -> Iterator[str]:
    for name, counts in report.sources.items():
        yield from split_lines(f"train {name}", counts)
        share = report.shares[name]
        part = share.tokens / max(report.train.tokens, 1)
        drawn = f"{many(share.drawn, 'sample')} per epoch, {part:.1%} of the tokens"
        yield f"train {name}: weight {share.weight:g}, {drawn}"
    c = report.train
    yield f"train: {many(c.samples, 'sample')}, {many(c.tokens, 'token')}, {c.trained_tokens:,} trained per epoch"


def split_lines(split: str, c: RowCounts) -> Iterator[str]:
    """Yield the size of a split, lost rows and samples, and effects of the chat template."""
    share = c.trained_tokens / max(c.tokens, 1)
    size = many(c.samples, "sample")
    if c.rows_read:  # otherwise held out of the rows of another split
        size = many(c.rows_read, "row") + ("" if c.rows_read == c.samples else f" -> {size}")
    labels = [f"{name} {number:,}" for name, number in c.classes.items()]
    trained = (
        f"{many(len(labels), 'label')}: {listed(labels)}" if labels else f"{c.trained_tokens:,} trained ({share:.0%})"
    )
    yield f"{split}: {size}, {many(c.tokens, 'token')}, {trained}"
    if c.weighted_samples:
        average = c.label_weight / max(c.trained_tokens, 1)
        count = f"trained tokens count as {c.label_weight:,.1f}, {average:.2f} each on average"
        yield f"{split}: {many(c.weighted_samples, 'sample')} with message weights other than 1: {count}"
    for line in (*_lost_lines(c), *_template_lines(c)):
        yield f"{split}: {line}"
    for counted, what, unit in ((c.unread_columns, "columns", "row"), (c.unread_keys, "message keys", "message")):
        if counted:
            names = [f"{name} ({many(number, unit)})" for name, number in counted.items()]
            yield f"{split}: {what} not read: {listed(names)}"


def eval_remedy(samples: int) -> str:
    """Return the setting that gives a sufficient eval set; a small dataset is not split."""
    if samples < MIN_EVAL_ROWS:
        return "dataset.eval_path=FILE"
    return f"dataset.eval_fraction={min(MAX_EVAL_FRACTION, round(MIN_EVAL_ROWS / samples + 0.005, 2))}"


def count_name(counts: dict[str, int], name: str, number: int = 1) -> None:
    """Count a column or key; names beyond the limit are counted as others."""
    shown = escaped(name) if name in counts or len(counts) < _MAX_UNREAD_NAMES else "others"
    counts[shown] = counts.get(shown, 0) + number


def _lost_lines(c: RowCounts) -> Iterator[str]:
    if c.files_left_out:
        yield f"{many(len(c.files_left_out), 'file')} in the folder not read: {_first(c.files_left_out)}"
    yield from c.reading_notes
    left_out = {"not in the sample": c.not_sampled, "dropped by dataset.transform": c.filtered}
    yield from (f"{many(number, 'row')} {fate}" for fate, number in left_out.items() if number)
    if c.bad_rows:
        yield f"{many(c.bad_rows, 'bad row')} skipped: {_first(c.bad_places)} ({c.first_problem})"
    if c.over_long:
        fates = {"dropped": c.dropped, "truncated": c.truncated, f"split into {c.pieces:,} pieces": c.split}
        shown = ", ".join(f"{number:,} {fate}" for fate, number in fates.items() if number)
        lost = f"; {many(c.tokens_lost, 'token')} lost" if c.tokens_lost else ""
        longer = f"{many(c.over_long, 'sample')} longer than dataset.max_length (longest: {c.longest:,})"
        yield f"{longer}: {shown}{lost}"
    if c.equal_answers:
        yield f"{many(c.equal_answers, 'pair')} of identical answers dropped"
    if c.empty:
        shown = ", ".join(f"{number:,} in {where}" for where, number in c.empty.items())
        yield f"empty or whitespace-only texts: {shown}"
    if c.duplicates:
        fate = "kept (dataset.deduplicate=true drops them)"
        if c.duplicates_dropped:
            fate = "dropped"
        yield f"{many(c.duplicates, 'duplicate sample')}: {fate}"
    if c.left_over:
        yield f"{many(c.left_over, 'sample')} beyond the row limit not used"


def _template_lines(c: RowCounts) -> Iterator[str]:
    if c.unstable:
        fates = [f"{many(c.joined, 'conversation')} joined into one sample each"] if c.joined else []
        if c.expanded_into:
            expanded = f"{many(c.unstable - c.joined, 'conversation')} became {many(c.expanded_into, 'sample')}"
            fates.append(f"{expanded}, one per trained turn")
        fates = fates or [f"{many(c.unstable, 'conversation')} train only the last turn"]
        yield f"the chat template rewrites earlier turns: {'; '.join(fates)}"
    if c.merged:
        what = f"consecutive assistant messages of {many(c.merged, 'conversation')} joined with a blank line"
        yield f"{what}: the chat template does not support them"
    if c.unseen:
        yield f"the chat template omits the content of {many(c.unseen, 'system, user or tool message')}"
    if c.marked:
        yield f"{many(c.marked, 'message')} with special-token text, which the model reads as the token itself"
    if c.shortened:
        yield f"the chat template omits a part (such as reasoning) of {many(c.shortened, 'trained answer')}"
    if c.end_tokens:
        yield f"end token written as text removed from {many(c.end_tokens, 'answer')}: the tokenizer adds its own"
    if c.glued:
        yield f"{many(c.glued, 'sample')} with a token across prompt and answer, which is not trained"
    if c.endless:
        ends = f"no special token ends the answer in {many(c.endless, 'sample')}"
        yield f"{ends}: the model will not learn to stop"


def _join_lines(c: RowCounts) -> Iterator[str]:
    """Yield the tokens of `dataset.on_unstable_template=expand` and `join` if `join` saves some, and how to set it."""
    if not c.join_saves:
        return
    expand, join = (c.unstable_tokens[name] for name in ("expand", "join"))
    about = f"expand: about {_rounded(expand)} tokens, {expand / join:.1f}x; join: about {_rounded(join)}"
    effect = f'earlier answers keep "{escaped(c.dropped_text[:_MAX_DROPPED_CHARS])}", which the template drops'
    if c.joined:
        yield f"{about}; {effect}"
    elif c.unstable_reasoning:
        refused = many(c.unstable_reasoning, "conversation")
        yield f"{about}; dataset.on_unstable_template=join does not support {refused} with reasoning in earlier turns"
    else:
        same = "train the same answers in one sample per conversation"
        yield f"{about}. Set dataset.on_unstable_template=join to {same}, where {effect}"


def _rounded(number: int) -> str:
    """Format a number with three significant digits."""
    return f"{float(f'{number:.3g}'):,.0f}"


def _first(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def stop_reasons(
    config: DatasetConfig, source: Source, counts: RowCounts, longest_row: LongestRow = int, *, trains: bool = True
) -> Iterator[str]:
    """Yield all errors of one source that would stop a run.

    `trains` is false for scoring, where unread columns are not an error.
    """
    named = f"{source.key}={source.name}"
    if config.on_bad_row == "error":
        yield from bad_row_problems(counts)
    if config.on_unstable_template == "error" and counts.unstable:
        yield (
            f"{named}: the chat template rewrites earlier turns of {counts.unstable:,} conversations; set"
            " dataset.on_unstable_template=expand (one sample per turn), join (one sample for all turns) or last"
            " (only the last turn)"
        )
    if trains:
        key, rows = source.key.rpartition(".")[0], counts.rows_kept + counts.rows_lost
        of_columns = counts.missed, counts.missed_places, counts.unread_columns
        yield from (f"{named}: {problem}" for problem in unread_problems(config, key, rows, *of_columns))
    if _is_too_long(config, counts):
        yield _too_long(config, source, counts, longest_row(counts.longest))
    elif not counts.rows_read:
        yield f"{named}: has no rows{after_transform(config)}"
    elif not counts.rows_kept and not (counts.bad_rows and config.on_bad_row == "error"):
        bad = f"; {counts.bad_rows:,} bad, first: {counts.first_problem}" if counts.bad_rows else ""
        long = f"; {counts.dropped:,} longer than dataset.max_length={config.max_length}" if counts.dropped else ""
        yield f"{named}: none of {counts.rows_read:,} rows can be used for training{bad}{long}"


def after_transform(config: DatasetConfig) -> str:
    """Return the end of a message about missing rows: the transform that may have dropped them."""
    return "" if config.transform is None else f" after dataset.transform={config.transform}"


def without_stops(config: DatasetConfig) -> DatasetConfig:
    """Return settings that skip and count rows instead of stopping a run."""
    policy = "drop" if config.on_overflow == "error" else config.on_overflow
    unstable = "expand" if config.on_unstable_template == "error" else config.on_unstable_template
    return replace(config, on_bad_row="skip", on_overflow=policy, on_unstable_template=unstable)


def _num_samples(counts: RowCounts) -> int:
    """Return the number of samples before any was dropped or held out."""
    return counts.samples + counts.held_out + counts.left_over + counts.dropped


def _is_too_long(config: DatasetConfig, counts: RowCounts) -> bool:
    """Return whether overlong samples are an error: any with `error`, above a share with `auto`."""
    if config.on_overflow == "auto" and config.format != "text":
        return counts.dropped > MAX_DROPPED_SHARE * _num_samples(counts)
    return config.on_overflow == "error" and counts.over_long > 0


def _too_long(config: DatasetConfig, source: Source, counts: RowCounts, readable: int) -> str:
    limit, number, total = config.max_length, counts.over_long, _num_samples(counts)
    longest = f"(longest: {counts.longest:,} tokens, first: {counts.first_over_long})"
    if counts.longest <= readable:
        remedy = "raise it, or"
    elif readable > limit:
        remedy = f"raise it to at most {readable:,}, the limit of the model, or"
    else:
        remedy = "this is the limit of the model: choose a model with a longer context, or"
    return (
        f"dataset.max_length={limit}: {number:,} of {total:,} samples of {source.name} ({number / total:.1%}) are "
        f"longer {longest}; {remedy} set dataset.on_overflow=truncate or drop"
    )


def bad_row_problems(counts: RowCounts) -> list[str]:
    """Return each reason with its first row and the number of others; empty if no row is bad."""
    problems = []
    for reason, rows in list(counts.bad_by_reason.items())[:_MAX_SHOWN_PROBLEMS]:
        more = f" and {rows - 1:,} more row{'s' * (rows > 2)}" if rows > 1 else ""
        problems.append(f"{counts.bad_first[reason]}{more}: {reason}")
    if problems:  # on a separate line, because a reason may end with a command
        all_bad = f"All {counts.rows_read:,} rows read are bad. Fix them, or set dataset.path to other rows"
        skip = "To skip bad rows, set dataset.on_bad_row=skip"
        problems[-1] += f"\n    {skip if counts.bad_rows < counts.rows_read else all_bad}"
    return problems
