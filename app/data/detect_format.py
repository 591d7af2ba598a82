"""`dataset.format=auto`: which format the first rows have, and why; an error where none or several fit."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from itertools import islice
from typing import Any

from app.config.dataset import formats_for, key_of, sources_of
from app.config.dataset_schema import Columns, DatasetConfig
from app.config.row_formats import CHAT_OF, ROW_FORMATS, TAGGED_FORMATS
from app.data.column_sets import (
    FormatCandidate,
    answer_columns,
    is_unanswered,
    known_sets,
    of_known_set,
    suggestion,
    without_answers,
)
from app.data.columns import ABSENT, JOIN, command, has, is_number, is_talk, thought_column, typed, value, wanted_rows
from app.data.conversations import SPEAKERS, parsed_list
from app.data.formats import ANSWERS, ASSISTANT, WRITTEN_CHAT, fields_of
from app.data.roles import names_of
from app.data.sources import Source, eval_source, train_source
from app.data.types import Broken, Row, escaped, kind_of
from app.data.unsupported_rows import unsupported_column
from app.errors import DataError
from app.safe_text import listed

INSPECTED_ROWS = 200
_MIN_FITTING_SHARE = 0.9  # of the inspected rows; a bad row is reported when it is read
_NEW_LINE = "\n    "


def detect_formats(
    config: DatasetConfig,
    formats: Sequence[str] = formats_for("causal"),
    has_template: Callable[[], bool] = lambda: False,
) -> tuple[DatasetConfig, list[str]]:
    """Replace `auto` by the format of the rows; returns the section, and a note for each source.

    Each source of a mix is inspected by itself, and so is a file of held-out rows beside it. DataError has the
    problems of all. `formats` are those to choose from. Texts that answer a prompt are chats if the model of the run
    `has_template`, which is asked only where it decides.
    """
    found: dict[str, DatasetConfig] = {}
    notes: list[str] = []
    problems: list[str] = []
    for name, section, source in _undetected(config):
        try:
            found[name], note = detect_format(section, source, key_of(name), formats, has_template)
            notes.append(note)
        except DataError as error:
            problems += error.problems
    if problems:
        raise DataError(problems)
    mix = {
        name: each
        if name not in found
        else replace(each, format=found[name].format, columns=_columns(found[name], config))
        for name, each in config.mix.items()
    }
    notes += [
        f"{key_of(name)}.format={section.format} writes no chat template, although the model has one. To write it,"
        f" type: {command(CHAT_OF[section.format], _columns_of(section), section, key_of(name))}"
        for name, section in sources_of(config).items()
        if section.format in CHAT_OF
        and has_template()
        and _are_asked(_first_rows(key_of(name), train_source(section, name).rows()), section.columns)
    ]
    return replace(found.get("", config), mix=mix), notes


def _undetected(config: DatasetConfig) -> Iterator[tuple[str, DatasetConfig, Source]]:
    """Sources of unknown format, with the name of their section."""
    for name, section in sources_of(config).items():
        if section.format == "auto":
            yield name, section, train_source(section, name)
    eval_rows = eval_source(config) if config.mix and config.format == "auto" else None
    if eval_rows is not None:  # without a mix, held-out rows have the format of the others
        yield "", config, eval_rows


def _columns_of(section: DatasetConfig) -> dict[str, str]:
    """Return the columns that its format reads."""
    return {field: path for field in fields_of(section.format) if (path := getattr(section.columns, field))}


def _columns(section: DatasetConfig, config: DatasetConfig) -> dict[str, str]:
    """All columns that its format needs, because other sources may have other names for the same."""
    shape, found = ROW_FORMATS[section.format], section.columns
    renamed = [name for name in shape.may if getattr(found, name) != getattr(config.columns, name)]
    return {name: getattr(found, name) for name in (*shape.needs, *renamed)}


def detect_format(
    config: DatasetConfig, source: Source, key: str, formats: Sequence[str], has_template: Callable[[], bool]
) -> tuple[DatasetConfig, str]:
    """The section with the format of the rows of one source, and a note on why."""
    named = f"{source.key}={source.name}"
    rows = _first_rows(named, wanted_rows(source.rows(), config, [each.name for each in fields(Columns)]))
    formats = [fmt for fmt in ROW_FORMATS if fmt in formats]
    # media and preference data are refused; a few such rows are reported when they are read
    problems = [each for row in rows if (each := unsupported_column(row, formats[0], config.columns, config))]
    if len(problems) > (1 - _MIN_FITTING_SHARE) * len(rows):
        raise DataError(f"{named}: in {len(problems)} of the first {len(rows)} rows, {problems[0]}")
    fitting = _fitting(rows, config.columns, formats)
    fitting = fitting or [*known_sets(rows, config.columns, formats, _MIN_FITTING_SHARE)]
    fitting = fitting or _fitting(_with_numbers_as_text(rows, config.columns), config.columns, formats)
    beside = _answers_beside(config, key, rows, fitting)
    if beside or not fitting:
        advice = beside or _of_answers(config, key, rows, formats, has_template)
        raise DataError(_NEW_LINE.join(map(escaped, _unknown(named, key, rows, config, formats, advice))))
    if len(fitting) > 1:
        begin = f"{named}: {key}.format=auto finds {len(fitting)} ways to read these rows. Type the one you mean:"
        words = [command(each.format, each.renamed, config, key) for each in fitting]
        ways = [escaped(f"{way}   ({each.reason(len(rows))})") for way, each in zip(words, fitting, strict=True)]
        raise DataError(_NEW_LINE.join([begin, *ways]))
    reason = fitting[0].reason(len(rows))
    found = _with_prompt(fitting[0], rows, config.columns, has_template)
    columns = replace(config.columns, **found.renamed)
    return replace(config, format=found.format, columns=columns), _note(found, key, rows, columns, reason)


def _first_rows(named: str, found: Iterator[tuple[str, Row | Broken]]) -> list[Row]:
    first = list(islice(found, INSPECTED_ROWS))
    rows = [row for _, row in first if not isinstance(row, Broken)]
    if not first:
        raise DataError(f"{named}: has no rows")
    location, row = first[0]
    if not rows and isinstance(row, Broken):
        raise DataError(f"{named}: none of its first rows can be read; {location}: {row.reason}")
    return rows


def _fitting(rows: Sequence[Row], columns: Columns, formats: Sequence[str]) -> list[FormatCandidate]:
    """The ways to read these rows. A column that has its usual name in one of them is not renamed for another."""
    found = [each for each in _candidates(rows, columns, formats) if each.fits >= _MIN_FITTING_SHARE * len(rows)]
    taken = {name for each in found if not each.renamed for name in each.columns}
    return [each for each in found if not each.renamed or each.columns[0] not in taken]


def _with_numbers_as_text(rows: Sequence[Row], columns: Columns) -> list[Row]:
    """Return the rows as they are read where answers are numbers."""
    names = {getattr(columns, field) for field in ANSWERS}
    return [{name: str(i) if name in names and is_number(i) else i for name, i in row.items()} for row in rows]


def _candidates(rows: Sequence[Row], columns: Columns, formats: Sequence[str]) -> Iterator[FormatCandidate]:
    for fmt in formats:
        shape = ROW_FORMATS[fmt]
        names = tuple(getattr(columns, field) for field in shape.needs)
        there = dict(zip(shape.needs, names, strict=True))
        fits = sum(all(_fits(fmt, value(row, name), field) for field, name in there.items()) for row in rows)
        yield FormatCandidate(fmt, names, fits)
        if shape.any_column and fits < _MIN_FITTING_SHARE * len(rows):
            for name in (name for name in _names(rows) if name != names[0]):
                fits = sum(_fits(fmt, row.get(name)) for row in rows)
                yield FormatCandidate(fmt, (name,), fits, {shape.needs[0]: name})


def _with_prompt(
    found: FormatCandidate, rows: Sequence[Row], columns: Columns, has_template: Callable[[], bool]
) -> FormatCandidate:
    """Return the way to read answers with their prompt, and through the chat template if the model has one."""
    if not ROW_FORMATS[found.format].learnt_by:
        return found
    if not any(has(row, columns.prompt) for row in rows):
        columns = replace(columns, prompt=_prompt_of(rows, columns))
        found = replace(found, renamed={"prompt": columns.prompt} if columns.prompt != "prompt" else {})
    is_chat = any(is_talk(value(row, columns.prompt)) for row in rows)
    if found.format in CHAT_OF and (is_chat or (_are_asked(rows, columns) and has_template())):
        return replace(found, format=CHAT_OF[found.format])
    return found


def _prompt_of(rows: Sequence[Row], columns: Columns) -> str:
    """Return the column with the turns before the answers, or that asks, with its further input; else `prompt`."""
    least = _MIN_FITTING_SHARE * len(rows)
    if any(_has_question(value(row, columns.chosen)) or _has_question(value(row, columns.completion)) for row in rows):
        return columns.prompt
    for name in (*names_of("messages"), "input.messages"):  # the last as OpenAI has it
        if sum(is_talk(value(row, name)) for row in rows) >= least:
            return name
    texts = [name for name in names_of("asks") if sum(isinstance(row.get(name), str) for row in rows) >= least]
    more = ["input"] if texts[:1] == ["instruction"] and "input" in _names(rows) else []
    return JOIN.join([*texts[:1], *more]) or columns.prompt


def _has_question(found: Any) -> bool:
    """Return whether an answer is a whole chat, which has its prompt."""
    roles = [each.get("role", each.get("from")) for each in found if isinstance(each, dict)] if is_talk(found) else []
    return any(SPEAKERS.get(str(role)) == "user" for role in roles)


def _are_asked(rows: Sequence[Row], columns: Columns) -> bool:
    """Return whether most prompts are texts that are no written-out chats, and that the answers do not repeat."""
    asked = 0
    for row in rows:
        prompt = value(row, columns.prompt)
        if isinstance(prompt, str) and prompt.strip() and ASSISTANT not in prompt and not WRITTEN_CHAT.search(prompt):
            answers = [str(value(row, name)) for name in (columns.chosen, columns.completion)]
            asked += not any(answer.startswith(prompt) for answer in answers)
    return 2 * asked > len(rows)


def _fits(fmt: str, found: Any, field: str = "") -> bool:
    """Whether a column that the format needs may hold `found`. Labels are checked when the row is read."""
    if field == "label":
        return found is not ABSENT and found is not None
    keys = ROW_FORMATS[fmt].message
    if fmt in TAGGED_FORMATS:
        return isinstance(found, list)
    if not keys:
        return isinstance(found, str)
    conventions = [keys]
    if ROW_FORMATS[fmt].learnt_by:  # answers may be one message, and turns of ShareGPT
        conventions.append(ROW_FORMATS["sharegpt"].message)
        found = [found] if isinstance(found, dict) else found
    if ROW_FORMATS[fmt].any_column:
        found = parsed_list(found)
    return (
        isinstance(found, list)
        and bool(found)
        and any(all(_is_message(keys, each) for each in found) for keys in conventions)
    )


def _is_message(keys: Sequence[str], each: Any) -> bool:
    """Whether it has the role and something that a message may hold; tables fill absent keys with null."""
    given = {key for key, inner in each.items() if inner is not None} if isinstance(each, dict) else set()
    return keys[0] in given and not given.isdisjoint(keys[1:])


def _note(found: FormatCandidate, key: str, rows: Sequence[Row], columns: Columns, reason: str) -> str:
    fields = ROW_FORMATS[found.format].may
    given = [name for field in fields if field != "reasoning" and (name := getattr(columns, field))]
    if "reasoning" in fields:
        given += {name: None for row in rows if (name := thought_column(row, columns))}
    read = {*found.columns, *found.renamed.values()}
    may = [name for name in given if name not in read and any(has(row, name) for row in rows)]
    also = f"; also read: {listed(may)}" if may else ""
    words = typed(key, found.format, found.renamed)
    return escaped(f"{key}.format=auto: taken as {words}, because {reason}{also}")


def _answers_beside(config: DatasetConfig, key: str, rows: Sequence[Row], fitting: Sequence[FormatCandidate]) -> str:
    """Return the command that reads the answers to messages from another column; empty where they are answered."""
    if not fitting or fitting[0].format != "messages" or config.train_on == "all":
        return ""
    alone = sum(is_unanswered(value(row, fitting[0].columns[0])) for row in rows)
    return of_known_set(config, key, rows, ["chat_completion"], _MIN_FITTING_SHARE) if 2 * alone > len(rows) else ""


def _of_answers(
    config: DatasetConfig, key: str, rows: Sequence[Row], formats: Sequence[str], has_template: Callable[[], bool]
) -> str:
    """Return the command that reads answers of other names to compare or to judge; empty if there are none."""
    meaning, names = answer_columns(rows, formats, _MIN_FITTING_SHARE)
    columns = replace(config.columns, **names)
    for candidate in _candidates(rows, columns, formats):
        if names and candidate.fits >= _MIN_FITTING_SHARE * len(rows):
            found = _with_prompt(candidate, rows, columns, has_template)
            return f"If {meaning}, type: {command(found.format, {**names, **found.renamed}, config, key)}"
    return ""


def _unknown(
    named: str, key: str, rows: Sequence[Row], config: DatasetConfig, formats: Sequence[str], advice: str
) -> list[str]:
    """Say which columns there are, what the formats lack that they nearly have, and what to type."""
    held = {name: next((row[name] for row in rows if row.get(name) is not None), None) for name in _names(rows)}
    found = listed([f"{name} ({kind_of(inner)})" for name, inner in held.items()]) or "none"
    begin = f"{named}: {key}.format=auto knows no format for these rows; columns found: {found}"
    wants = [_missing(fmt, key, rows, config.columns) for fmt in formats]
    chosen = "dataset=FORMAT" if key == "dataset" and not config.mix else f"{key}.format=FORMAT"
    asks = without_answers(rows)
    alone = f"No column has the name of an answer to {asks}. " if asks else ""
    advice = (
        advice
        or suggestion(config, key, rows, formats, _MIN_FITTING_SHARE)
        or f"{alone}docs/data.md has the shapes of rows; columns of other names: {chosen} {key}.columns.FIELD=NAME"
    )
    if any("input_ids" in row for row in rows):
        advice = "Rows of tokens (input_ids) are not read: give their texts"
    return [begin, *filter(None, wants), advice]


def _missing(fmt: str, key: str, rows: Sequence[Row], columns: Columns) -> str:
    """What a format wants of columns that are there in part; empty where it has none of them."""
    names = {field: getattr(columns, field) for field in ROW_FORMATS[fmt].needs}
    if not any(has(row, name) for row in rows for name in names.values()):
        return ""
    wants = []
    for field, name in names.items():
        others = [each for row in rows if not _fits(fmt, each := value(row, name), field)]
        kinds = {kind_of(each): None for each in others if each is not ABSENT}
        number = f"{len(rows) - len(others)} of {len(rows)} rows have it"
        wants.append(f"{name} ({number}{'; others: ' * bool(kinds)}{listed([*kinds])})")
    return f"{key}.format={fmt} wants {ROW_FORMATS[fmt].holds} in {' and '.join(wants)}"


def _names(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(str(name) for row in rows for name in row))
