"""What a batch of rows becomes, by format, template and tokenizer. It counts and writes nothing."""

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from app.config.schema import DatasetConfig
from app.data.columns import unfolded
from app.data.data_report import Counts, bad_row_problems
from app.data.formats import empty_parts, fields_of, read_row
from app.data.loss_mask import RenderedRow, Renderer
from app.data.overflow import fit, policy_for
from app.data.token_cache import RowWriter
from app.data.token_dataset import digest
from app.data.tokenizer import Encoder, Tokenizer, Tokens
from app.data.types import Broken, Located, RenderedText, Row, RowProblem, Source
from app.errors import DataError


@dataclass(frozen=True, slots=True)
class TokenizedRow:
    """Of one row: its texts and their tokens, or why it is bad."""

    place: str
    drafts: RenderedRow
    samples: Sequence[Tokens] = ()
    problem: str = ""


class RowTokenizer:
    """One dataset's settings and one tokenizer."""

    def __init__(self, config: DatasetConfig, tokenizer: Tokenizer) -> None:
        self._config = config
        self._encoder = Encoder(tokenizer)
        self._renderer = Renderer(tokenizer, config.train_on, config.on_unstable_template)

    def __call__(self, rows: Sequence[Located]) -> Iterator[TokenizedRow]:
        """One for each row, in their order."""
        drafted = [self._drafted(place, row) for place, row in rows]
        texts = [draft for drafts in drafted if isinstance(drafts, RenderedRow) for draft in drafts.samples]
        samples = iter(self._encoder.encode(texts))
        for (place, _), drafts in zip(rows, drafted, strict=True):
            if isinstance(drafts, RenderedRow):
                own = [next(samples) for _ in drafts.samples]
                yield TokenizedRow(place, drafts, own, _nothing_trained(drafts.samples, own))
            else:
                yield TokenizedRow(place, RenderedRow([]), problem=drafts)

    def _drafted(self, place: str, row: Row | Broken) -> RenderedRow | str:
        """The texts of a row, or why it has none."""
        if isinstance(row, Broken):
            return row.reason
        try:
            content = read_row(row, self._config.format, self._config.columns)
            drafts = self._renderer.drafts(content, place)
            empty = empty_parts(row, content, self._config.format, self._config.columns)
            drafts = replace(drafts, empty=tuple(empty))
            for draft in drafts.samples:
                for text in (draft.text, draft.second or "", draft.label or ""):
                    text.encode()
        except RowProblem as problem:
            return str(problem)
        except UnicodeEncodeError as error:  # JSON can say "\\ud800", which no text has
            return f"holds half a character: {error.object[error.start]!r}"
        return drafts


def _nothing_trained(drafts: list[RenderedText], made: list[Tokens]) -> str:
    """Why a row teaches nothing; empty if each of its samples does."""
    for draft, sample in zip(drafts, made, strict=True):
        if sample.label is not None:
            if not len(sample.ids):
                return "the tokenizer makes no token of it"
            continue
        trained = int(sample.trained.sum())
        if not trained:
            return "no token of it is trained"
        if draft.raw and sample.glued and trained == 1:
            return (
                "the completion is one token with the end of the prompt, so it cannot be trained; move white"
                " space from the end of the prompt to the beginning of the completion"
            )
    return ""


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
    for batch in map(RowTokenizer(config, tokenizer), batches):
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

    def write(self, batch: Iterable[TokenizedRow]) -> None:
        """Bad rows found so far end it here, if they are an error."""
        for made in batch:
            self._counts.rows_read += 1
            if made.problem:
                self._counts.bad(made.place, made.problem)
            else:
                self._keep(made)
        if self._config.on_bad_row == "error" and self._counts.bad_rows:
            raise DataError(bad_row_problems(self._counts))

    def _keep(self, made: TokenizedRow) -> None:
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

    def _write(self, place: str, part: Tokens, last: Tokens) -> None:
        # Samples of one conversation repeat each other, so they take the same side; pieces of a text do not.
        side = part if self._policy == "split" else last
        self._writer.add(place, part, digest(side.ids))
        self._counts.samples += 1
        self._counts.tokens += len(part.ids)
        self._counts.trained_tokens += int(part.trained.sum()) if part.label is None else 1
