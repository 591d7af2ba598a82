"""`dataset.format=auto`: detect the format of the first rows; an error if none or several fit."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import islice
from typing import Any

from app.config.dataset import formats_for, key_of, sources_of
from app.config.kinds import CHAT_OF, ROW_FORMATS, TAGGED_FORMATS, TOKEN_FORMATS, fields_of
from app.config.schema import Columns, DatasetConfig
from app.data.advised_commands import typed
from app.data.column_sets import (
    FormatCandidate,
    answer_columns,
    is_unanswered,
    known_sets,
    proposal,
    suggestion,
    without_answers,
)
from app.data.columns import ABSENT, JOIN, FirstRows, has, is_text, is_there, reshape_rows, thought_column, value
from app.data.conversations import parsed_list, speaker_of
from app.data.data_report import after_transform
from app.data.formats import ANSWERS, ASSISTANT, WRITTEN_CHAT
from app.data.refused_columns import refused_column
from app.data.roles import is_number, is_talk
from app.data.rows import Broken, escaped, kind_of
from app.data.sources import Source, eval_source, train_source
from app.errors import DataError
from app.safe_text import listed

INSPECTED_ROWS = 200
_NEW_LINE = "\n    "


def detect_formats(
    config: DatasetConfig,
    formats: Sequence[str] = formats_for("causal"),
    has_template: Callable[[], bool] = lambda: False,
) -> tuple[DatasetConfig, list[str]]:
    """Replace `auto` by the format of the rows; return the section and a note for each source.

    Each source of a mix and its eval file are inspected separately; DataError has the problems of all. `formats` are
    the candidates. Text answers to a prompt are chats if the model has a template (`has_template`, called only if
    needed).
    """
    sections: dict[str, DatasetConfig] = {}
    notes: list[str] = []
    problems: list[str] = []
    for name, section, source in _undetected(config):
        try:
            sections[name], note = detect_format(section, source, key_of(name), formats, has_template)
            notes.append(note)
        except DataError as error:
            problems += error.problems
    if problems:
        raise DataError(problems)
    mix = {
        name: replace(entry, format=sections[name].format, columns=_columns(sections[name], config))
        if name in sections
        else entry
        for name, entry in config.mix.items()
    }
    for name, section in sources_of(config).items():
        if section.format in CHAT_OF and has_template():
            first = first_rows(train_source(section, name), section, key_of(name), [section.format])
            notes += [_note_on_template(first)] if _are_asked(first, section.columns) else []
    return replace(sections.get("", config), mix=mix), notes


def _note_on_template(first: FirstRows) -> str:
    """Return a note with the command that applies the chat template of the model to prompts and answers."""
    section = first.section
    columns = {field: path for field in fields_of(section.format) if (path := getattr(section.columns, field))}
    return (
        f"{first.key}.format={section.format} does not use the chat template of the model. To use it,"
        f" type: {first.command(CHAT_OF[section.format], columns)}"
    )


def _undetected(config: DatasetConfig) -> Iterator[tuple[str, DatasetConfig, Source]]:
    """Yield the sources with format auto and the names of their sections."""
    for name, section in sources_of(config).items():
        if section.format == "auto":
            yield name, section, train_source(section, name)
    eval_rows = eval_source(config) if config.mix and config.format == "auto" else None
    if eval_rows is not None:  # without a mix, eval rows have the format of the training rows
        yield "", config, eval_rows


def _columns(section: DatasetConfig, config: DatasetConfig) -> dict[str, str]:
    """Return all columns that the format needs, because sources may use different names."""
    shape, columns = ROW_FORMATS[section.format], section.columns
    renamed = [name for name in shape.may if getattr(columns, name) != getattr(config.columns, name)]
    return {name: getattr(columns, name) for name in (*shape.needs, *renamed)}


def detect_format(
    config: DatasetConfig, source: Source, key: str, formats: Sequence[str], has_template: Callable[[], bool]
) -> tuple[DatasetConfig, str]:
    """Return the section with the detected format of one source, and a note with the reason."""
    first = first_rows(source, config, key, [fmt for fmt in ROW_FORMATS if fmt in formats])
    setting, rows = f"{source.key}={source.name}", first.rows
    # media and preference data are rejected; a few such rows are reported when they are read
    refused = partial(refused_column, fmt=first.formats[0], columns=config.columns, config=config)
    problems = [*filter(None, map(refused, rows))]
    if not first.is_most(len(rows) - len(problems)):
        raise DataError(f"{setting}: in {len(problems)} of the first {len(rows)} rows, {problems[0]}")
    fitting = _fitting(first) or [*known_sets(first)] or _fitting(first, reads_numbers=True)
    advice = _separate_answers(first, fitting)
    if advice or not fitting:
        lines = _unknown(first, advice or _of_answers(first, has_template))
        raise DataError(f"{setting}: " + _NEW_LINE.join(map(escaped, lines)))
    if len(fitting) > 1:
        begin = f"{setting}: {key}.format=auto: {len(fitting)} formats fit these rows. Choose one:"
        ways = [f"{first.command(fit.format, fit.renamed)}   ({fit.reason(len(rows))})" for fit in fitting]
        raise DataError(_NEW_LINE.join([begin, *map(escaped, ways)]))
    candidate = _with_prompt(fitting[0], first, config.columns, has_template)
    section = replace(config, format=candidate.format, columns=replace(config.columns, **candidate.renamed))
    return section, _note(candidate, first, section.columns, fitting[0].reason(len(rows)))


def first_rows(source: Source, config: DatasetConfig, key: str, formats: Sequence[str]) -> FirstRows:
    """Read the first rows of a source to detect the format; DataError if there are none."""
    setting = f"{source.key}={source.name}"
    first = [*islice(reshape_rows(source.rows(), config, [f.name for f in fields(Columns)]), INSPECTED_ROWS)]
    rows = [row for _, row in first if not isinstance(row, Broken)]
    if not first:
        raise DataError(f"{setting}: has no rows{after_transform(config)}")
    location, row = first[0]
    if not rows and isinstance(row, Broken):
        raise DataError(f"{setting}: none of the first rows can be read; {location}: {row.reason}")
    return FirstRows(rows, config, key, formats)


def _fitting(first: FirstRows, *, reads_numbers: bool = False) -> list[FormatCandidate]:
    """Return the formats that fit these rows. A column with a default name in one format is not renamed for another.

    `reads_numbers` accepts numbers as answers, which are read as text.
    """
    columns = first.section.columns
    fitting = [fit for fit in _candidates(first, columns, reads_numbers=reads_numbers) if first.is_most(fit.fits)]
    taken = {name for fit in fitting if not fit.renamed for name in fit.columns}
    return [fit for fit in fitting if not fit.renamed or fit.columns[0] not in taken]


def _candidates(first: FirstRows, columns: Columns, *, reads_numbers: bool = False) -> Iterator[FormatCandidate]:
    for fmt in first.formats:
        shape = ROW_FORMATS[fmt]
        kinds = {
            getattr(columns, field): partial(_fits, fmt, field, reads_numbers=reads_numbers) for field in shape.needs
        }
        fits = first.number(kinds)
        yield FormatCandidate(fmt, tuple(kinds), fits)
        if shape.any_column and not first.is_most(fits):
            for name in (name for name in first.names if name not in kinds):
                yield FormatCandidate(
                    fmt, (name,), first.number({name: partial(_fits, fmt, "")}), {shape.needs[0]: name}
                )


def _with_prompt(
    candidate: FormatCandidate, first: FirstRows, columns: Columns, has_template: Callable[[], bool]
) -> FormatCandidate:
    """Return the candidate with the prompt column, and as a chat format if the model has a chat template."""
    if not ROW_FORMATS[candidate.format].learnt_by:
        return candidate
    if not any(has(row, columns.prompt) for row in first.rows):
        columns = replace(columns, prompt=_prompt_of(first, columns))
        candidate = replace(candidate, renamed={"prompt": columns.prompt} if columns.prompt != "prompt" else {})
    is_chat = any(is_talk(value(row, columns.prompt)) for row in first.rows)
    if candidate.format in CHAT_OF and (is_chat or (_are_asked(first, columns) and has_template())):
        return replace(candidate, format=CHAT_OF[candidate.format])
    return candidate


def _prompt_of(first: FirstRows, columns: Columns) -> str:
    """Return the column with previous turns, or the prompt column with its input; otherwise `prompt`."""
    answers = (value(row, name) for row in first.rows for name in (columns.chosen, columns.completion))
    if any(speaker_of(message) == "user" for answer in answers if is_talk(answer) for message in answer):
        return columns.prompt  # of whole chats
    if talk := first.in_role("messages", is_talk):
        return talk
    if first.most("input.messages", is_talk):  # OpenAI format
        return "input.messages"
    asks = first.in_role("asks", is_text)
    more = "input" if asks == "instruction" and "input" in first.names else ""
    return JOIN.join(filter(None, [asks, more])) or columns.prompt


def _are_asked(first: FirstRows, columns: Columns) -> bool:
    """Return whether most prompts are plain texts, not rendered chats, and are not repeated in the answers."""
    asked = 0
    for row in first.rows:
        prompt = value(row, columns.prompt)
        if isinstance(prompt, str) and prompt.strip() and ASSISTANT not in prompt and not WRITTEN_CHAT.search(prompt):
            answers = [str(value(row, name)) for name in (columns.chosen, columns.completion)]
            asked += not any(answer.startswith(prompt) for answer in answers)
    return 2 * asked > len(first.rows)


def _fits(fmt: str, field: str, cell: Any, *, reads_numbers: bool = False) -> bool:
    """Return whether `cell` is valid for a needed column. Labels are checked when the row is read."""
    shape = ROW_FORMATS[fmt]
    if field == "label":
        return is_there(cell)
    if fmt in TAGGED_FORMATS:
        return isinstance(cell, list)
    if fmt in TOKEN_FORMATS:
        return isinstance(cell, list) and bool(cell) and type(cell[0]) is int
    if not shape.message:
        return is_text(cell) or (reads_numbers and field in ANSWERS and is_number(cell))
    conventions = [shape.message]
    if shape.learnt_by:  # answers may be one message, and turns of ShareGPT
        conventions.append(ROW_FORMATS["sharegpt"].message)
        cell = [cell] if isinstance(cell, dict) else cell
    if shape.any_column:
        cell = parsed_list(cell)
    are_messages = (all(_is_message(keys, message) for message in cell) for keys in conventions)
    return isinstance(cell, list) and bool(cell) and any(are_messages)


def _is_message(keys: Sequence[str], message: Any) -> bool:
    """Return whether a value has a role and content of a message; tables store absent keys as null."""
    present = {key for key, inner in message.items() if inner is not None} if isinstance(message, dict) else set()
    return keys[0] in present and not present.isdisjoint(keys[1:])


def _note(candidate: FormatCandidate, first: FirstRows, columns: Columns, reason: str) -> str:
    may_fields = ROW_FORMATS[candidate.format].may
    optional = [name for field in may_fields if field != "reasoning" and (name := getattr(columns, field))]
    if "reasoning" in may_fields:
        optional += {name: None for row in first.rows if (name := thought_column(row, columns))}
    read = {*candidate.columns, *candidate.renamed.values()}
    read_too = [name for name in optional if name not in read and any(has(row, name) for row in first.rows)]
    also = f"; also read: {listed(read_too)}" if read_too else ""
    settings = typed(first.key, candidate.format, candidate.renamed)
    return escaped(f"{first.key}.format=auto: detected {settings}: {reason}{also}")


def _separate_answers(first: FirstRows, fitting: Sequence[FormatCandidate]) -> str:
    """Return the command that reads answers from a second column; empty if the messages have answers."""
    if not fitting or fitting[0].format != "messages" or first.section.train_on == "all":
        return ""
    alone = first.number({fitting[0].columns[0]: is_unanswered})
    return proposal(first, ["chat_completion"]) if 2 * alone > len(first.rows) else ""


def _of_answers(first: FirstRows, has_template: Callable[[], bool]) -> str:
    """Return the command for preference columns with other names; empty if there are none."""
    meaning, names = answer_columns(first)
    columns = replace(first.section.columns, **names)
    for candidate in _candidates(first, columns) if names else ():
        if first.is_most(candidate.fits):
            chat = _with_prompt(candidate, first, columns, has_template)
            return f"If {meaning}, type: {first.command(chat.format, {**names, **chat.renamed})}"
    return ""


def _unknown(first: FirstRows, advice: str) -> list[str]:
    """Return the error lines for an unknown format: the columns, missing columns by format, and the command."""
    key, rows = first.key, first.rows
    cells = {name: next((row[name] for row in rows if row.get(name) is not None), None) for name in first.names}
    columns = listed([f"{name} ({kind_of(cell)})" for name, cell in cells.items()]) or "none"
    begin = f"{key}.format=auto: no format fits these rows; columns found: {columns}"
    requirements = [_missing(fmt, first) for fmt in first.formats]
    if any("input_ids" in row for row in rows) and not set(TOKEN_FORMATS) & {*first.formats}:
        return [begin, *filter(None, requirements), "Rows of token ids (input_ids) need task=causal"]
    chosen = "dataset=FORMAT" if key == "dataset" and not first.section.mix else f"{key}.format=FORMAT"
    asks = without_answers(first)
    no_answer = f"No column is named like an answer to {asks}. " if asks else ""
    general = (
        f"{no_answer}docs/data.md lists the row formats; for other column names, set {chosen} {key}.columns.FIELD=NAME"
    )
    return [begin, *filter(None, requirements), advice or suggestion(first) or general]


def _missing(fmt: str, first: FirstRows) -> str:
    """Return the requirements of a format whose columns are partly present; empty if none is present."""
    names = {field: getattr(first.section.columns, field) for field in ROW_FORMATS[fmt].needs}
    if not any(has(row, name) for row in first.rows for name in names.values()):
        return ""
    requirements = []
    for field, name in names.items():
        others = [cell for row in first.rows if not _fits(fmt, field, cell := value(row, name))]
        kinds = {kind_of(cell): None for cell in others if cell is not ABSENT}
        number = f"{len(first.rows) - len(others)} of {len(first.rows)} rows have it"
        requirements.append(f"{name} ({number}{'; others: ' * bool(kinds)}{listed([*kinds])})")
    return f"{first.key}.format={fmt} needs {ROW_FORMATS[fmt].holds} in {' and '.join(requirements)}"
