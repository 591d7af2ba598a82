"""Column sets of common datasets, and suggested commands for rows that no format fits."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.config.kinds import LABELED_FORMATS, ROW_FORMATS, TAGGED_FORMATS
from app.data.advised_commands import check_of_converted, json_file, pair_format
from app.data.columns import EVERY_ELEMENT, FirstRows, Kind, is_text, is_there, text_kind, value
from app.data.conversations import speaker_of
from app.data.roles import INPUTS, ROLES, has_role, is_history, is_talk, judgment, named_like, names_of

_SHORT_TYPES = (str, int, float, type(None))
_LABEL = (str, int, float)
_MAX_SHORT_CHARS = 40  # of a metadata column
_NUMBERED = re.compile(rf"({'|'.join(ROLES['answers'])})[_-]?(?:\d|[a-z])")
_OF_TREE = (
    'def talks($before): ($before + [{role: (if .role == "assistant" then "assistant" else "user" end),'
    ' content: .text}]) as $all | (select(.role == "assistant") | {messages: $all}),'
    " (.replies[]? | talks($all)); .prompt | talks([])"
)


@dataclass(frozen=True, slots=True)
class ColumnSet:
    """Columns of a dataset: those read by `dataset.columns`, and unread `others`."""

    format: str
    columns: Mapping[str, str]  # by field, if its name differs from the field
    others: frozenset[str]


@dataclass(frozen=True, slots=True)
class FormatCandidate:
    """Format that may fit the rows, with its columns."""

    format: str
    columns: tuple[str, ...]
    fits: int  # rows that have these columns
    renamed: Mapping[str, str] = field(default_factory=dict)  # fields of dataset.columns with another column name

    def reason(self, count: int) -> str:
        holds = ROW_FORMATS[self.format].holds
        return f"found {holds} in {', '.join(self.columns)} in {self.fits} of {count} rows"


def _set(fmt: str, columns: str, others: str = "") -> ColumnSet:
    return ColumnSet(fmt, dict(pair.split("=") for pair in columns.split()), frozenset(others.split()))


COLUMN_SETS = (
    _set("instruction", "input=context output=response"),  # Dolly
    _set("instruction", "output=response"),
    _set("instruction", "input=instances.*.input output=instances.*.output", "name is_classification"),  # self-instruct
    _set("question_answer", "system=system_prompt answer=response"),  # OpenOrca
    _set("question_answer", "answer=response"),
    _set("question_answer", "question=input answer=output"),
    _set("question_answer", "question=prompt answer=response"),
    _set("question_answer", "question=problem answer=solution", "answer"),
    _set("question_answer", "question=problem answer=generated_solution", "expected_answer problem_source"),  # OpenMath
    _set("question_answer", "question=query answer=response", "original_question"),  # MetaMathQA
    _set("question_answer", "question=message_1 answer=message_2", "role_1 role_2 sub_topic"),  # CAMEL
    _set("tagged_words", "tags=ner_tags", "pos_tags chunk_tags"),  # CoNLL
)
# Sets that are suggested, not detected: their columns may mean something else.
PROPOSED_SETS = (
    _set("text_pair", "sentence1=premise sentence2=hypothesis label=label"),  # NLI
    _set("text_pair", "sentence1=sentence1 sentence2=sentence2 label=label"),  # MRPC
    _set("text_pair", "sentence1=sentence1 sentence2=sentence2 label=score"),  # STS-B
    _set("text_pair", "sentence1=question1 sentence2=question2 label=is_duplicate"),  # QQP
    _set("tagged_words", "tokens=words tags=ner"),
    _set("instruction", "instruction=question input=context output=answers.text.0"),  # SQuAD
    _set("question_answer", "question=document answer=summary"),  # XSum
    _set("question_answer", "question=article answer=highlights"),  # CNN/DailyMail
    _set("question_answer", "question=question answer=query"),  # Spider
    _set("question_answer", "question=inputs answer=targets"),  # FLAN
    _set("question_answer", "question=src answer=tgt"),  # translations
    _set("chat_completion", "prompt=prompt completion=extra_info.answer"),  # verl
    _set("chat_completion", "prompt=prompt completion=reward_model.ground_truth"),
    _set("chat_completion", "prompt=messages completion=ground_truth"),  # RLVR
    _set("question_answer", "question=problem_statement answer=patch"),  # SWE-bench
)


def answer_columns(first: FirstRows) -> tuple[str, dict[str, str]]:
    """Return the meaning of preference columns and their names by field; empty if there are none."""
    names = [name for name in first.names if first.most(name, is_there)]
    if "preference" in first.formats:
        chosen, rejected = (first.in_role(role, is_there) for role in ("chosen", "rejected"))
        several = [name for name in names if _NUMBERED.fullmatch(name)]
        if not (chosen and rejected) and len(several) == 2:
            chosen, rejected = several
        if chosen and rejected:
            meaning = f"{chosen} is the chosen answer and {rejected} the rejected one"
            return meaning, {"chosen": chosen, "rejected": rejected}
    if "preference_label" in first.formats:
        label = first.in_role("label", lambda cell: judgment(cell) is not None)
        answer = first.in_role("messages", is_talk)
        answer = answer or named_like(ROLES["answers"], [name for name in names if name != label])
        if label and answer:
            return f"{label} labels the answers in {answer} as good or bad", {"completion": answer, "label": label}
    return "", {}


def known_sets(first: FirstRows) -> Iterator[FormatCandidate]:
    """Yield the column sets that match all columns of the rows."""
    names, columns = {*first.names}, first.section.columns
    for entry in COLUMN_SETS:
        shape = ROW_FORMATS[entry.format]
        is_named = any(getattr(columns, field) != field for field in entry.columns)  # by the config
        read = {**{name: getattr(columns, name) for name in shape.needs}, **entry.columns}
        needed = {path.partition(".")[0] for path in read.values()}
        also = {getattr(columns, field) for field in shape.may if field not in entry.columns}
        if is_named or entry.format not in first.formats or not needed <= names:
            continue
        spare = {name for name in names - needed - also - entry.others if not has_role(name, "about")}
        kinds = {path: _kind(entry.format, field, path) for field, path in read.items()}
        if all(_is_short(first, name) for name in spare) and first.is_most(fits := first.number(kinds)):
            yield FormatCandidate(entry.format, tuple(read.values()), fits, entry.columns)


def _kind(fmt: str, field: str, path: str) -> Kind:
    """Return the check for values of a format field."""
    if fmt in TAGGED_FORMATS:
        return lambda cell: isinstance(cell, list)
    if field in ROW_FORMATS[fmt].may:
        return lambda cell: cell is None or is_text(cell)
    if field == "label":
        return lambda cell: isinstance(cell, _LABEL)
    return is_unanswered if ROW_FORMATS[fmt].message and field == "prompt" else text_kind(path)


def suggestion(first: FirstRows) -> str:
    """Return the suggested command for these rows; empty if no column name is a prompt or answer."""
    proposed = proposal(first, first.formats)
    if proposed or ("messages" in first.formats and (proposed := _of_nested_chats(first))):
        return proposed
    paths = first.texts
    if "labelled_text" in first.formats:
        return _for_labels(first)
    asks = named_like(ROLES["asks"], paths)
    several = [path for path in paths if _NUMBERED.fullmatch(path)]
    answers = several[0] if len(several) > 1 else _answering([path for path in paths if path != asks])
    translated = [path for path in paths if path.startswith("translation.")]  # WMT
    if len(translated) == 2 and not (asks and answers):
        asks, answers = translated
    texts = [path for path in paths if path not in (asks, answers) and first.is_prose(path)]
    if bool(asks) != bool(answers) and len(texts) == 1 and not named_like(names_of(*INPUTS), texts):
        asks, answers = asks or texts[0], answers or texts[0]
    if not asks or not answers:
        return _for_plain_text(first, asks, texts or paths) if "text" in first.formats else ""
    others = [path for path in paths if path not in (asks, answers, *several)]
    others += [name for name in first.names if any(is_history(row.get(name)) for row in first.rows)]
    fmt, columns = pair_format(asks, answers, others)
    if fmt not in first.formats:
        return ""
    meaning = f"{asks} is the prompt and {answers} the answer"
    if len(several) > 1:
        meaning = f"this is preference data ({' and '.join(several)}) and {answers} is the chosen answer"
    elif EVERY_ELEMENT in asks and EVERY_ELEMENT in answers:
        meaning += f", with each element of {asks.partition(EVERY_ELEMENT)[0]} as a separate sample"
    return f"If {meaning}, type: {first.command(fmt, columns, several[1:])}"


def proposal(first: FirstRows, formats: Sequence[str]) -> str:
    """Return the command that reads a known column set with another format or task; empty if there is none."""
    is_whole = "text" in formats and first.key == "dataset" and not first.section.mix
    allowed = (*formats, *LABELED_FORMATS, *TAGGED_FORMATS) if is_whole else formats
    for entry in PROPOSED_SETS:
        heads = {path.partition(".")[0] for path in entry.columns.values()}
        if entry.format in formats and any(has_role(name, "answers") for name in first.names if name not in heads):
            continue
        kinds = {path: _kind(entry.format, field, path) for field, path in entry.columns.items()}
        if entry.format in allowed and first.is_most(first.number(kinds)):
            asks, answers, *more = entry.columns.values()
            meaning = f"{asks} is the prompt and {entry.columns.get('output', answers)} the answer"
            if entry.format in LABELED_FORMATS:
                meaning = f"{more[0]} is the label of the pair {asks}, {answers}"
            elif entry.format in TAGGED_FORMATS:
                meaning = f"{answers} has the tags of {asks}"
            command = first.command(entry.format, entry.columns)
            return f"If {meaning}, type: {command}{_regression(first, entry.columns.get('label', ''))}"
    return ""


def without_answers(first: FirstRows) -> str:
    """Return the prompt column of rows without any answer column, nested names included; empty for other rows."""
    names = {str(name): cell for row in first.rows for name, cell in row.items() if cell}
    parts = [cell[0] if isinstance(cell, list) else cell for cell in names.values()]
    inner = [str(key) for part in parts if isinstance(part, dict) for key in part]
    asks = next((name for name, cell in names.items() if has_role(name, "asks") and not isinstance(cell, dict)), "")
    return asks if not any(has_role(name, "answers", "messages") for name in (*names, *inner)) else ""


def is_unanswered(cell: Any) -> bool:
    """Return whether the value is a list of messages that does not end with an answer."""
    return is_talk(cell) and isinstance(cell[-1], dict) and speaker_of(cell[-1]) != "assistant"


def _of_nested_chats(first: FirstRows) -> str:
    """Return commands that convert trees (OASST) or pairs (Firefly) to messages; empty for other rows."""
    file = json_file(first.section)
    check = check_of_converted(file)
    if first.most("prompt", _is_tree):
        conversion = f"{file.jq_of_rows(_OF_TREE)} && {check} dataset.train_on=last"
        return f"Each row is a tree of messages. To convert each answer to a conversation: {conversion}"
    name = next((name for name in first.names if first.most(name, _is_pairs)), "")
    if not name:
        return ""
    turns = '{role: "user", content: .human}, {role: "assistant", content: .assistant}'
    quoted = '"' + name.replace("\\", "\\\\").replace('"', '\\"') + '"'
    conversion = f"{file.jq_of_rows(f'{{messages: [.[{quoted}][] | {turns}]}}')} && {check}"
    return f"Column {name} has human/assistant pairs. To convert them to messages, type: {conversion}"


def _is_tree(cell: Any) -> bool:
    return isinstance(cell, dict) and isinstance(cell.get("text"), str) and isinstance(cell.get("replies"), list)


def _is_pairs(cell: Any) -> bool:
    pairs = cell if isinstance(cell, list) else []
    texts = [pair.get(key) for pair in pairs if isinstance(pair, dict) for key in ("human", "assistant")]
    return bool(pairs) and len(texts) == 2 * len(pairs) and all(map(is_text, texts))


def _regression(first: FirstRows, label: str) -> str:
    """Return the setting for fractional number labels; empty for other labels."""
    labels = [value(row, label) for row in first.rows]
    try:
        numbers = [float(str(cell)) for cell in labels if isinstance(cell, _LABEL)]
    except ValueError:
        return ""
    is_fraction = all(map(math.isfinite, numbers)) and not all(map(float.is_integer, numbers))
    return " task.problem=regression" if is_fraction else ""


def _for_plain_text(first: FirstRows, asks: str, plain: Sequence[str]) -> str:
    """Return the command that trains the only text column; empty if there are other prompt or answer columns."""
    if len(plain) != 1 or EVERY_ELEMENT in plain[0] or asks not in ("", plain[0]):
        return ""
    if any(has_role(name, "answers") for name in first.names if name != plain[0]):
        return ""
    return f"To train {plain[0]} as plain text, type: {first.command('text', {'text': plain[0]})}"


def _answering(paths: Sequence[str]) -> str:
    """Return the answer path: ground truth before model outputs."""
    if "ground_truth" in paths:
        return "ground_truth"
    top = [path for path in paths if "." not in path]
    return named_like(ROLES["answers"], top) or named_like(ROLES["answers"], paths)


def _for_labels(first: FirstRows) -> str:
    """Return the command that reads the longest text and its label; empty if one is missing."""
    columns = {path: path.partition(EVERY_ELEMENT)[0] for path in first.texts}
    sizes = {path: sum(len(str(value(row, columns[path]))) for row in first.rows) for path in columns}
    text = max(sizes, key=sizes.__getitem__, default="")
    others = [name for name, cell in first.rows[0].items() if isinstance(cell, _LABEL) and name != text]
    others = [name for name in others if not has_role(name, "about") and not first.is_prose(name)]
    label = next((name for name in others if has_role(name, "label")), others[0] if others else "")
    if not text or not label:
        return ""
    command = first.command("labelled_text", {"text": text, "label": label})
    return f"If {label} is the label of {text}, type: {command}{_regression(first, label)}"


def _is_short(first: FirstRows, name: str) -> bool:
    """Return whether a column has short metadata and is neither input, answer nor label."""
    if named_like(names_of("asks", "answers", *INPUTS, "label"), [name]):
        return False
    cells = [row.get(name) for row in first.rows]
    return all(type(cell) in _SHORT_TYPES and len(str(cell)) <= _MAX_SHORT_CHARS for cell in cells)
