"""Row pipeline: format, template, tokenizer and overflow policy, into the token cache; every row is counted."""

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import compress, islice
from typing import Any

import numpy as np

from app.config.kinds import ROW_FORMATS, fields_of
from app.config.schema import DatasetConfig
from app.data.columns import JOIN, reshape_rows, thought_column, unread, value
from app.data.conversations import tools_column
from app.data.data_report import RowCounts, bad_row_problems, count_name
from app.data.formats import WRITTEN_CHAT, empty_parts, read_row, without_end_tokens
from app.data.labels import parts_of
from app.data.loss_mask import RenderedRow, Renderer
from app.data.refused_columns import ReadRow
from app.data.row_sample import RowSample
from app.data.rows import Broken, Content, Conversation, Document, Located, RenderedText, Row, RowProblem, sides_of
from app.data.sources import FileRows, RandomRows, Source
from app.data.token_dataset import RowWriter, digest
from app.data.tokenizer import Encoder, Tokenizer, Tokens
from app.errors import DataError


def policy_for(on_overflow: str, fmt: str) -> str:
    """Resolve `auto`: split plain text, truncate labeled text, drop chats."""
    if on_overflow == "auto":
        return ROW_FORMATS[fmt].overflow
    assert on_overflow != "split" or fmt == "text", (on_overflow, fmt)
    return on_overflow


def fit(sample: Tokens, max_length: int, policy: str, counts: RowCounts) -> list[Tokens]:
    """Apply the policy to one sample and count lost tokens."""
    length = len(sample.ids) + sample.more
    counts.longest = max(counts.longest, length)
    if length <= max_length:
        return [sample]
    counts.too_long(length)
    parts = POLICIES[policy](sample, max_length)
    if policy == "split":
        counts.split += 1
        counts.pieces += len(parts)
    elif parts:
        counts.truncated += 1
        counts.tokens_lost += length - max_length
    else:
        counts.dropped += 1
        counts.tokens_lost += length
    return parts


def fit_pair(sides: Sequence[Tokens], max_length: int, policy: str, counts: RowCounts) -> list[Tokens]:
    """Apply the policy to a pair of answers, by the longer one; return them as one row."""
    lengths = [len(side.ids) + side.more for side in sides]
    cut = [
        [side] if n <= max_length else POLICIES[policy](side, max_length)
        for side, n in zip(sides, lengths, strict=True)
    ]
    remaining = [part for parts in cut for part in parts]
    chosen, rejected = remaining if len(remaining) == len(sides) else sides
    if np.array_equal(chosen.ids, rejected.ids):  # some are equal only after truncation
        counts.equal_answers += 1
        return []
    if not fit(sides[lengths.index(max(lengths))], max_length, policy, counts) or len(remaining) < len(sides):
        return []
    ids, masks = ([getattr(part, name) for part in remaining] for name in ("ids", "loss_mask"))
    return [Tokens(np.concatenate(ids), np.concatenate(masks), second_start=len(ids[0]))]


def _truncate(sample: Tokens, max_length: int) -> list[Tokens]:
    """Keep the start; drop the sample if no trained token remains. An example keeps its special tokens."""
    if sample.text_ids is not None:
        return _truncate_example(sample, sample.text_ids, max_length)
    weights = None if sample.weights is None else sample.weights[:max_length]
    truncated = Tokens(sample.ids[:max_length], sample.loss_mask[:max_length], weights=weights, label=sample.label)
    return [truncated] if truncated.loss_mask.any() else []


def _split(sample: Tokens, max_length: int) -> list[Tokens]:
    """Split into pieces that overlap by one token, trained only in the first piece: each token is trained once."""
    assert sample.weights is None, "only text is split, and its tokens all count alike"
    parts = []
    for at in range(0, len(sample.ids) - 1, max_length - 1):
        mask = sample.loss_mask[at : at + max_length].copy()
        mask[0] = sample.loss_mask[0] and at == 0
        parts.append(Tokens(sample.ids[at : at + max_length], mask))
    return parts


