"""Sets of columns that many data sets share, and the words to type for those that nothing recognises."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.config.dataset_schema import Columns, DatasetConfig
from app.config.row_formats import LABELLED_FORMATS, ROW_FORMATS, TAGGED_FORMATS
from app.data.columns import (
    ABSENT,
    EVERY_ELEMENT,
    command,
    is_history,
    is_number,
    is_talk,
    named_like,
    pair_format,
    value,
)
from app.data.conversations import LABELS, SPEAKERS
from app.data.nested_chats import nested_chats
from app.data.roles import INPUTS, ROLES, has_role, is_prose, names_of
from app.data.types import Row

_SHORT_TYPES = (str, int, float, type(None))
_NUMERIC_ANSWERS = ("output", "answer", "solution", "response", "completion", "ground_truth")  # others may be counts
_LABEL = (str, int, float)
_KINDS = {"label": _LABEL, "tokens": list, "tags": list}  # by field; the others hold text
_MAX_SHORT_CHARS = 40  # of a column that is about a row
_NUMBERED = re.compile(rf"({'|'.join(ROLES['answers'])})[_-]?(?:\d|[a-z])")


@dataclass(frozen=True, slots=True)
class ColumnSet:
    """Columns of a data set: those that the fields of `dataset.columns` read, and `others`, which are not read."""

    format: str
    columns: Mapping[str, str]  # by field, where the column is called otherwise than the field
    others: frozenset[str] = field(default=frozenset())


@dataclass(frozen=True, slots=True)
class FormatCandidate:
    """A format, and the columns that it would read."""

    format: str
    columns: tuple[str, ...]
    fits: int  # rows that have these columns
    renamed: Mapping[str, str] = field(default_factory=dict)  # fields of dataset.columns, called otherwise

    def reason(self, count: int) -> str:
        holds = ROW_FORMATS[self.format].holds
        return f"{self.fits} of the first {count} rows hold {holds} in {', '.join(self.columns)}"


COLUMN_SETS = (
    ColumnSet("instruction", {"input": "context", "output": "response"}),  # Dolly
    ColumnSet("instruction", {"output": "response"}),
    ColumnSet(  # self-instruct
        "instruction",
        {"input": "instances.*.input", "output": "instances.*.output"},
        frozenset({"name", "is_classification"}),
    ),
    ColumnSet("question_answer", {"system": "system_prompt", "answer": "response"}),  # OpenOrca
    ColumnSet("question_answer", {"answer": "response"}),
    ColumnSet("question_answer", {"question": "input", "answer": "output"}),
    ColumnSet("question_answer", {"question": "prompt", "answer": "response"}),
    ColumnSet("question_answer", {"question": "problem", "answer": "solution"}, frozenset({"answer"})),
    ColumnSet(  # OpenMathInstruct
        "question_answer",
        {"question": "problem", "answer": "generated_solution"},
        frozenset({"expected_answer", "problem_source"}),
    ),
    ColumnSet(  # MetaMathQA
        "question_answer", {"question": "query", "answer": "response"}, frozenset({"original_question"})
    ),
    ColumnSet("tagged_words", {"tags": "ner_tags"}, frozenset({"pos_tags", "chunk_tags"})),  # CoNLL
    ColumnSet(  # CAMEL
        "question_answer",
        {"question": "message_1", "answer": "message_2"},
        frozenset({"role_1", "role_2", "sub_topic"}),
    ),
)
# Sets that are proposed, not taken: a column of them may mean something else.
PROPOSED_SETS = (
    ColumnSet("text_pair", {"sentence1": "premise", "sentence2": "hypothesis", "label": "label"}),  # NLI
    ColumnSet("text_pair", {"sentence1": "sentence1", "sentence2": "sentence2", "label": "label"}),  # MRPC
    ColumnSet("text_pair", {"sentence1": "sentence1", "sentence2": "sentence2", "label": "score"}),  # STS-B
    ColumnSet("text_pair", {"sentence1": "question1", "sentence2": "question2", "label": "is_duplicate"}),  # QQP
    ColumnSet("tagged_words", {"tokens": "words", "tags": "ner"}),
    ColumnSet("instruction", {"instruction": "question", "input": "context", "output": "answers.text.0"}),  # SQuAD
    ColumnSet("question_answer", {"question": "document", "answer": "summary"}),  # XSum
    ColumnSet("question_answer", {"question": "article", "answer": "highlights"}),  # CNN/DailyMail
    ColumnSet("question_answer", {"question": "question", "answer": "query"}),  # Spider
    ColumnSet("question_answer", {"question": "inputs", "answer": "targets"}),  # FLAN
    ColumnSet("question_answer", {"question": "src", "answer": "tgt"}),  # translations
    ColumnSet("chat_completion", {"prompt": "prompt", "completion": "extra_info.answer"}),  # verl
    ColumnSet("chat_completion", {"prompt": "prompt", "completion": "reward_model.ground_truth"}),
    ColumnSet("chat_completion", {"prompt": "messages", "completion": "ground_truth"}),  # RLVR
    ColumnSet("question_answer", {"question": "problem_statement", "answer": "patch"}),  # SWE-bench
)


def answer_columns(rows: Sequence[Row], formats: Sequence[str], least: float) -> tuple[str, dict[str, str]]:
    """Return what the columns of answers to compare or to judge mean, and these columns by field; empty for none."""
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if _share(rows, name) >= least]
    if "preference" in formats:
        chosen, rejected = (
            next((name for name in ROLES[role] if name in names), "") for role in ("chosen", "rejected")
        )
        several = [name for name in names if _NUMBERED.fullmatch(name)]
        if not (chosen and rejected) and len(several) == 2:
            chosen, rejected = several
        if chosen and rejected:
            return f"{chosen} is the chosen answer and {rejected} the rejected one", {
                "chosen": chosen,
                "rejected": rejected,
            }
    if "preference_label" in formats:
        label = next((name for name in ROLES["label"] if _share(rows, name, _is_judged) >= least), "")
        talk = next((name for name in ROLES["messages"] if _share(rows, name, is_talk) >= least), "")
        answer = talk or named_like(ROLES["answers"], [name for name in names if name != label])
        if label and answer:
            return f"{label} is true where the answer in {answer} is good", {"completion": answer, "label": label}
    return "", {}


def _share(rows: Sequence[Row], path: str, is_kind: Callable[[Any], bool] | None = None) -> float:
    """Return the share of the rows that have something of a kind there."""
    found = [value(row, path) for row in rows]
    return sum(each is not ABSENT and each is not None and (not is_kind or is_kind(each)) for each in found) / len(rows)


def _is_judged(found: Any) -> bool:
    return str(found).strip().lower() in LABELS


def known_sets(
    rows: Sequence[Row], columns: Columns, formats: Iterable[str], least: float
) -> Iterator[FormatCandidate]:
    """The sets that the columns of `rows` are as a whole."""
    names = {str(name) for row in rows for name in row}
    for each in COLUMN_SETS:
        shape = ROW_FORMATS[each.format]
        is_named = any(getattr(columns, field) != field for field in each.columns)  # by the config
        read = {**{name: getattr(columns, name) for name in shape.needs}, **each.columns}
        needed = {path.partition(".")[0] for path in read.values()}
        also = {getattr(columns, field) for field in shape.may if field not in each.columns}
        if is_named or each.format not in formats or not needed <= names:
            continue
        kind = list if each.format in TAGGED_FORMATS else str
        spare = {name for name in names - needed - also - each.others if not has_role(name, "about")}
        if all(_is_short(rows, name) for name in spare):
            fits = sum(
                all(_has(row, path, kind, may_be_null=field in shape.may) for field, path in read.items())
                for row in rows
            )
            if fits >= least * len(rows):
                yield FormatCandidate(each.format, tuple(read.values()), fits, each.columns)


def suggestion(config: DatasetConfig, key: str, rows: Sequence[Row], formats: Sequence[str], least: float) -> str:
    """Command that reads these rows; empty where no name says which column asks or answers."""
    proposed = of_known_set(config, key, rows, formats, least)
    if proposed or ("messages" in formats and (proposed := nested_chats(config, rows, least))):
        return proposed
    paths = list(dict.fromkeys(path for row in rows for path in _text_paths(row)))
    paths = [path for path in paths if sum(_has(row, path) for row in rows) >= least * len(rows)]
    starred = next((path.partition(EVERY_ELEMENT)[0] for path in paths if EVERY_ELEMENT in path), "")
    paths = [path for path in paths if EVERY_ELEMENT not in path or path.partition(EVERY_ELEMENT)[0] == starred]
    if "labelled_text" in formats:
        return _for_labels(config, key, rows, paths)
    asks = named_like(ROLES["asks"], paths)
    several = [path for path in paths if _NUMBERED.fullmatch(path)]
    answers = several[0] if len(several) > 1 else _answering([path for path in paths if path != asks])
    translated = [path for path in paths if path.startswith("translation.")]  # WMT
    if len(translated) == 2 and not (asks and answers):
        asks, answers = translated
    texts = [path for path in paths if path not in (asks, answers) and _is_prose(rows, path)]
    if bool(asks) != bool(answers) and len(texts) == 1 and not named_like(names_of(*INPUTS), texts):
        asks, answers = asks or texts[0], answers or texts[0]
    names = dict.fromkeys(str(name) for row in rows for name in row)
    if not asks or not answers:
        return _for_plain_text(config, key, names, asks, texts or paths) if "text" in formats else ""
    others = [path for path in paths if path not in (asks, answers, *several)]
    others += [name for name in names if any(is_history(row.get(name)) for row in rows)]
    fmt, columns = pair_format(asks, answers, others)
    if fmt not in formats:
        return ""
    meaning = f"{asks} asks and {answers} answers"
    if len(several) > 1:
        meaning = f"this is preference data ({' and '.join(several)} answer the same) and {answers} is wanted"
    elif EVERY_ELEMENT in asks and EVERY_ELEMENT in answers:
        meaning += f", each element of {starred} without those before it"
    return f"If {meaning}, type: {command(fmt, columns, config, key, several[1:])}"


def of_known_set(config: DatasetConfig, key: str, rows: Sequence[Row], formats: Sequence[str], least: float) -> str:
    """Return the command that reads a set of columns by another format, or for another task; empty if none is there."""
    tasks = (*LABELLED_FORMATS, *TAGGED_FORMATS) if "text" in formats and key == "dataset" and not config.mix else ()
    names = {str(name) for row in rows for name in row}
    for each in PROPOSED_SETS:
        heads = {path.partition(".")[0] for path in each.columns.values()}
        if each.format in formats and any(has_role(name, "answers") for name in names - heads):
            continue
        talks = [path for field, path in each.columns.items() if field == "prompt"]
        kinds = {path: _KINDS.get(field, str) for field, path in each.columns.items() if path not in talks}
        fits = sum(
            all(_has(row, path, kind) for path, kind in kinds.items())
            and all(is_unanswered(value(row, path)) for path in talks)
            for row in rows
        )
        if each.format in (*formats, *tasks) and fits >= least * len(rows):
            asks, answers, *more = each.columns.values()
            meaning = f"{asks} asks and {each.columns.get('output', answers)} answers"
            if each.format in LABELLED_FORMATS:
                meaning = f"{more[0]} is the label of the pair {asks}, {answers}"
            elif each.format in TAGGED_FORMATS:
                meaning = f"{answers} has the tags of {asks}"
            words = command(each.format, each.columns, config, key)
            return f"If {meaning}, type: {words}{_regression(rows, each.columns.get('label', ''))}"
    return ""


def without_answers(rows: Sequence[Row]) -> str:
    """Return the column that asks where no name, also inside a column, is one of answers; empty for other rows."""
    names = {str(name): found for row in rows for name, found in row.items() if found}
    parts = [found[0] if isinstance(found, list) else found for found in names.values()]
    inner = [str(key) for part in parts if isinstance(part, dict) for key in part]
    asks = next((name for name, found in names.items() if has_role(name, "asks") and not isinstance(found, dict)), "")
    return asks if not any(has_role(name, "answers", "messages") for name in (*names, *inner)) else ""


def is_unanswered(found: Any) -> bool:
    """Return whether it is a list of messages or turns without an answer at its end."""
    last = found[-1] if is_talk(found) else None
    return isinstance(last, dict) and SPEAKERS.get(str(last.get("role", last.get("from")))) != "assistant"


def _regression(rows: Sequence[Row], label: str) -> str:
    """Return the setting for labels that are numbers with fractions; empty for others."""
    try:
        numbers = [float(str(value(row, label))) for row in rows if _has(row, label, _LABEL)]
    except ValueError:
        return ""
    is_fraction = all(map(math.isfinite, numbers)) and not all(map(float.is_integer, numbers))
    return " task.problem=regression" if is_fraction else ""


def _for_plain_text(config: DatasetConfig, key: str, names: Iterable[str], asks: str, plain: Sequence[str]) -> str:
    """Return the command that trains the only text; empty where another column answers, or the text is asked about."""
    if len(plain) != 1 or EVERY_ELEMENT in plain[0] or asks not in ("", plain[0]):
        return ""
    if any(has_role(name, "answers") for name in names if name != plain[0]):
        return ""
    return f"To train {plain[0]} as plain text, type: {command('text', {'text': plain[0]}, config, key)}"


def _answering(paths: Sequence[str]) -> str:
    """Return the path that answers: what is true, before a guess of a model."""
    truth = [path for path in paths if path == "ground_truth"]
    top = [path for path in paths if "." not in path]
    return next(iter(truth), "") or named_like(ROLES["answers"], top) or named_like(ROLES["answers"], paths)


def _for_labels(config: DatasetConfig, key: str, rows: Sequence[Row], texts: Sequence[str]) -> str:
    columns = {path: path.partition(EVERY_ELEMENT)[0] for path in texts}
    text = max(texts, key=lambda path: sum(len(str(value(row, columns[path]))) for row in rows), default="")
    others = [name for name, found in rows[0].items() if isinstance(found, _LABEL) and name != text]
    others = [name for name in others if not has_role(name, "about") and not _is_prose(rows, name)]
    label = next((name for name in others if has_role(name, "label")), others[0] if others else "")
    if not text or not label:
        return ""
    words = command("labelled_text", {"text": text, "label": label}, config, key)
    return f"If {label} is the label of {text}, type: {words}{_regression(rows, label)}"


def _text_paths(row: Row) -> Iterator[str]:
    """Paths of the texts of a row: in a column, in an object, in every element of a list."""
    for name, found in row.items():
        if has_role(name, "about"):
            continue
        if _is_text(found, name):
            yield name
        elif isinstance(found, dict):
            yield from (f"{name}.{key}" for key, inner in found.items() if isinstance(inner, str))
        elif isinstance(found, list) and found and isinstance(found[0], str):
            yield f"{name}{EVERY_ELEMENT}"
        elif isinstance(found, list) and found and isinstance(found[0], dict):
            if any(isinstance(inner, bool) for inner in found[0].values()):
                continue  # which says that some elements are not to be learnt
            yield from (f"{name}{EVERY_ELEMENT}.{key}" for key, inner in found[0].items() if isinstance(inner, str))


def _has(row: Row, path: str, kind: Any = str, *, may_be_null: bool = False) -> bool:
    head, _, inner = path.partition(EVERY_ELEMENT)
    found = value(row, head)
    if EVERY_ELEMENT in path:
        parts = [value({"*": each}, f"*{inner}") for each in found] if isinstance(found, list) else []
        return bool(parts) and all(isinstance(part, str) for part in parts)
    return isinstance(found, kind) or (may_be_null and found is None) or (kind is str and _is_text(found, path))


def _is_text(found: Any, path: str) -> bool:
    """Return whether it is text, or a number that answers, which is read as text."""
    return isinstance(found, str) or (is_number(found) and path.rpartition(".")[2] in _NUMERIC_ANSWERS)


def _is_prose(rows: Sequence[Row], path: str) -> bool:
    """Whether most rows hold text of several words there, in a list in its first element."""
    first = path.replace(EVERY_ELEMENT, ".0")
    return 2 * sum(is_prose(str(value(row, first))) for row in rows) > len(rows)


def _is_short(rows: Sequence[Row], name: str) -> bool:
    """Whether a column of another name holds words or numbers that are about a row, and judge nothing."""
    if named_like(names_of("asks", "answers", *INPUTS, "label"), [name]):
        return False
    found = [row.get(name) for row in rows]
    return all(type(each) in _SHORT_TYPES and len(str(each)) <= _MAX_SHORT_CHARS for each in found)
