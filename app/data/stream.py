"""Rows of a source on their way through format, template, tokenizer and overflow policy to the cache."""

import logging
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from app.config.schema import DatasetConfig
from app.data.columns import unfolded
from app.data.encoding import Sample
from app.data.formats import fields_of
from app.data.making import Made, Maker
from app.data.overflow import fit, policy_for
from app.data.report import Counts
from app.data.shapes import Broken, Located, Row, Source
from app.data.stops import bad_row_problems
from app.data.token_file import RowWriter
from app.data.token_rows import digest
from app.data.tokenizer import Tokenizer
from app.errors import DataError

_ROWS = 512  # of one batch,
_CHARS = 1 << 21  # or fewer if they are long
_EVERY = 15.0  # seconds between two lines about the progress

log = logging.getLogger(__name__)


def write_rows(
    source: Source, max_rows: int | None, config: DatasetConfig, tokenizer: Tokenizer, writer: RowWriter
) -> Counts:
    """Write the token rows of the first `max_rows` rows."""
    counts = Counts(source=source.name, files_left_out=list(source.left_out))
    stream = _Stream(config, writer, counts)
    told = time.monotonic()
    rows = unfolded(source.rows(), config.columns, fields_of(config.format))
    batches = _batches(islice(rows, max_rows))
    for batch in map(Maker(config, tokenizer), batches):
        stream.write(batch)
        if time.monotonic() - told > _EVERY:
            told = time.monotonic()
            log.info("%s: %d rows read, %d tokens", source.name, counts.rows_read, counts.tokens)
    return counts


def _batches(rows: Iterator[Located]) -> Iterator[list[Located]]:
    """As many at a time as the tokenizer should have."""
    batch: list[Located] = []
    chars = 0
    for place, row in rows:
        batch.append((place, row))
        chars += _chars(row)
        if len(batch) >= _ROWS or chars >= _CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def _chars(value: Row | Broken | Any) -> int:
    """Of all texts in a row, roughly."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(_chars(each) for each in value.values())
    return sum(_chars(each) for each in value) if isinstance(value, list) else 0


class _Stream:
    """One source on its way; every row that enters is counted once."""

    def __init__(self, config: DatasetConfig, writer: RowWriter, counts: Counts) -> None:
        self._config = config
        self._policy = policy_for(config.on_overflow, config.format)
        self._writer = writer
        self._counts = counts

    def write(self, batch: Iterable[Made]) -> None:
        """Bad rows found so far end it here, if they are an error."""
        for made in batch:
            self._counts.rows_read += 1
            if made.problem:
                self._counts.bad(made.place, made.problem)
            else:
                self._keep(made)
        if self._config.on_bad_row == "error" and self._counts.bad_rows:
            raise DataError(bad_row_problems(self._counts))

    def _keep(self, made: Made) -> None:
        counts, drafts = self._counts, made.drafts
        counts.unseen += drafts.unseen
        counts.shortened += drafts.shortened
        counts.marked += drafts.marked
        for where in drafts.empty:
            counts.empty[where] = counts.empty.get(where, 0) + 1
        counts.unstable += drafts.unstable
        if drafts.unstable and self._config.on_unstable_template == "expand":
            counts.expanded_into += len(made.samples)
        counts.glued += sum(sample.glued for sample in made.samples)
        counts.endless += sum(sample.endless for sample in made.samples)
        kept = [
            part
            for sample in made.samples
            for part in fit(sample, self._config.max_length, self._policy, made.place, counts)
        ]
        counts.rows_kept += bool(kept)
        counts.rows_lost += not kept
        for part in kept:
            self._write(made.place, part, kept[-1])

    def _write(self, place: str, part: Sample, last: Sample) -> None:
        # Samples of one conversation repeat each other, so they take the same side; pieces of a text do not.
        side = part if self._policy == "split" else last
        self._writer.add(place, part, digest(side.ids))
        self._counts.samples += 1
        self._counts.tokens += len(part.ids)
        self._counts.trained_tokens += int(part.trained.sum()) if part.label is None else 1