def _truncate_example(sample: Tokens, text_ids: np.ndarray, max_length: int) -> list[Tokens]:
    """Truncate the texts, the longer one first, as tokenizers do; truncate word tags too."""
    lengths = [int((text_ids == side).sum()) for side in (0, 1)]
    available = max_length - int((text_ids < 0).sum())
    if available < 1:
        return []
    remains = text_ids < 0
    for side, number in enumerate(_truncated_lengths(lengths, available)):
        remains[np.flatnonzero(text_ids == side)[:number]] = True
    second, mask = sample.second_start, sample.loss_mask[remains]
    if sample.loss_mask.any() and not mask.any():
        return []
    first_tags = json.dumps(parts_of(str(sample.label))[: int(mask.sum())], ensure_ascii=False)
    truncated = replace(
        sample,
        ids=sample.ids[remains],
        loss_mask=mask,
        label=first_tags if mask.any() else sample.label,
        text_ids=text_ids[remains],
        second_start=int(remains[:second].sum()) if second >= 0 else second,
    )
    return [truncated]


def _truncated_lengths(lengths: list[int], available: int) -> list[int]:
    short = min(lengths)
    long = max(short, available - short)
    if short + long > available:
        short, long = available // 2, available - available // 2
    return [short, long] if lengths[0] <= lengths[1] else [long, short]


POLICIES: dict[str, Callable[[Tokens, int], list[Tokens]]] = {
    "truncate": _truncate,
    "drop": lambda _sample, _max_length: [],
    "split": _split,
}


# ---- row pipeline


BATCH_ROWS = 512
BATCH_CHARS = 1 << 21  # fewer rows if they are long
_CHARS_OF_NUMBER = 4  # for each number in a list, such as a token ID
_PROGRESS_SECONDS = 15.0

_MAX_MARKER_CHARS = 10_000

log = logging.getLogger(__name__)


def write_rows(
    source: Source,
    max_rows: int | None,
    config: DatasetConfig,
    tokenizer: Tokenizer,
    writer: RowWriter,
    sample: RowSample | None = None,
) -> RowCounts:
    """Write the token rows of the first `max_rows` rows, of the sample if there is one."""
    counts = RowCounts(source=source.name, files_left_out=list(source.left_out))
    pipeline = _Pipeline(config, tokenizer, writer, counts)
    logged = time.monotonic()

    def count_dropped() -> None:
        counts.filtered += 1

    rows = reshape_rows(source.rows(), config, fields_of(config.format), count_dropped)
    if sample is not None:
        selected = sample.selected(reshape_rows(source.rows(), config, fields_of(config.format)))
        counts.not_sampled = int((~selected).sum())
        rows = compress(rows, selected)
    for batch in _batches(islice(rows, max_rows)):
        pipeline.write(batch)
        if time.monotonic() - logged > _PROGRESS_SECONDS:
            logged = time.monotonic()
            log.info("%s: %d rows read, %d tokens", source.name, counts.rows_read, counts.tokens)
    counts.reading_notes = list(dict.fromkeys(source.notes)) if isinstance(source, FileRows) else []
    if sample is not None and not counts.not_sampled:
        counts.reading_notes.append(f"sample={sample.number} keeps all {counts.rows_read:,} rows")
    if isinstance(source, RandomRows) and source.on_overflow == "truncate" and counts.truncated == counts.over_long:
        # its rows are meant to be truncated
        counts.over_long, counts.truncated, counts.tokens_lost = 0, 0, 0
        counts.first_over_long, counts.over_long_up_to = "", {}
        counts.longest = min(counts.longest, config.max_length)
    return counts


def _batches(rows: Iterator[Located]) -> Iterator[list[Located]]:
    batch: list[Located] = []
    chars = 0
    for location, row in rows:
        batch.append((location, row))
        chars += _num_chars(row)
        if len(batch) >= BATCH_ROWS or chars >= BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def _num_chars(row: Row | Broken) -> int:
    """Return the number of characters in all texts of a row; lists of numbers count too."""
    chars, parts = 0, list[Any]([row])
    while parts:
        part = parts.pop()
        if isinstance(part, str):
            chars += len(part)
        elif isinstance(part, list) and part and isinstance(part[0], int):
            chars += _CHARS_OF_NUMBER * len(part)
        elif isinstance(part, dict | list):
            parts += part.values() if isinstance(part, dict) else part
    return chars


