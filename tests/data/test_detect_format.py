"""`dataset.format=auto`: which format is recognised, why, and what is said where it is not one thing."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.config.dataset import formats_for, sources_of
from app.config.dataset_schema import DatasetConfig, MixSource
from app.config.load import compose_run
from app.data.detect_format import INSPECTED_ROWS, detect_formats
from app.data.prepare import prepare
from app.errors import DataError
from tests.data.small import chat, config, tokenizer, write_jsonl

TURNS = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
CALLING = [{"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]
ROWS: dict[str, dict[str, Any]] = {
    "messages": {"messages": chat("a", "b")},
    "sharegpt": {"conversations": TURNS},
    "instruction": {"instruction": "a", "input": "", "output": "b"},
    "question_answer": {"question": "a", "answer": "b"},
    "prompt_completion": {"prompt": "a", "completion": "b"},
    "chat_completion": {"prompt": chat("a"), "completion": chat("a", "b")[1:]},
    "text": {"text": "a"},
}
ASKED, ANSWER, OTHER = chat("q"), chat("q", "a")[1:], chat("q", "b")[1:]
LEAVE_OUT = "'dataset.leave_out=[rejected]'"
# rows that `auto` refuses, and the words that the message gives, which work
ADVISED: dict[str, tuple[dict[str, Any], str]] = {
    "instances": (
        {"instruction": "a", "instances": [{"input": "", "output": "b"}], "n": [3]},
        "'dataset.columns.output=instances.*.output' 'dataset.columns.input=instances.*.input'",
    ),
    "context": (
        {"my question": "q", "background_context": "c", "reply": "a", "id": "1"},
        "'dataset.columns.instruction=my question' dataset.columns.output=reply"
        " dataset.columns.input=background_context",
    ),
    "answers": ({"question": "q", "answer": ["a", "b"]}, "'dataset.columns.answer=answer.*'"),
    "history": (
        {"query": "And you?", "response": "a", "history": [["Hi", "Hello"]], "system": "Be kind."},
        "dataset.columns.instruction=query dataset.columns.output=response",
    ),
    "one-known": ({"question": "q", "said": "It is a long answer."}, "dataset.columns.answer=said"),
    "elements": (
        {"qas": [{"question": "q", "answer": "a"}, {"question": "r", "answer": "b"}]},
        "qas.*.answer answers, each element of qas without those before it, type: ",
    ),
    "prompt": ({"prompt": "q"}, "dataset.columns.text=prompt"),
    "numbered": (
        {"question": "q", "response_j": "good", "response_k": "bad", "meta": {}},
        "preference data (response_j and response_k answer the same) and response_j is wanted, type: ",
    ),
    "dpo": ({"prompt": "q", "chosen": " a", "rejected": " b"}, f"dataset.columns.completion=chosen {LEAVE_OUT}"),
    "dpo-chats": ({"prompt": ASKED, "chosen": ANSWER, "rejected": OTHER}, f"columns.completion=chosen {LEAVE_OUT}"),
    "dpo-whole": ({"chosen": chat("q", "a"), "rejected": chat("q", "b")}, f"columns.messages=chosen {LEAVE_OUT}"),
    "dpo-turns": ({"chosen": TURNS, "rejected": TURNS}, f"columns.conversations=chosen {LEAVE_OUT}"),
    "dpo-texts": ({"chosen": "q a", "rejected": "q b"}, f"dataset.columns.text=chosen {LEAVE_OUT}"),
    "dpo-instruction": (
        {"instruction": "q", "input": "", "chosen": "a", "rejected": "b"},
        f"dataset.columns.output=chosen {LEAVE_OUT}",
    ),
    "dpo-question": ({"question": "q", "chosen": "a", "rejected": "b"}, f"columns.answer=chosen {LEAVE_OUT}"),
    "dpo-query": (
        {"query": "q", "chosen": "a", "rejected": "b"},
        f"question=query dataset.columns.answer=chosen {LEAVE_OUT}",
    ),
    "dpo-message": (
        {"prompt": "q", "chosen": ANSWER[0], "rejected": OTHER[0]},
        f"question=prompt dataset.columns.answer=chosen.content {LEAVE_OUT}",
    ),
    "dpo-system": (
        {"prompt": "q", "system": "s", "history": [["Hi", "Yo"]], "chosen": ANSWER, "rejected": OTHER},
        f"dataset.columns.instruction=prompt dataset.columns.output=chosen.0.content {LEAVE_OUT}",
    ),
    "dpo-prompt-and-whole": (
        {"prompt": "q", "chosen": chat("q", "a"), "rejected": chat("q", "b")},
        f"dataset=messages dataset.path=PATH dataset.columns.messages=chosen {LEAVE_OUT}",
    ),
    "dpo-beside": ({"messages": chat("q", "a"), "rejected_response": "b"}, "'dataset.leave_out=[rejected_response]'"),
    "dpo-openai": (
        {"input": {"messages": ASKED}, "preferred_output": ANSWER, "non_preferred_output": OTHER},
        "dataset.columns.prompt=input.messages dataset.columns.completion=preferred_output"
        " 'dataset.leave_out=[non_preferred_output]'",
    ),
    "audio": ({"conversations": TURNS, "audios": ["1.wav"]}, "'dataset.leave_out=[audios]'"),
    "video": ({"prompt": "q", "completion": "a", "video_path": "1.mp4"}, "'dataset.leave_out=[video_path]'"),
}


# rows that `auto` refuses, and a command that makes rows of them
CONVERTED: dict[str, tuple[dict[str, Any], str]] = {
    "dpo-text": (
        {"conversations": TURNS[:1], "tools": [], "chosen": "x", "rejected": "y"},
        """jq -c '.conversations += [{from: "gpt", value: .chosen}] | del(.chosen, .rejected)' PATH > a-fixed.jsonl""",
    ),
    "dpo-content": (
        {"messages": ASKED, "chosen": TURNS[1], "rejected": TURNS[1]},
        """jq -c '.messages += [{role: "assistant", content: .chosen.value}] | del(.chosen, .rejected)' PATH""",
    ),
}
# rows of which no column's name says what it is
SAID_NOTHING: list[dict[str, Any]] = [
    {"answer_id": "Some words.", "model_id": "Other words."},
    {"content": "Some words.", "src": "Other words."},
    {"function": [{"name": "Some words.", "description": "Other words."}]},
    {"input": ["q1", "q2"], "output": ["a1", "a2"]},
    {"instruction": "q", "context": "It rains today.", "input": "And yesterday?", "response": "a"},
]


def auto(path: Path, rows: list[Any], **columns: str) -> tuple[DatasetConfig, str]:
    settings = config(write_jsonl(path / "a.jsonl", rows), "auto", columns=columns)
    found, [note] = detect_formats(settings)
    return found, note


def refusal(path: Path, rows: list[Any], **columns: str) -> list[str]:
    with pytest.raises(DataError) as found:
        auto(path, rows, **columns)
    [problem] = found.value.problems
    assert problem.startswith(f"dataset.path={path}/a.jsonl: ")
    return problem.removeprefix(f"dataset.path={path}/a.jsonl: ").split("\n    ")


def test_auto_labels_only_for_classification(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "a", "label": "x"}])
    assert detect_formats(config(path, "auto"))[0].format == "text"
    bare = write_jsonl(tmp_path / "b.jsonl", [{"text": "a", "stars": 1}])
    with pytest.raises(DataError) as found:
        detect_formats(config(bare, "auto"), formats_for("classification"))
    (problem,) = found.value.problems
    assert problem.endswith(
        "\n    dataset.format=labelled_text wants text and its label in text (1 of 1 rows have it)"
        " and label (0 of 1 rows have it)"
        "\n    If stars is the label of text, type: python -m app.check data task=classification"
        f" dataset=labelled_text dataset.path={bare} dataset.columns.label=stars"
    )


def test_auto_typed_format_unchanged(tmp_path: Path) -> None:
    settings = config(tmp_path / "no such file", "text")
    assert detect_formats(settings) == (settings, [])


def test_auto_conversations_in_any_column(tmp_path: Path) -> None:
    found, note = auto(tmp_path, [{"conversations": chat("a", "b")}])
    assert (found.format, found.columns.messages) == ("messages", "conversations")
    assert "taken as dataset.format=messages dataset.columns.messages=conversations, because" in note
    found, _ = auto(tmp_path, [{"dialogue": TURNS, "messages": "3"}])
    assert (found.format, found.columns.conversations) == ("sharegpt", "dialogue")
    found, _ = auto(tmp_path, [{"talk": [*chat("a"), *CALLING]}])
    assert (found.format, found.columns.messages) == ("messages", "talk")


def test_auto_columns_of_config(tmp_path: Path) -> None:
    row = {"instruction": "a", "context": "", "response": "b", "score": 3}
    found, note = auto(tmp_path, [row], input="context", output="response")
    assert (found.format, found.columns.output) == ("instruction", "response")
    assert "1 of the first 1 rows hold text in instruction, response" in note
    assert note.endswith("; also read: context")


def test_auto_few_bad_rows_tolerated(tmp_path: Path) -> None:
    rows = [*[ROWS["messages"]] * 9, {"messages": "x"}]
    assert "because 9 of the first 10 rows hold" in auto(tmp_path, rows)[1]
    lines = refusal(tmp_path, [*rows, {"messages": "x"}])
    assert (
        "dataset.format=messages wants lists of objects with role and content in messages"
        " (9 of 11 rows have it; others: text)" in lines
    )


def test_auto_inspects_first_rows_only(tmp_path: Path) -> None:
    found, note = auto(tmp_path, [ROWS["text"]] * INSPECTED_ROWS + [ROWS["messages"]] * 9 * INSPECTED_ROWS)
    assert found.format == "text"
    assert f"{INSPECTED_ROWS} of the first {INSPECTED_ROWS} rows" in note


def test_auto_ambiguous_rows_refused(tmp_path: Path) -> None:
    first, *ways = refusal(tmp_path, [{**ROWS["instruction"], "text": "a b"}])
    assert first == "dataset.format=auto finds 2 ways to read these rows. Type the one you mean:"
    begin, given = "python -m app.check data", f"dataset.path={tmp_path}/a.jsonl"
    assert ways == [
        f"{begin} dataset=instruction {given}   (1 of the first 1 rows hold text in instruction, output)",
        f"{begin} dataset=text {given}   (1 of the first 1 rows hold text in text)",
    ]
    _, *ways = refusal(tmp_path, [{"short": chat("a", "b"), "long": chat("a", "c")}])
    assert [way.partition("   ")[0] for way in ways] == [
        f"{begin} dataset=messages {given} dataset.columns.messages={name}" for name in ("short", "long")
    ]


def test_auto_prompt_and_completion_are_one_way(tmp_path: Path) -> None:
    """Each of the columns alone would be a conversation under another name."""
    found, note = auto(tmp_path, [{**ROWS["chat_completion"], "tools": [], "id": 1}] * 2)
    assert (found.format, found.columns) == ("chat_completion", config(tmp_path).columns)
    assert note.endswith(
        "2 of the first 2 rows hold lists of objects with role and content in prompt, completion; also read: tools"
    )
    _, *ways = refusal(tmp_path, [{**ROWS["chat_completion"], "messages": chat("a", "b")}])
    assert [way.split()[4] for way in ways] == ["dataset=messages", "dataset=chat_completion"]
    first, *_ = refusal(tmp_path, [ROWS["prompt_completion"], ROWS["chat_completion"]])
    assert first.startswith("dataset.format=auto knows no format for these rows")


def test_auto_lists_few_of_many_columns(tmp_path: Path) -> None:
    first, *_ = refusal(tmp_path, [{f"c{n}": n for n in range(30)}])
    assert first.endswith("c10 (a number), c11 (a number) and 18 more")


def test_auto_lists_that_are_no_conversations_refused(tmp_path: Path) -> None:
    for found in ([], ["a"], [{"role": "author"}], [*chat("a"), 3], [{"role": None, "content": "a"}], TURNS[0]):
        assert refusal(tmp_path, [{"messages": found}])[0].startswith("dataset.format=auto knows no format")


def test_auto_file_without_rows_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path, []) == ["has no rows"]
    (tmp_path / "b.jsonl").write_text("{a\n{a\n")
    with pytest.raises(DataError, match=r"none of its first rows can be read; b\.jsonl:1: column 2: "):
        detect_formats(config(tmp_path / "b.jsonl", "auto"))
    [reported] = refusal(tmp_path, [{"instances": []}], output="instances.*.output")
    assert reported.startswith("none of its first rows can be read; a.jsonl:1: column 'instances' must be a list")


@pytest.mark.parametrize("name", ADVISED)
def test_auto_refusal_gives_words_that_work(tmp_path: Path, name: str) -> None:
    row, words = ADVISED[name]
    message = refusal(tmp_path, [row] * 2)[-1]
    assert words.replace("PATH", f"{tmp_path}/a.jsonl") in message
    given = shlex.split(message.rpartition("type: ")[2])
    assert given[:4] == ["python", "-m", "app.check", "data"]
    found, _ = detect_formats(compose_run(given[4:]).dataset)
    data = prepare(found, tokenizer(), str(tmp_path / "cache"))
    assert len(data.train)
    unread = {*data.report.train.unread_columns} & {"prompt", "query", "question", "history", "system"}
    assert all(row[name] in tokenizer().decode(data.train.ids(0)) for name in unread)


@pytest.mark.parametrize("name", CONVERTED)
def test_auto_refusal_gives_command_that_makes_rows(tmp_path: Path, name: str) -> None:
    row, made = CONVERTED[name]
    assert made.replace("PATH", f"{tmp_path}/a.jsonl") in refusal(tmp_path, [row] * 2)[-1]


@pytest.mark.parametrize("row", SAID_NOTHING)
def test_auto_refusal_guesses_nothing(tmp_path: Path, row: dict[str, Any]) -> None:
    assert refusal(tmp_path, [row] * 2)[-1].startswith("docs/data.md has the shapes of rows;")


def test_auto_tokens_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path, [{"input_ids": [1], "labels": [1]}])[-1].startswith("Rows of tokens (input_ids)")


def mixed(path: Path, rows: dict[str, list[Any]], fmt: str = "auto", **changes: Any) -> DatasetConfig:
    mix: dict[str, dict[str, Any]] = {
        name: {"path": str(write_jsonl(path / f"{name}.jsonl", found))} for name, found in rows.items()
    }
    for name, more in changes.pop("more", {}).items():
        mix[name] |= more
    shared = config(path, fmt, **changes)
    return replace(shared, path=None, mix={name: MixSource(**each) for name, each in mix.items()})


def test_auto_mix_recognises_each_source(tmp_path: Path) -> None:
    rows = {"chat": [{"talk": TURNS}], "code": [ROWS["messages"]], "sums": [ROWS["question_answer"]]}
    given = mixed(tmp_path, rows, more={"sums": {"format": "text", "columns": {"text": "answer"}}})
    found, notes = detect_formats(given)
    assert [note.partition(", because ")[0] for note in notes] == [
        "dataset.mix.chat.format=auto: taken as dataset.mix.chat.format=sharegpt"
        " dataset.mix.chat.columns.conversations=talk",
        "dataset.mix.code.format=auto: taken as dataset.mix.code.format=messages",
    ]
    sections = sources_of(found)
    assert [section.format for section in sections.values()] == ["sharegpt", "messages", "text"]
    assert sections["chat"].columns.conversations == "talk"
    assert sections["code"].columns.conversations == "conversations"
    assert sections["sums"].columns.text == "answer"
    assert detect_formats(found) == (found, [])  # nothing is left to look at


def test_auto_mix_recognises_eval_file(tmp_path: Path) -> None:
    held = write_jsonl(tmp_path / "held.jsonl", [{"said": chat("a", "b")}])
    rows = {"chat": [ROWS["messages"]], "code": [ROWS["messages"]]}
    found, notes = detect_formats(mixed(tmp_path, rows, eval_path=str(held)))
    assert notes[-1].startswith("dataset.format=auto: taken as dataset.format=messages dataset.columns.messages=said")
    assert (found.format, found.columns.messages) == ("messages", "said")
    assert [section.columns.messages for section in sources_of(found).values()] == ["messages", "messages"]


def test_auto_mix_known_set_keeps_all_columns(tmp_path: Path) -> None:
    dolly = {"instruction": "a", "context": "c", "response": "b", "category": "x"}
    found, _ = detect_formats(mixed(tmp_path, {"dolly": [dolly], "chat": [ROWS["messages"]]}))
    columns = sources_of(found)["dolly"].columns
    assert (columns.instruction, columns.input, columns.output) == ("instruction", "context", "response")
    assert sources_of(found)["chat"].columns.input == "input"


def test_auto_mix_reports_all_problems(tmp_path: Path) -> None:
    two = [{**ROWS["instruction"], "text": "a b"}]
    with pytest.raises(DataError) as found:
        detect_formats(mixed(tmp_path, {"chat": [{"n": 3}], "code": two, "good": [ROWS["text"]]}))
    none, several = found.value.problems
    assert none.startswith(
        f"dataset.mix.chat.path={tmp_path}/chat.jsonl: dataset.mix.chat.format=auto knows no format for these rows"
    )
    assert "columns of other names: dataset.mix.chat.format=FORMAT dataset.mix.chat.columns.FIELD=NAME" in none
    begin, *ways = several.split("\n    ")
    assert begin.startswith(f"dataset.mix.code.path={tmp_path}/code.jsonl: dataset.mix.code.format=auto finds 2 ways")
    assert [way.partition("   ")[0] for way in ways] == [
        "dataset.mix.code.format=instruction",
        "dataset.mix.code.format=text",
    ]
