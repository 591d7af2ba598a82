"""What became of the rows: counted while they are read, told to people, kept in the manifest."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

MAX_PLACES = 20


@dataclass(slots=True)
class Counts:
    """One split. rows_read = rows_kept + bad_rows + rows_lost; over_long = dropped + truncated + split."""

    source: str = ""
    files_left_out: list[str] = field(default_factory=list)
    rows_read: int = 0
    rows_kept: int = 0  # at least one sample came of them
    rows_lost: int = 0  # good rows whose samples were all dropped as over-long
    bad_rows: int = 0
    bad_places: list[str] = field(default_factory=list)  # the first MAX_PLACES
    first_problem: str = ""
    samples: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    longest: int = 0  # tokens of the longest sample, before anything was cut
    over_long: int = 0  # samples longer than dataset.max_length
    dropped: int = 0
    truncated: int = 0
    split: int = 0
    pieces: int = 0  # what the split ones became
    tokens_lost: int = 0  # of dropped samples, and cut off
    unstable: int = 0  # conversations whose earlier turns the template rewrites
    expanded_into: int = 0  # samples that they became; 0 if only their last turn is trained
    glued: int = 0
    endless: int = 0
    unseen: int = 0
    held_out: int = 0  # samples that dataset.eval_fraction took from here
    left_over: int = 0  # samples after the first dataset.max_rows or eval_max_rows

    def bad(self, place: str, reason: str) -> None:
        """Count a bad row, and keep the first places."""
        self.bad_rows += 1
        self.first_problem = self.first_problem or f"{place}: {reason}"
        if len(self.bad_places) < MAX_PLACES:
            self.bad_places.append(place)


@dataclass(slots=True)
class DataReport:
    """Both splits, and what holds for the data as a whole."""

    train: Counts
    eval: Counts | None = None
    shared: int = 0  # eval samples that are also trained on
    notes: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """For people: one line for each split, and one for each thing that is not as it could be."""
        lines = list(_split_lines("train", self.train))
        if self.eval is not None:
            lines += _split_lines("eval", self.eval)
        if self.shared:
            lines.append(f"eval: {self.shared:,} of its samples are also trained on: eval_loss is too good")
        return lines + self.notes

    def as_dict(self) -> dict[str, Any]:
        """For the manifest."""
        return asdict(self)


def _split_lines(split: str, c: Counts) -> Iterator[str]:
    share = c.trained_tokens / max(c.tokens, 1)
    read = f"{c.rows_read:,} rows -> " if c.rows_read else ""
    trained = f"{c.trained_tokens:,} trained ({share:.0%})"
    yield f"{split}: {read}{c.samples:,} samples, {c.tokens:,} tokens, {trained}"
    for told in (*_lost_lines(c), *_template_lines(c)):
        yield f"{split}: {told}"


def _lost_lines(c: Counts) -> Iterator[str]:
    if c.files_left_out:
        shown = ", ".join(c.files_left_out[:3]) + (", ..." if len(c.files_left_out) > 3 else "")
        yield f"{len(c.files_left_out):,} files of the folder are not read: {shown}"
    if c.bad_rows:
        shown = ", ".join(c.bad_places[:3]) + (", ..." if c.bad_rows > 3 else "")
        yield f"{c.bad_rows:,} bad rows skipped: {shown} ({c.first_problem})"
    if c.over_long:
        fates = {"dropped": c.dropped, "truncated": c.truncated, f"split into {c.pieces:,} pieces": c.split}
        told = ", ".join(f"{number:,} {fate}" for fate, number in fates.items() if number)
        lost = f"; {c.tokens_lost:,} tokens lost" if c.tokens_lost else ""
        longer = f"{c.over_long:,} samples longer than dataset.max_length (the longest {c.longest:,})"
        yield f"{longer}: {told}{lost}"
    if c.left_over:
        yield f"{c.left_over:,} samples beyond the wanted number are not used"


def _template_lines(c: Counts) -> Iterator[str]:
    if c.unstable:
        fate = (
            f"became {c.expanded_into:,} samples, one for each trained turn"
            if c.expanded_into
            else "train the last"
        )
        yield f"the chat template rewrites earlier turns: {c.unstable:,} conversations {fate}"
    if c.unseen:
        yield f"{c.unseen:,} messages do not appear in what the chat template makes of their conversation"
    if c.glued:
        yield f"in {c.glued:,} samples a token holds both prompt and answer, and is not trained"
    if c.endless:
        yield f"in {c.endless:,} samples no special token ends the answer: nothing teaches the model to stop"