class _Pipeline:
    """Pipeline with the settings of one dataset and one tokenizer; every row is counted once."""

    def __init__(self, config: DatasetConfig, tokenizer: Tokenizer, writer: RowWriter, counts: RowCounts) -> None:
        self._config = config
        self._renderer = Renderer(tokenizer, config.train_on, config.on_unstable_template, config.thinking)
        self._encoder = Encoder(tokenizer, config.max_length)
        self._policy = policy_for(config.on_overflow, config.format)
        self._writer = writer
        self._counts = counts
        named = (getattr(config.columns, field) for field in fields_of(config.format) if field != "reasoning")
        self._read_columns = {part for name in named if name is not None for part in (name, *name.split(JOIN))}

    def write(self, rows: Sequence[Located]) -> None:
        """Render, tokenize and write a batch; DataError with the bad rows so far if they are an error."""
        rendered = [self._render(row) for _, row in rows]
        texts = [text for result in rendered if isinstance(result, RenderedRow) for text in result.samples]
        tokens = iter(self._encoder.encode(texts))
        for (location, _), result in zip(rows, rendered, strict=True):
            self._counts.rows_read += 1
            if isinstance(result, str):
                self._counts.bad(location, result)
                continue
            samples = [next(tokens) for _ in result.samples]
            problem = _nothing_trained(result.samples, samples)
            if problem:
                self._counts.bad(location, problem)
            else:
                self._write_row(location, result, samples)
        if self._config.on_bad_row == "error" and self._counts.bad_rows:
            raise DataError(bad_row_problems(self._counts))

    def _render(self, row: Row | Broken) -> RenderedRow | str:
        """Return the rendered row, or the reason why it is bad."""
        if isinstance(row, Broken):
            return row.reason
        fmt, columns = self._config.format, self._config.columns
        try:
            content, ended = without_end_tokens(read_row(row, fmt, columns, self._config))
            rendered = self._renderer.render(content)
            for sample in rendered.samples:
                for text in (sample.text, sample.second or "", sample.label or ""):
                    _check_characters(text)
        except RowProblem as problem:
            return str(problem)
        except RecursionError:
            return "lists or objects are nested too deeply"
        self._counts.end_tokens += ended
        self._count_unread(row, content, rendered)
        return replace(rendered, empty=tuple(empty_parts(row, content, fmt, columns)))

    def _count_unread(self, row: Row, content: Content, rendered: RenderedRow) -> None:
        """Count unread columns, and message keys that the template does not read."""
        columns = self._config.columns
        chats = [side for side in sides_of(content) if isinstance(side, Conversation)]
        read = {*self._read_columns, tools_column(row, columns) or ""} if chats else self._read_columns
        thought = thought_column(row, columns) if "reasoning" in fields_of(self._config.format) else None
        names = [name for name in unread(row, read) if name != thought]
        for name in names:
            count_name(self._counts.unread_columns, name)
        if names or thought:
            self._count_missed(row, content, rendered, [*names, *filter(None, [thought])])
        if isinstance(content, Document) and not content.completion_start:
            marker = WRITTEN_CHAT.search(content.text, 0, _MAX_MARKER_CHARS)
            if marker:
                count_name(self._counts.foreign_markers, marker.group().strip())
        template = self._renderer.names
        for at, chat in enumerate(chats):
            first = chat.completion_start if at else 0  # a pair of answers has the same prompt
            for key in (key for index in range(first, len(chat.messages)) for key in template.unread_keys(chat, index)):
                if key != "reasoning_content" or not thought:
                    count_name(self._counts.unread_keys, key)
        for name in (name for name in (chats[0].options if chats else ()) if not template.reads_option(name)):
            count_name(self._counts.unread_columns, f"{columns.chat_template_kwargs}.{name}")

    def _count_missed(self, row: Row, content: Content, rendered: RenderedRow, names: Sequence[str]) -> None:
        """Count the named columns with text that no sample has, and the places where they can be read."""
        read = ReadRow(self._config, row, content, rendered.samples, self._renderer.names)
        for name, place in read.missed(names):
            cell = value(row, name)
            count_name(self._counts.missed, name)
            count_name(self._counts.missed_chars, name, len(cell) if isinstance(cell, str) else 0)
            if place is not None and name in self._counts.missed:
                self._counts.missed_places.setdefault(name, place)

    def _write_row(self, location: str, row: RenderedRow, samples: Sequence[Tokens]) -> None:
        counts = self._counts
        counts.unseen += row.unseen
        counts.shortened += row.shortened
        counts.marked += row.marked
        counts.merged += row.merged
        for where in row.empty:
            counts.empty[where] = counts.empty.get(where, 0) + 1
        if row.unstable:
            self._count_unstable(row, samples)
        counts.glued += sum(sample.glued for sample in samples)
        counts.endless += sum(sample.endless for sample in samples)
        limit, shape = self._config.max_length, ROW_FORMATS[self._config.format]
        if shape.pairs:
            parts = fit_pair(samples, limit, self._policy, counts)
        else:
            parts = [part for sample in samples for part in fit(sample, limit, self._policy, counts)]
        if counts.over_long and not counts.first_over_long:
            counts.first_over_long = location
        counts.rows_kept += bool(parts)
        counts.rows_lost += not parts
        for part in parts:
            # Samples of one conversation overlap, so they must be in the same split; pieces of a text do not overlap.
            # Preference answers are split by their prompt, if they have one.
            deciding = (part if self._policy == "split" else parts[-1]).ids
            if shape.learnt_by and row.samples[0].spans[0][0]:
                deciding = deciding[: int(np.argmax(part.loss_mask))]
            self._writer.add(location, part, digest(deciding))
            counts.samples += 1
            counts.tokens += len(part.ids)
            # a single label has no mask
            counts.trained_tokens += max(int(part.loss_mask.sum()), part.label is not None)

    def _count_unstable(self, row: RenderedRow, samples: Sequence[Tokens]) -> None:
        """Count a conversation with rewritten turns, and its tokens with expand and join.

        The policy that is not used is estimated from its characters, because it repeats the same text.
        """
        counts, policy = self._counts, self._config.on_unstable_template
        counts.unstable += 1
        counts.unstable_reasoning += row.reasoning
        if policy == "join" and row.joined:
            counts.joined += 1
        elif policy != "last":
            counts.expanded_into += len(samples)
        tokens = sum(len(sample.ids) + sample.more for sample in samples)
        chars = sum(len(sample.text) for sample in row.samples)
        sizes = {"expand": row.expanded_chars, "join": len(row.joined.text) if row.joined else row.expanded_chars}
        for name, size in sizes.items():
            count_name(counts.unstable_tokens, name, round(tokens * size / chars))
        if row.joined:
            counts.dropped_text = counts.dropped_text or row.joined.dropped


def _check_characters(text: str) -> None:
    """Raise RowProblem for characters that JSON and tables can have but text cannot."""
    if "\0" in text:
        raise RowProblem("contains a NUL character (damaged file)")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RowProblem(f"contains a lone surrogate (half a character): {error.object[error.start]!r}") from error


def _nothing_trained(texts: list[RenderedText], samples: list[Tokens]) -> str:
    """Return the reason why a row has nothing to train; empty if all of its samples have trained tokens."""
    for text, tokens in zip(texts, samples, strict=True):
        if text.is_example:
            if not len(tokens.ids):
                return "the tokenizer makes no tokens from it"
            without = len(text.words) - int(tokens.loss_mask.sum())
            if without:
                return f"the tokenizer has no separate token for {without} of its {len(text.words)} words"
            continue
        trained = int(tokens.loss_mask.sum())
        if not trained and not tokens.more:
            return "it has no trained tokens"
        if text.raw and tokens.glued and trained == 1:
            return (
                "the completion shares its only token with the end of the prompt, so it cannot be trained; move"
                " whitespace from the end of the prompt to the start of the completion"
            )
    return ""
