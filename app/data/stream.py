"""Rows of a source on their way through format, template, tokenizer and overflow policy to the cache."""

import logging
import time
from collections.abc import Iterator
from itertools import islice

from app.config.schema import DatasetConfig
from app.data.bad_rows import BadRows
from app.data.encoding import Encoder, Sample
from app.data.formats.table import fields_of, read_row
from app.data.formats.unfold import unfolded
from app.data.overflow import fit, policy_for
from app.data.rendering import Drafts, Renderer
from app.data.report import Counts
from app.data.shapes import Broken, Draft, Located, Row, RowProblem, Source
from app.data.storage import RowWriter, digest
from app.data.tokenizer import Tokenizer

_ROWS = 512  # of one batch,
_CHARS = 1 << 21  # or fewer if they are long
_EVERY = 15.0  # seconds between two lines about the progress

Drafted = tuple[str, Drafts]  # a row's place, and its samples as text
log = logging.getLogger(__name__)


def write_rows(
    source: Source, max_rows: int | None, config: DatasetConfig, tokenizer: Tokenizer, writer: RowWriter
) -> Counts:
    """Write the token rows of the first `max_rows` rows."""
    counts = Counts(source=source.name, files_left_out=list(source.left_out))
    stream = _Stream(config, tokenizer, writer, counts)
    told = time.monotonic()
    rows = unfolded(source.rows(), config.columns, fields_of(config.format))
    for batch in stream.batches(islice(rows, max_rows)):
        stream.write(batch)
        if time.monotonic() - told > _EVERY:
            told = time.monotonic()
            log.info("%s: %d rows read, %d tokens", source.name, counts.rows_read, counts.tokens)
    return counts


class _Stream:
    """One source on its way; every row that enters is counted once."""

    def __init__(
        self, config: DatasetConfig, tokenizer: Tokenizer, writer: RowWriter, counts: Counts
    ) -> None:
        self._config = config
        self._encoder = Encoder(tokenizer)
        self._renderer = Renderer(tokenizer, config.train_on, config.on_unstable_template)
        self._policy = policy_for(config.on_overflow, config.format)
        self._bad = BadRows(config.on_bad_row, counts)
        self._writer = writer
        self._counts = counts

    def batches(self, rows: Iterator[Located]) -> Iterator[list[Drafted]]:
        """Rows as text, as many at a time as the tokenizer should have."""
        batch: list[Drafted] = []
        chars, seen = 0, 0
        for place, row in rows:
            seen += 1
            drafted = self._drafted(place, row)
            if drafted is not None:
                batch.append(drafted)
                chars += sum(len(draft.text) for draft in drafted[1].samples)
            if seen >= _ROWS or chars >= _CHARS:
                yield batch
                batch, chars, seen = [], 0, 0
        yield batch

    def write(self, batch: list[Drafted]) -> None:
        """Tokenise and write; bad rows found so far end it here, if they are an error."""
        samples = iter(self._encoder.encode([draft for _, drafts in batch for draft in drafts.samples]))
        for place, drafts in batch:
            made = [next(samples) for _ in drafts.samples]
            problem = _nothing_trained(drafts.samples, made)
            if problem:
                self._bad.add(place, problem)
            else:
                self._keep(place, drafts, made)
        self._bad.stop_if_any()

    def _drafted(self, place: str, row: Row | Broken) -> Drafted | None:
        self._counts.rows_read += 1
        if isinstance(row, Broken):
            self._bad.add(place, row.reason)
            return None
        try:
            content = read_row(row, self._config.format, self._config.columns)
            drafts = self._renderer.drafts(content, place)
            for draft in drafts.samples:
                draft.text.encode()
        except RowProblem as problem:
            self._bad.add(place, str(problem))
        except UnicodeEncodeError as error:  # JSON can say "\ud800", which no text has
            self._bad.add(place, f"holds half a character: {error.object[error.start]!r}")
        else:
            return place, drafts
        return None

    def _keep(self, place: str, drafts: Drafts, made: list[Sample]) -> None:
        counts = self._counts
        counts.unseen += drafts.unseen
        counts.shortened += drafts.shortened
        counts.unstable += drafts.unstable
        counts.expanded_into += (
            len(made) if drafts.unstable and self._config.on_unstable_template == "expand" else 0
        )
        counts.glued += sum(sample.glued for sample in made)
        counts.endless += sum(sample.endless for sample in made)
        kept = [
            part
            for sample in made
            for part in fit(sample, self._config.max_length, self._policy, place, counts)
        ]
        counts.rows_kept += bool(kept)
        counts.rows_lost += not kept
        for part in kept:
            self._write(place, part, kept[-1])

    def _write(self, place: str, part: Sample, last: Sample) -> None:
        # Samples of one conversation repeat each other, so they take the same side; pieces of a text do not.
        side = part if self._policy == "split" else last
        self._writer.add(place, part.ids, part.trained, digest(side.ids))
        self._counts.samples += 1
        self._counts.tokens += len(part.ids)
        self._counts.trained_tokens += int(part.trained.sum())


def _nothing_trained(drafts: list[Draft], made: list[Sample]) -> str:
    """Why a row teaches nothing; empty if each of its samples does."""
    for draft, sample in zip(drafts, made, strict=True):
        trained = int(sample.trained.sum())
        if not trained:
            return "no token of it is trained"
        if draft.raw and sample.glued and trained == 1:
            return (
                "the completion is one token with the end of the prompt, so it cannot be trained; move white"
                " space from the end of the prompt to the beginning of the completion"
            )
    return ""
