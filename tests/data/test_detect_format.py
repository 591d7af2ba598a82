"""`dataset.format=auto`: which format is recognized, why, and what is said where it is not one thing."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from app.config.dataset import formats_for, sources_of
from app.config.schema import DatasetConfig, MixSource
from app.data.detect_format import INSPECTED_ROWS, detect_formats
from app.errors import DataError
from tests.data.small import chat, config, write_jsonl

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
        "\n    dataset.format=labelled_text needs text and its label in text (1 of 1 rows have it)"
        " and label (0 of 1 rows have it)"
        "\n    If stars is the label of text, type: finetune check data task=classification"
        f" dataset=labelled_text dataset.path={bare} dataset.columns.label=stars"
    )


def test_auto_typed_format_unchanged(tmp_path: Path) -> None:
    settings = config(tmp_path / "no such file", "text")
    assert detect_formats(settings) == (settings, [])


def test_auto_conversations_in_any_column(tmp_path: Path) -> None:
    found, note = auto(tmp_path, [{"conversations": chat("a", "b")}])
    assert (found.format, found.columns.messages) == ("messages", "conversations")
    assert "detected dataset.format=messages dataset.columns.messages=conversations: found" in note
    found, _ = auto(tmp_path, [{"dialogue": TURNS, "messages": "3"}])
    assert (found.format, found.columns.conversations) == ("sharegpt", "dialogue")
    found, _ = auto(tmp_path, [{"talk": [*chat("a"), *CALLING]}])
    assert (found.format, found.columns.messages) == ("messages", "talk")


def test_auto_columns_of_config(tmp_path: Path) -> None:
    row = {"instruction": "a", "context": "", "response": "b", "score": 3}
    found, note = auto(tmp_path, [row], input="context", output="response")
    assert (found.format, found.columns.output) == ("instruction", "response")
    assert "found text in instruction, response in 1 of 1 rows" in note
    assert note.endswith("; also read: context")


def test_auto_few_bad_rows_tolerated(tmp_path: Path) -> None:
    rows = [*[ROWS["messages"]] * 9, {"messages": "x"}]
    assert "in messages in 9 of 10 rows" in auto(tmp_path, rows)[1]
    lines = refusal(tmp_path, [*rows, {"messages": "x"}])
    assert (
        "dataset.format=messages needs lists of objects with role and content in messages"
        " (9 of 11 rows have it; others: text)" in lines
    )


def test_auto_inspects_first_rows_only(tmp_path: Path) -> None:
    found, note = auto(tmp_path, [ROWS["text"]] * INSPECTED_ROWS + [ROWS["messages"]] * 9 * INSPECTED_ROWS)
    assert found.format == "text"
    assert f"{INSPECTED_ROWS} of {INSPECTED_ROWS} rows" in note


def test_auto_ambiguous_rows_refused(tmp_path: Path) -> None:
    first, *ways = refusal(tmp_path, [{**ROWS["instruction"], "text": "a b"}])
    assert first == "dataset.format=auto: 2 formats fit these rows. Choose one:"
    begin, given = "finetune check data", f"dataset.path={tmp_path}/a.jsonl"
    assert ways == [
        f"{begin} dataset=instruction {given}   (found text in instruction, output in 1 of 1 rows)",
        f"{begin} dataset=text {given}   (found text in text in 1 of 1 rows)",
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
        "found lists of objects with role and content in prompt, completion in 2 of 2 rows; also read: tools"
    )
    _, *ways = refusal(tmp_path, [{**ROWS["chat_completion"], "messages": chat("a", "b")}])
    assert [way.split()[3] for way in ways] == ["dataset=messages", "dataset=chat_completion"]
    first, *_ = refusal(tmp_path, [ROWS["prompt_completion"], ROWS["chat_completion"]])
    assert first.startswith("dataset.format=auto: no format fits these rows")


def test_auto_lists_few_of_many_columns(tmp_path: Path) -> None:
    first, *_ = refusal(tmp_path, [{f"c{n}": n for n in range(30)}])
    assert first.endswith("c10 (a number), c11 (a number) and 18 more")


def test_auto_lists_that_are_no_conversations_refused(tmp_path: Path) -> None:
    for found in ([], ["a"], [{"role": "author"}], [*chat("a"), 3], [{"role": None, "content": "a"}], TURNS[0]):
        assert refusal(tmp_path, [{"messages": found}])[0].startswith("dataset.format=auto: no format fits")


def test_auto_file_without_rows_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path, []) == ["has no rows"]
    (tmp_path / "b.jsonl").write_text("{a\n{a\n")
    with pytest.raises(DataError, match=r"none of the first rows can be read; b\.jsonl:1: column 2: "):
        detect_formats(config(tmp_path / "b.jsonl", "auto"))
    [reported] = refusal(tmp_path, [{"instances": []}], output="instances.*.output")
    assert reported.startswith("none of the first rows can be read; a.jsonl:1: column 'instances' must be a list")


def test_auto_texts_to_compare_are_chats_where_the_model_has_a_template(tmp_path: Path) -> None:
    for task, row in (
        ("preference", {"prompt": "Hi", "chosen": "Hello", "rejected": "No"}),
        ("preference_label", {"prompt": "Hi", "completion": "Hello", "label": "true"}),
    ):
        settings = config(write_jsonl(tmp_path / "a.jsonl", [row] * 3), "auto")
        for has_template, fmt in ((True, task), (False, f"{task}_text")):
            assert detect_formats(settings, formats_for(task), partial(bool, has_template))[0].format == fmt


def mixed(path: Path, rows: dict[str, list[Any]], fmt: str = "auto", **changes: Any) -> DatasetConfig:
    mix: dict[str, dict[str, Any]] = {
        name: {"path": str(write_jsonl(path / f"{name}.jsonl", found))} for name, found in rows.items()
    }
    for name, more in changes.pop("more", {}).items():
        mix[name] |= more
    shared = config(path, fmt, **changes)
    return replace(shared, path=None, mix={name: MixSource(**each) for name, each in mix.items()})


def test_auto_mix_recognizes_each_source(tmp_path: Path) -> None:
    rows = {"chat": [{"talk": TURNS}], "code": [ROWS["messages"]], "sums": [ROWS["question_answer"]]}
    given = mixed(tmp_path, rows, more={"sums": {"format": "text", "columns": {"text": "answer"}}})
    found, notes = detect_formats(given)
    assert [note.partition(": found ")[0] for note in notes] == [
        "dataset.mix.chat.format=auto: detected dataset.mix.chat.format=sharegpt"
        " dataset.mix.chat.columns.conversations=talk",
        "dataset.mix.code.format=auto: detected dataset.mix.code.format=messages",
    ]
    sections = sources_of(found)
    assert [section.format for section in sections.values()] == ["sharegpt", "messages", "text"]
    assert sections["chat"].columns.conversations == "talk"
    assert sections["code"].columns.conversations == "conversations"
    assert sections["sums"].columns.text == "answer"
    assert detect_formats(found) == (found, [])  # nothing is left to look at


def test_auto_mix_recognizes_eval_file(tmp_path: Path) -> None:
    held = write_jsonl(tmp_path / "held.jsonl", [{"said": chat("a", "b")}])
    rows = {"chat": [ROWS["messages"]], "code": [ROWS["messages"]]}
    found, notes = detect_formats(mixed(tmp_path, rows, eval_path=str(held)))
    assert notes[-1].startswith("dataset.format=auto: detected dataset.format=messages dataset.columns.messages=said")
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
        f"dataset.mix.chat.path={tmp_path}/chat.jsonl: dataset.mix.chat.format=auto: no format fits these rows"
    )
    assert "for other column names, set dataset.mix.chat.format=FORMAT dataset.mix.chat.columns.FIELD=NAME" in none
    begin, *ways = several.split("\n    ")
    assert begin.startswith(f"dataset.mix.code.path={tmp_path}/code.jsonl: dataset.mix.code.format=auto: 2 formats fit")
    assert [way.partition("   ")[0] for way in ways] == [
        "dataset.mix.code.format=instruction",
        "dataset.mix.code.format=text",
    ]
