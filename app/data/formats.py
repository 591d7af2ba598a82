"""Convert rows to conversations, documents or labeled examples. `READERS` is the table of formats."""

import difflib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from app.config.kinds import ROW_FORMATS
from app.config.schema import Columns, DatasetConfig
from app.data import conversations
from app.data.chat_template import thought_of
from app.data.columns import ABSENT, JOIN, answer_text, has, optional, optional_text, text, thought_column, value
from app.data.conversations import read_conversation
from app.data.labels import as_text, tags_as_text
from app.data.refused_columns import refuse_media, refused_column
from app.data.roles import INPUTS, has_role, names_of
from app.data.rows import (
    AnswerPair,
    Content,
    Conversation,
    Document,
    Example,
    LabeledAnswer,
    Message,
    Row,
    RowProblem,
    kind_of,
    sides_of,
)
from app.data.token_ids import token_ids
from app.safe_text import many

ANSWERS = ("output", "answer", "completion")  # fields that may be a number
_SPEAKING_ROLES = ("user", "assistant")
ASSISTANT = "\n\nAssistant:"  # of plain chats, such as those of HH
# chats already rendered for a model
WRITTEN_CHAT = re.compile(
    r"\[INST\]|<\|im_start\|>|<\|start_header_id\|>|<start_of_turn>|<\|(?:user|User|assistant)\|>|### Instruction:"
    r"|\b(?:Human|USER|User): (?=.*\b(?:Assistant|ASSISTANT): )",
    re.DOTALL,
)


def _instruction(row: Row, columns: Columns) -> Conversation:
    question = text(row, columns.instruction)
    more = optional_text(row, columns.input)
    if more.strip():
        question = f"{question}\n\n{more}"
    earlier = _history(optional(row, columns.history), columns.history)
    return read_conversation([*earlier, *_pair(question, answer_text(row, columns.output))], row, columns)


def _history(turns: Any, column: str | None) -> list[Message]:
    """Return the messages of earlier turns, `[[question, answer], ...]`."""
    if turns is None:
        return []
    if not isinstance(turns, list):
        raise RowProblem(f"column {column!r} must be a list of [question, answer] pairs, found {kind_of(turns)}")
    messages: list[Message] = []
    for index, pair in enumerate(turns):
        if not isinstance(pair, list) or [type(side) for side in pair] != [str, str]:
            raise RowProblem(f"column {column!r}: turn {index} must be two texts, [question, answer]")
        messages += _pair(*pair)
    return messages


