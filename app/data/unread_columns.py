"""Columns that are not read although answers need what they say, or are judged by them: what to type instead."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from app.config.dataset_schema import Columns, DatasetConfig
from app.config.row_formats import CHAT_OF, ROW_FORMATS, WITHOUT_ANSWERS
from app.data.columns import (
    JOIN,
    as_text,
    choices_of,
    command,
    is_history,
    is_talk,
    json_file,
    optional,
    thought_column,
    value,
)
from app.data.conversations import SPEAKERS
from app.data.formats import fields_of
from app.data.roles import CHOICE, INPUTS, JUDGING, has_role, is_prose
from app.data.types import Content, Conversation, Document, RenderedText, Row, sides_of

if TYPE_CHECKING:
    from app.data.chat_template import TemplateNames
    from app.data.data_report import RowCounts

_JUDGEMENTS = (0, 1, "0", "1", "0.0", "1.0")
_PAIRS = {
    "instruction": ("instruction", "output"),
    "question_answer": ("question", "answer"),
    "prompt_completion": ("prompt", "completion"),
}
_TALKS = ("messages", "conversations", "prompt")  # fields that may hold a system message of their own
_TEXT_KEYS = ("text", "content", "value")  # of the elements of a list of answers
_PARENTS = ("parent_id", "parent_message_id")  # columns of a table of messages
THOUGHT_TEMPLATE = "qwen3"  # one that ships and writes thoughts


class Way(StrEnum):
    """What reads a missed column."""

    FIELD = "field"  # of `dataset.columns`
    CHAT = "chat"  # a field, of the chat format of the task
    SYSTEM_MESSAGE = "system message"  # once jq has appended the column to it
    THREAD = "thread"  # rows of messages that jq makes of a table
    TEMPLATE = "template"  # a chat template that writes thoughts
    NONE = "none"


@dataclass(frozen=True, slots=True)
class ColumnPlace:
    """Where a missed column can be read."""

    field: str = ""
    paths: tuple[str, ...] = ()  # of what is there: columns of the field, key of the system message, ids of the thread
    first: bool = False  # before them
    way: Way = Way.FIELD


_NOWHERE = ColumnPlace(way=Way.NONE)


@dataclass(frozen=True, slots=True)
class ReadRow:
    """A row, its samples, and the settings that made them."""

    config: DatasetConfig
    row: Row
    content: Content
    samples: Sequence[RenderedText]
    template: "TemplateNames"

    @property
    def _fields(self) -> Sequence[str]:
        return fields_of(self.config.format)

    @property
    def _wants_prompt(self) -> bool:
        """Whether answers are compared that have no prompt."""
        side = sides_of(self.content)[0]
        has_prompt = not isinstance(side, Document) or side.completion_start
        return bool(ROW_FORMATS[self.config.format].learnt_by) and not has_prompt

    def missed(self, names: Sequence[str]) -> Iterator[tuple[str, ColumnPlace | None]]:
        """Yield each unread column that says what no sample does, and where to read it; None if no answer needs it."""
        choices = [name for name in names if CHOICE.fullmatch(name)]
        for name in names:
            found = value(self.row, name)
            if name in self._fields and getattr(self.config.columns, name) != name:
                continue  # null, or another column in its place, on purpose
            if has_role(name, *JUDGING):
                if self.config.format not in WITHOUT_ANSWERS and is_judgement(found):
                    yield name, None
            elif has_role(name, "history") and is_history(found):
                yield name, ColumnPlace("history") if self.config.format in _PAIRS else _NOWHERE
            elif self._is_missed(name, found, is_choice=len(choices) > 1 and name in choices):
                yield name, self._place(name, found, is_choice=name in choices)

    def _is_missed(self, name: str, found: Any, *, is_choice: bool) -> bool:
        """Return whether the column says what an answer may need and no sample says."""
        if self.config.format == "text" and has_role(name, "answers"):
            return bool(_answer_path(name, found)) and not self._says(_first_text(found))
        if self.config.format == "text" and _is_of_thread(self.row, name, found):
            return True
        if is_talk(found):
            return self._wants_prompt
        if has_role(name, "reasoning") and (self.config.thinking == "drop" or self.config.columns.reasoning is None):
            return False
        if has_role(name, "choices") and (choices := choices_of(found)):
            return not all(self._says(text) for _, text in choices)
        said = as_text(found, name)
        is_short_one = is_choice or (self._wants_prompt and has_role(name, "asks"))
        return said is not None and (is_short_one or is_prose(said, name)) and not self._says(said)

    def _says(self, said: str) -> bool:
        """Return whether a sample has this text."""
        words = " ".join(said.split())
        return any(said.strip() in each.text or words in " ".join(each.text.split()) for each in self.samples)

    def _place(self, name: str, found: Any, *, is_choice: bool) -> ColumnPlace | None:
        """Return where a missed column can be read; None if no answer needs it."""
        fmt = self.config.format
        if fmt in WITHOUT_ANSWERS:
            is_default = fmt == "text" and self.config.columns.text == "text"  # another one is chosen on purpose
            return self._place_beside_text(name, found) if is_default else None
        if has_role(name, "reasoning"):
            return self._place_of_thought(name)
        if not (is_choice or self._wants_prompt or has_role(name, *INPUTS, "choices")):
            return None
        if fmt in _PAIRS:
            return self._in_field("system" if has_role(name, "system") else "input")
        if ROW_FORMATS[fmt].learnt_by:
            return self._place_in_prompt(name, found)
        return self._place_in_system(found)

    def _place_beside_text(self, name: str, found: Any) -> ColumnPlace | None:
        """Return where a column next to a plain text can be read; None if the text does not need it."""
        if has_role(name, "answers"):
            return ColumnPlace("answer", (_answer_path(name, found),))
        if _is_of_thread(self.row, name, found):
            return ColumnPlace(paths=_keys_of_thread(self.row), way=Way.THREAD)
        return ColumnPlace("question") if has_role(name, "asks") else None

    def _place_in_prompt(self, name: str, found: Any) -> ColumnPlace:
        """Return where the prompt of compared answers can have the column."""
        is_system = has_role(name, "system")
        talk = next((each for each in self.row.values() if is_talk(each)), None)
        if self._wants_prompt and (self.template.is_there or talk is not None):
            in_system = is_system or talk not in (None, found)
            return ColumnPlace("system") if in_system else ColumnPlace("prompt", way=Way.CHAT)
        asked = optional(self.row, self.config.columns.prompt)
        if isinstance(asked, list | dict) or (is_system and "system" in self._fields):
            return self._place_in_system(found)
        return self._in_field("prompt", first=is_system)

    def _place_in_system(self, found: Any) -> ColumnPlace:
        """Return where the system message can have the column."""
        side = sides_of(self.content)[0]
        messages = side.messages if isinstance(side, Conversation) else []
        if not messages or messages[0]["role"] != "system" or optional(self.row, self.config.columns.system):
            return self._in_field("system")
        talks = (path for field in _TALKS if field in self._fields and (path := getattr(self.config.columns, field)))
        column = next((path for path in talks if is_talk(self.row.get(path))), "")
        if not column or not isinstance(found, str):
            return _NOWHERE
        text = "value" if "from" in self.row[column][0] else "content"
        return ColumnPlace(paths=(f".{column}[0].{text}",), way=Way.SYSTEM_MESSAGE)

    def _place_of_thought(self, name: str) -> ColumnPlace:
        """Return where a thought can be read."""
        if self.template.writes_thoughts:
            is_free = "reasoning" in self._fields and name != thought_column(self.row, self.config.columns)
            return ColumnPlace("reasoning") if is_free else _NOWHERE
        if self.config.format in _PAIRS:
            return self._in_field(_PAIRS[self.config.format][1], first=True)
        return ColumnPlace(way=Way.TEMPLATE) if "reasoning" in self._fields else _NOWHERE

    def _in_field(self, field: str, *, first: bool = False) -> ColumnPlace:
        """Return the place after or before the column that the field reads in this row."""
        path = getattr(self.config.columns, field)
        is_read = field in self._fields and optional(self.row, path)
        return ColumnPlace(field, (path,) if is_read else (), first)


def is_judgement(found: Any) -> bool:
    """Return whether it is 0 or 1, as a table of text may write it as well."""
    return not isinstance(found, bool | list | dict) and found in _JUDGEMENTS


def _is_of_thread(row: Row, name: str, found: Any) -> bool:
    """Return whether a column places a text in a conversation: who speaks, and what it answers."""
    if name in _PARENTS:
        return "role" in row
    return name == "role" and str(found).lower() in (*SPEAKERS, "prompter")


def _keys_of_thread(row: Row) -> tuple[str, ...]:
    """Return the columns with the ids of a message and of the one that it answers; empty if one is not there."""
    names = [next((name for name in names if name in row), "") for names in (("message_id", "id"), _PARENTS)]
    return tuple(names) if all(names) else ()


def _answer_path(name: str, found: Any) -> str:
    """Return the path of the text of an answer: a column, or every element of a list."""
    if isinstance(found, str) and found.strip() and (name != "target" or is_prose(found)):
        return name
    first = found[0] if isinstance(found, list) and found else found
    star = f"{name}.*" if first is not found else name
    if isinstance(first, str) and first is not found:
        return star
    key = next((key for key in _TEXT_KEYS if isinstance(first, dict) and isinstance(first.get(key), str)), "")
    return f"{star}.{key}" if key else ""


def _first_text(found: Any) -> str:
    """Return the text of an answer, or of the first of several."""
    first = found[0] if isinstance(found, list) else found
    return first if isinstance(first, str) else next(first[key] for key in _TEXT_KEYS if key in first)


def unread_problems(config: DatasetConfig, key: str, counts: "RowCounts") -> Iterator[str]:
    """Yield the reasons why a run stops at the columns that are not read of the source with this section."""
    fmt, missed, rows = config.format, counts.missed, counts.rows_kept + counts.rows_lost
    places = {
        name: place
        for name, place in counts.missed_places.items()
        if 2 * missed[name] > rows or place.way is Way.THREAD
    }
    judging = [name for name in missed if has_role(name, *JUDGING) and missed[name] == counts.unread_columns.get(name)]
    without = command(fmt, _columns_of(fmt, config.columns), config, key, [*places, *judging])
    if places:
        counted = ", ".join(f"{name} ({missed[name]:,} of {rows:,} rows)" for name in places)
        why = "though the answers may need it"
        if fmt == "text":
            why = f"so {config.columns.text} alone would be trained"
        elif any(place.field == "prompt" and not (place.paths or place.first) for place in places.values()):
            why = "so the answers would be trained without their prompt"
        yield (
            f"not read, {why}: {counted}. To read it, {_how(config, key, places)}\n"
            f"    To train without it, type: {without}"
        )
    for name in judging:
        right = json_file(config).jq_of_rows(f"select((.{name} | tonumber) == 1) | del(.{name})")
        yield (
            f"column {name!r} is 0 or 1 in {missed[name]:,} of {rows:,} rows, which judges the answers as wrong"
            " or right (preference data, as for KTO), and all of them would be learnt. Make rows of the right ones"
            f" alone: {right}\n    If it judges nothing, type: {without}"
        )


def _how(config: DatasetConfig, key: str, places: Mapping[str, ColumnPlace]) -> str:
    """Return the command that reads the columns, or advice on making rows where none can."""
    thread = next((place for place in places.values() if place.way is Way.THREAD), None)
    if thread is not None:
        if not thread.paths:
            return "make rows of messages, one for each conversation"
        return f"make a conversation of each answer: {_jq_of_thread(config, *thread.paths)}"
    if all(place.way is Way.SYSTEM_MESSAGE for place in places.values()):
        [text] = next(iter(places.values())).paths
        joined = " + ".join(f'"\\n\\n" + .{name}' for name in places)
        taken = ", ".join(f".{name}" for name in places)
        return f"type: {json_file(config).jq_of_rows(f'{text} += {joined} | del({taken})')}"
    reading = _reading(config.format, config.columns, places)
    if reading is None:
        return "write it into the texts that are read"
    has_template = any(place.way is Way.TEMPLATE for place in places.values())
    template = f" model.chat_template={THOUGHT_TEMPLATE}" if has_template else ""
    return f"type: {command(*reading, config, key)}{template}"


def _jq_of_thread(config: DatasetConfig, name: str, parent: str) -> str:
    """Return the commands that make a conversation of each answer in a table of messages, and train the answer."""
    speakers = ", ".join(f'"{speaker}"' for speaker, role in SPEAKERS.items() if role == "assistant")
    role = f'(if .role | IN({speakers}) then "assistant" elif .role == "system" then "system" else "user" end)'
    turns = f"[recurse($all[.{parent} | tostring] // empty)] | reverse | map({{role: {role}, content: .text}})"
    program = f"INDEX(.{name}) as $all | .[] | select(.role | IN({speakers})) | {{messages: ({turns})}}"
    file = json_file(config)
    checked = command("messages", {}, DatasetConfig(path=file.target(), split="train"))
    return f"{file.jq_of_rows(program, of_all=True)} && {checked} dataset.train_on=last"


def _reading(fmt: str, columns: Columns, places: Mapping[str, ColumnPlace]) -> tuple[str, dict[str, str]] | None:
    """Return the format and columns that read the columns of `places` besides what `fmt` reads; None if none does."""
    ways = {place.way for place in places.values()}
    if ways & {Way.NONE, Way.SYSTEM_MESSAGE}:
        return None
    if fmt == "text":
        return _reading_of_text(columns.text, places)
    read, renamed = _columns_of(fmt, columns), dict[str, str]()
    fields = dict.fromkeys(place.field for place in places.values() if place.field)
    if Way.CHAT in ways or not fields.keys() <= {*fields_of(fmt)}:
        if fmt in _PAIRS:
            renamed = dict(zip(_PAIRS[fmt], _PAIRS["instruction"], strict=True))
            read |= {new: getattr(columns, field) for field, new in renamed.items()}
            fmt = "instruction"
        else:
            fmt = CHAT_OF.get(fmt, fmt)
    if "history" in places and places["history"].field != "history":
        read["history"] = "null"
    read |= {renamed.get(field, field): _joined(field, places) for field in fields}
    return fmt, {field: path for field, path in read.items() if field in fields_of(fmt)}


def _joined(field: str, places: Mapping[str, ColumnPlace]) -> str:
    """Return the path of the columns that a field reads now and those placed there."""
    here = {name: place for name, place in places.items() if place.field == field}
    first = [name for name, place in here.items() if place.first]
    existing = next((place.paths for place in here.values() if place.paths), ())
    return JOIN.join([*first, *existing, *(name for name in here if name not in first)])


def _reading_of_text(text: str, places: Mapping[str, ColumnPlace]) -> tuple[str, dict[str, str]]:
    """Return the format and columns of a question and its answer, one of which is the plain text."""
    asks = next((name for name, place in places.items() if place.field == "question"), "")
    answers = next((path for place in places.values() for path in place.paths), "")
    if asks and answers:
        return "instruction", {"instruction": asks, "output": answers, "input": text}
    return "question_answer", {"question": asks or text, "answer": answers or text}


def _columns_of(fmt: str, columns: Columns) -> dict[str, str]:
    """Return the column that each field of the format reads; null for none."""
    return {field: getattr(columns, field) or "null" for field in fields_of(fmt)}