def _pair(question: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _prompt_completion(row: Row, columns: Columns) -> Document:
    prompt = text(row, columns.prompt)
    return Document(prompt + answer_text(row, columns.completion), completion_start=len(prompt))


def _preference_text(row: Row, columns: Columns) -> AnswerPair:
    """Read two texts; without a prompt, the answers start after the last `Assistant:`."""
    prompt = optional_text(row, columns.prompt)
    chosen, rejected = (text(row, name) for name in (columns.chosen, columns.rejected))
    if not prompt:
        starts = {side[: side.rfind(ASSISTANT) + len(ASSISTANT)] for side in (chosen, rejected) if ASSISTANT in side}
        if len(starts) > 1:
            raise RowProblem("the chosen and rejected answers have different prompts")
        prompt = "".join(starts)
    sides = ((columns.chosen, chosen), (columns.rejected, rejected))
    return AnswerPair(*(_plain_answer(prompt, side, name) for name, side in sides))


def _preference_label_text(row: Row, columns: Columns) -> LabeledAnswer:
    """Read one text; without a prompt, the answer starts after the last `Assistant:`."""
    prompt, answer = optional_text(row, columns.prompt), text(row, columns.completion)
    if not prompt and ASSISTANT in answer:
        prompt = answer[: answer.rfind(ASSISTANT) + len(ASSISTANT)]
    label = conversations.answer_label(row, columns.label)
    return LabeledAnswer(_plain_answer(prompt, answer, columns.completion), label)


def _plain_answer(prompt: str, cell: str, column: str) -> Document:
    """Return prompt and answer; the column may repeat the prompt."""
    answer = cell.removeprefix(prompt)
    if not answer.strip():
        raise RowProblem(f"column {column!r} has an empty answer")
    return Document(prompt + answer, completion_start=len(prompt))


def _tagged_words(row: Row, columns: Columns) -> Example:
    """Return the words joined by spaces, and the tags as JSON."""
    words, tags = (value(row, name) for name in (columns.tokens, columns.tags))
    for name, cell in ((columns.tokens, words), (columns.tags, tags)):
        if not isinstance(cell, list):
            raise RowProblem(f"column {name!r} must be a list, found {'nothing' if cell is ABSENT else kind_of(cell)}")
    if len(words) != len(tags) or not words:
        raise RowProblem(
            f"column {columns.tokens!r} has {many(len(words), 'word')}, but {columns.tags!r} {many(len(tags), 'tag')}"
        )
    odd = [at for at, word in enumerate(words) if not isinstance(word, str) or not word.strip()]
    if odd:
        what = "empty" if words[odd[0]] == "" else repr(words[odd[0]])[:40]
        raise RowProblem(f"column {columns.tokens!r} must contain words, found {what} at index {odd[0]}")
    return words_with_tags(words, _label(row, columns.tags, tags_as_text))


def words_with_tags(words: Sequence[str], label: str = "[]") -> Example:
    """Return the text of words and their spans."""
    ends = list(accumulate(len(word) + 1 for word in words))
    spans = tuple((end - 1 - len(word), end - 1) for word, end in zip(words, ends, strict=True))
    return Example(" ".join(words), label, words=spans)


def _nonempty(row: Row, column: str) -> str:
    cell = text(row, column)
    if not cell.strip():
        raise RowProblem(f"column {column!r} is empty")
    return cell


def _label(row: Row, column: str, read: Callable[[Any], str] = as_text) -> str:
    """Return the label as text; whether the task has it is checked when all rows are read."""
    try:
        return read(value(row, column))
    except RowProblem as problem:
        raise RowProblem(f"column {column!r} {problem}") from None


READERS: dict[str, Callable[[Row, Columns], Content]] = {
    "messages": conversations.messages,
    "sharegpt": conversations.sharegpt,
    "instruction": _instruction,
    "question_answer": lambda row, names: read_conversation(
        _pair(text(row, names.question), answer_text(row, names.answer)), row, names
    ),
    "prompt_completion": _prompt_completion,
    "chat_completion": conversations.chat_completion,
    "text": lambda row, names: Document(_nonempty(row, names.text)),
    "labelled_text": lambda row, names: Example(_nonempty(row, names.text), _label(row, names.label)),
    "text_pair": lambda row, names: Example(
        _nonempty(row, names.sentence1), _label(row, names.label), _nonempty(row, names.sentence2)
    ),
    "tagged_words": _tagged_words,
    "token_ids": token_ids,
    "preference": conversations.preference,
    "preference_text": _preference_text,
    "preference_label": conversations.preference_label,
    "preference_label_text": _preference_label_text,
}


# End tokens written as text. `</s>` also closes an HTML tag.
_END_TOKEN = re.compile(r"(?:(?:<\|(?:endoftext|im_end|eot_id|end_of_text|end)\|>|<end_of_turn>|<eos>|</s>)\s*)+\Z")


def without_end_tokens(content: Content) -> tuple[Content, int]:
    """Remove and count end tokens written as text in answers; the tokenizer adds its own."""
    if isinstance(content, AnswerPair):
        (chosen, first), (rejected, second) = map(_without_end_token, sides_of(content))
        return replace(content, chosen=chosen, rejected=rejected), first + second
    if isinstance(content, LabeledAnswer):
        answer, number = _without_end_token(content.answer)
        return replace(content, answer=answer), number
    return _without_end_token(content)


def _without_end_token(side: Any) -> tuple[Any, int]:
    if isinstance(side, Document) and side.completion_start:
        answer = _without_end(side.text[side.completion_start :])
        text = side.text[: side.completion_start] + answer
        return replace(side, text=text), int(text != side.text)
    if not isinstance(side, Conversation):
        return side, 0
    answers = {at: message["content"] for at, message in enumerate(side.messages) if message["role"] == "assistant"}
    cut = {at: text for at, answer in answers.items() if (text := _without_end(answer)) != answer}
    if not cut:
        return side, 0
    messages = [{**message, "content": cut.get(at, message["content"])} for at, message in enumerate(side.messages)]
    return replace(side, messages=messages), len(cut)


def _without_end(answer: str) -> str:
    end = _END_TOKEN.search(answer) if ">" in answer[-20:] else None
    if not end or not answer[: end.start()].strip() or (end[0].startswith("</s>") and "<s>" in answer):
        return answer
    return answer[: end.start()]


def read_row(row: Row, fmt: str, columns: Columns, config: DatasetConfig | None = None) -> Content:
    """Read one row; RowProblem has the reason, with commands that use the path of the section `config`."""
    if problem := refused_column(row, fmt, columns, config):
        raise RowProblem(problem)
    # fields with a configured column name are required
    renamed = {field: path for field in ROW_FORMATS[fmt].may if (path := getattr(columns, field)) not in (None, field)}
    required = [field for field, path in renamed.items() if not all(map(_may_be_absent, path.split(JOIN)))]
    for field in (*ROW_FORMATS[fmt].needs, *required):
        if not has(row, getattr(columns, field)):
            raise RowProblem(_wrong_columns(row, field, fmt, columns))
    try:
        content = READERS[fmt](row, columns)
    except RowProblem as problem:
        raise RowProblem(f"{problem}{_prompt_hint(row, fmt, columns)}") from None
    refuse_media(content)
    if isinstance(content, Conversation) and "reasoning" in ROW_FORMATS[fmt].may:
        return _with_thought(content, optional_text(row, thought_column(row, columns)))
    return content


def _prompt_hint(row: Row, fmt: str, columns: Columns) -> str:
    """Return a hint with the column that may be the missing prompt."""
    names = [name for name in names_of("messages", "asks") if row.get(name)]
    if not ROW_FORMATS[fmt].learnt_by or not names or optional(row, columns.prompt) is not None:
        return ""
    return f"; if column {names[0]!r} is the prompt, set dataset.columns.prompt={names[0]}"


def _may_be_absent(name: str) -> bool:
    """Return whether the name is known and optional, so that its absence is not a typo."""
    return has_role(name, *INPUTS, "choices", "reasoning")


def _with_thought(chat: Conversation, thought: str) -> Conversation:
    """Add the reasoning of a column to the last answer, unless it has or contains some."""
    at = max((at for at, message in enumerate(chat.messages) if message["role"] == "assistant"), default=-1)
    if (
        at < 0
        or not thought.strip()
        or thought.strip() in chat.messages[at]["content"]
        or thought_of(chat.messages[at])
    ):
        return chat
    answer = {**chat.messages[at], "reasoning_content": thought}
    return replace(chat, messages=[*chat.messages[:at], answer, *chat.messages[at + 1 :]])


def empty_parts(row: Row, content: Content, fmt: str, columns: Columns) -> Iterator[str]:
    """Yield the needed columns and message roles whose text is empty or whitespace."""
    needed = {name: value(row, name) for name in (getattr(columns, field) for field in ROW_FORMATS[fmt].needs)}
    yield from (f"column {name}" for name, cell in needed.items() if isinstance(cell, str) and not cell.strip())
    if not isinstance(content, Conversation) or any(isinstance(cell, str) for cell in needed.values()):
        return
    for message in content.messages:
        if message["role"] in _SPEAKING_ROLES and not message["content"].strip() and "tool_calls" not in message:
            yield f"{message['role']} messages"


def _wrong_columns(row: Row, field: str, fmt: str, columns: Columns) -> str:
    name = getattr(columns, field)
    names = ", ".join(map(str, row)) or "none"
    fitting = [
        other
        for other, shape in ROW_FORMATS.items()
        if all(has(row, getattr(columns, needed)) for needed in shape.needs)
    ]
    advice = f"set dataset.columns.{field}=NAME"
    near = difflib.get_close_matches(name, list(map(str, row)), n=1)
    if near:
        advice = f"set dataset.columns.{field}={near[0]}"
    elif fitting:
        advice += f", or dataset.format={fitting[0]}, which fits these columns"
    return f"dataset.format={fmt} needs a column {name!r}; columns found: {names}; {advice}"
