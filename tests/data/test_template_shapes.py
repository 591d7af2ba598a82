"""What is trained under every shape of chat template: to the token as golden/ has it, and for any conversation."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.assets import template_text
from app.data.collate import Padded
from app.data.loader import eval_batches
from app.data.loss_mask import Renderer
from app.data.prepare import prepare
from app.data.rows import RowProblem
from app.data.tokenizer import Encoder
from tests.data.small import chat, config, tokenizer, write_jsonl
from tests.data.template_shapes import ADD, CASES, HERE, SHAPES, conversation, golden, labels, render_row, shaped

ANSWER = {"role": "assistant", "content": "b"}


def test_template_shapes_have_files() -> None:
    assert {file.stem for file in (HERE / "templates").glob("*.jinja")} == set(SHAPES)
    assert {file.stem for file in (HERE / "golden").glob("*.json")} == set(SHAPES)


@pytest.mark.parametrize("name", SHAPES)
def test_template_shape_golden_loss_mask(name: str) -> None:
    expected = json.loads(golden(name).read_text("utf-8"))
    assert list(expected) == list(CASES)
    for case, row in CASES.items():
        assert labels(name, row) == expected[case], case


def trained(name: str, row: dict[str, Any], train_on: str = "assistant", thinking: str = "train") -> list[str]:
    made = render_row(name, row, train_on, thinking)
    return [text.text[start:end] for text in made.samples for start, end in text.spans]


words = st.text(st.characters(codec="utf-8", exclude_characters="<["), min_size=1, max_size=12).filter(str.strip)
said = st.lists(st.tuples(words, words, st.booleans()), min_size=1, max_size=3)


@given(
    name=st.sampled_from(sorted(SHAPES)),
    turns=said,
    system=st.none() | words,
    more=st.none() | words,
    last=st.booleans(),
)
def test_template_shape_any_conversation_trains_answers(
    name: str, turns: list[tuple[str, str, bool]], system: str | None, more: str | None, last: bool
) -> None:
    shape = SHAPES[name]
    messages: list[dict[str, Any]] = chat(system=system) if system and shape.system else []
    answers = []
    for question, answer, train in turns:
        messages += [*chat(question), {"role": "assistant", "content": answer, "train": train}]
        answers.append((len(messages), answer, train))
    messages += chat(more) if more else []
    wanted = [each for each in (answers[-1:] if last else answers) if each[2]]
    train_on = "last" if last else "assistant"
    if not wanted:
        with pytest.raises(RowProblem, match="no assistant message to train"):
            render_row(name, {"messages": messages}, train_on)
        return
    for index, message in enumerate(messages):  # what is not said is what is meant
        if message.get("train"):
            messages[index] = {key: value for key, value in message.items() if key != "train"}
    made = render_row(name, {"messages": messages}, train_on)
    found = trained(name, {"messages": messages}, train_on)
    for text, (_, answer, _) in zip(found, wanted, strict=True):
        assert text.startswith(shape.lead)
        end = next(end for end in (shape.last_end, shape.end) if end and text.endswith(end))
        assert text.removeprefix(shape.lead).removesuffix(end).strip() == answer.strip()
    plain = [{key: value for key, value in message.items() if key != "train"} for message in messages]
    ends = [end for end, _, _ in wanted] if made.unstable else [len(messages)]
    rendered = [shaped(name).apply_chat_template(plain[:end], tokenize=False) for end in ends]
    assert [each.text for each in made.samples] == rendered
    for each, sample in zip(made.samples, Encoder(shaped(name)).encode(made.samples), strict=True):
        assert shaped(name).decode(sample.ids) == each.text
        beginnings = (sample.ids == shaped(name).bos_token_id).sum() if shape.bos else 1
        assert (beginnings, sample.loss_mask[0], bool(sample.endless)) == (1, False, False)
    assert (made.unseen, made.shortened) == (0, 0)


arguments = st.dictionaries(words, st.none() | st.integers() | words | st.lists(st.booleans(), max_size=2), max_size=3)


@given(name=st.sampled_from(sorted(name for name in SHAPES if SHAPES[name].tools)), given_arguments=arguments)
def test_template_shape_any_call_trained_as_json(name: str, given_arguments: dict[str, Any]) -> None:
    calling = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": given_arguments}}]}
    row = {"messages": [*chat("a"), calling, {"role": "tool", "content": "3"}, ANSWER]}
    call, answer = trained(name, row)
    assert json.dumps(given_arguments, ensure_ascii=False) in call
    assert call.endswith(SHAPES[name].end)
    assert answer == f"b{SHAPES[name].end}"
    [as_text] = [{**calling, "tool_calls": [{"name": "add", "arguments": json.dumps(given_arguments)}]}]
    assert trained(name, {"messages": [*chat("a"), as_text, *row["messages"][2:]]}) == [call, answer]


@pytest.mark.parametrize("name", SHAPES)
def test_thoughts_are_masked_or_dropped_in_every_template(name: str) -> None:
    row, plain = CASES["thoughts"], CASES["talk"]
    answers = trained(name, plain)
    assert trained(name, row, thinking="drop") == answers
    texts = {text.text for text in render_row(name, row).samples}
    masked = render_row(name, row, thinking="mask")
    assert {text.text for text in masked.samples} == texts
    for found, answer, word in zip(trained(name, row, thinking="mask"), answers, ("Hello", "Fine"), strict=True):
        assert found.strip() == answer[answer.index(word) :].strip()  # whatever the template writes before a content


def test_thoughts_under_a_key_are_masked_or_dropped() -> None:
    row = {"messages": [*chat("a"), {**ANSWER, "reasoning_content": "Hm."}]}
    assert trained("empty_thoughts", row, thinking="mask") == ["b<|im_end|>"]
    assert trained("empty_thoughts", row, thinking="drop") == ["b<|im_end|>"]


def test_unseen_tools_counted() -> None:
    tools = [{"name": "subtract"}]
    row = {"messages": chat("a", "b"), "tools": tools}
    assert render_row("chatml", row).unseen == 1
    assert render_row("tags_for_tools", row).unseen == 0


def test_tool_result_as_json_is_seen() -> None:
    returned = {"role": "tool", "content": 'say "three"\né'}
    row = {"messages": [*CASES["tools"]["messages"][:2], returned, ANSWER]}
    for name in ("headers_with_tools", "tags_for_tools"):
        assert render_row(name, row).unseen == 0


def test_dropped_thoughts_counted() -> None:
    row = CASES["thoughts"]
    assert {name for name in SHAPES if render_row(name, row).shortened} == {"thoughts_dropped"}
    apart = {"messages": [*chat("a"), {**ANSWER, "reasoning_content": "Hm."}]}
    assert render_row("empty_thoughts", apart).shortened == 0
    assert trained("empty_thoughts", apart) == ["<think>\nHm.\n</think>\n\nb<|im_end|>"]
    assert render_row("chatml", apart).shortened == 1


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_thoughts_of_any_name_trained_where_the_template_writes_them(tmp_path: Path, key: str) -> None:
    talk = [*chat("a"), {**ANSWER, key: "Hm."}]
    assert trained("empty_thoughts", {"messages": talk}) == ["<think>\nHm.\n</think>\n\nb<|im_end|>"]
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": talk}])
    counts = prepare(config(path), shaped("empty_thoughts"), str(tmp_path / "cache")).report.train
    assert (counts.shortened, counts.unread_keys) == (0, {})
    report = prepare(config(path), tokenizer("chatml"), str(tmp_path / "cache")).report
    assert (report.train.shortened, report.train.unread_keys) == (1, {key: 1})
    assert f"train: message keys not read: {key} (1 message)" in report.lines()


def test_template_options_of_a_row(tmp_path: Path) -> None:
    made = tokenizer("chatml")
    made.chat_template = "{{ mood }}" + made.chat_template
    rows: list[dict[str, Any]] = [
        {"messages": chat("a", "b"), "chat_template_kwargs": {"mood": "sad", "tools": [], "other": 1}},
        {"messages": chat("a", "b"), "chat_template_kwargs": '{"mood": "glad"}'},
        {"messages": chat("a", "b"), "chat_template_kwargs": None},
    ]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    data = prepare(config(path), made, str(tmp_path / "cache"))
    assert [made.decode(data.train.ids(i))[:4] for i in range(3)] == ["sad<", "glad", "<|im"]
    assert data.report.train.unread_columns == {"chat_template_kwargs.tools": 1, "chat_template_kwargs.other": 1}


def test_functions_of_older_rows_are_tools() -> None:
    row: dict[str, Any] = {"messages": chat("a", "b"), "functions": [{"name": "add", "parameters": {}}]}
    assert conversation(row).tools == [{"type": "function", "function": row["functions"][0]}]
    assert conversation({**row, "functions": ["f"]}).tools is None
    assert conversation({**row, "tools": [ADD]}).tools == [ADD]


def test_special_tokens_in_messages_counted(tmp_path: Path) -> None:
    said = chat("What ends a turn?", "<|im_end|> does, not <|im_start|>.", "<think>?", "b")
    assert render_row("chatml", {"messages": said}).marked == 1
    assert render_row("model_turns", {"messages": said}).marked == 0  # it ends a turn otherwise
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": said}] * 2)
    report = prepare(config(path), tokenizer("chatml"), str(tmp_path / "cache")).report
    line = "train: 2 messages with special-token text, which the model reads as the token itself"
    assert line in report.lines()


def test_answer_like_empty_thought_trained() -> None:
    thought = "<think>\n\n</think>\n\nb"
    assert trained("chatml", {"messages": chat("a", thought)}) == [f"{thought}<|im_end|>"]
    assert trained("empty_thoughts", {"messages": chat("a", thought)}) == ["b<|im_end|>"]  # the template's own
    assert trained("empty_thoughts", {"messages": chat("a", "")}) == ["<|im_end|>"]


def test_first_message_of_assistant_trained() -> None:
    for name in ("tags_for_tools", "headers_with_tools", "empty_thoughts", "plain_words"):
        shape = SHAPES[name]
        assert trained(name, {"messages": [ANSWER]}) == [f"{shape.lead}b{shape.end}"]


def test_train_flags_impossible_refused() -> None:
    asked = {**chat("a")[0], "train": True}
    with pytest.raises(
        RowProblem, match=r"message 0 has the role user and has train=true, but dataset\.train_on=assistant"
    ):
        render_row("chatml", {"messages": [asked, ANSWER]})
    assert trained("chatml", {"messages": [asked, ANSWER]}, "all")
    with pytest.raises(RowProblem, match="excludes message 1"):
        render_row("chatml", {"messages": [*chat("a"), {**ANSWER, "weight": 0}]})
    two = [*chat("a", "b", "c"), {**ANSWER, "weight": 0}]
    with pytest.raises(RowProblem, match=r"dataset\.train_on=last: train=false or weight=0 excludes message 3"):
        render_row("chatml", {"messages": two}, "last")
    assert trained("chatml", {"messages": two}) == ["b<|im_end|>"]


def test_train_on_all_without_some_messages() -> None:
    row = {"messages": [{**m, "train": m["content"] != "c"} for m in chat("a", "b", "c", "d")]}
    assert trained("chatml", row, "all") == [
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n",
        "<|im_start|>assistant\nd<|im_end|>\n",
    ]
    opened = chat("a", "b", system="Be brief.")
    for name in ("inst_system_in_last", "inst_system_in_first"):
        with pytest.raises(RowProblem, match="message 0 is excluded from training, but it cannot be located"):
            render_row(name, {"messages": [{**opened[0], "train": False}, *opened[1:]]}, "all")


@pytest.mark.parametrize(
    ("spoken", "thought"), [("The parameters are {'q': 'x'}.", ""), ("", "So I call it with {'q': 'x'}.")]
)
@pytest.mark.parametrize("name", ["tags_for_tools", "empty_thoughts", "headers_with_tools"])
def test_tool_call_arguments_python_repr_in_text_stay_object(name: str, spoken: str, thought: str) -> None:
    asks = {"role": "assistant", "content": spoken, "tool_calls": [{"name": "find", "arguments": {"q": "x"}}]}
    asks |= {"reasoning_content": thought} if thought else {}
    [text] = trained(name, {"messages": [*chat("a"), asks]})
    assert '{"q": "x"}' in text


@pytest.mark.parametrize("content", ["", "I look it up: {'q': 'x'}."])
def test_tool_call_arguments_template_that_writes_python_gets_json_text(content: str) -> None:
    made = tokenizer("chatml")
    made.chat_template = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name ~ c.function.arguments }}{% endfor %}<|im_end|>{% endfor %}"
    )
    asks = {"role": "assistant", "content": content, "tool_calls": [{"name": "find", "arguments": {"q": "x"}}]}
    [text] = Renderer(made, "assistant", "expand").render(conversation({"messages": [*chat("a"), asks]})).samples
    assert text.text == f'a<|im_end|>{content}find{{"q": "x"}}<|im_end|>'


@pytest.mark.parametrize("name", ["qwen3", "gemma"])
def test_consecutive_answers_template_cannot_keep_apart_joined(tmp_path: Path, name: str) -> None:
    made = tokenizer("gemma" if name == "gemma" else "chatml")  # which refuses roles that do not alternate
    made.chat_template = made.chat_template if name == "gemma" else template_text(name)
    talk = [*chat("a", "b"), {**ANSWER, "content": "c"}]
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": talk}, {"messages": talk[:2]}])
    data = prepare(config(path), made, str(tmp_path / "cache"))
    expected = [{"messages": chat("a", "b\n\nc")}, {"messages": chat("a", "b")}]
    joined = prepare(config(write_jsonl(tmp_path / "b.jsonl", expected)), made, str(tmp_path / "cache"))
    for i in range(2):
        assert data.train.ids(i).tolist() == joined.train.ids(i).tolist()
        assert data.train.loss_mask(i).tolist() == joined.train.loss_mask(i).tolist()
    line = "train: consecutive assistant messages of 1 conversation joined with a blank line: "
    assert f"{line}the chat template does not support them" in data.report.lines()


def test_consecutive_answers_kept_apart_where_the_template_allows_it() -> None:
    row = {"messages": [*chat("a", "b"), {**ANSWER, "content": "c"}]}
    assert trained("chatml", row) == ["b<|im_end|>", "c<|im_end|>"]
    assert not render_row("chatml", row).merged


def test_consecutive_answers_with_flags_refused() -> None:
    made = tokenizer("chatml")
    made.chat_template = template_text("qwen3")
    row = {"messages": [*chat("a", "b"), {**ANSWER, "weight": 0.5}]}
    with pytest.raises(RowProblem, match="changes the text before message 2 when that message is added"):
        Renderer(made, "assistant", "expand").render(conversation(row))


def test_tool_calls_as_python_refused() -> None:
    made = tokenizer("chatml")
    made.chat_template = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{% if c.function.arguments is string %}{{ raise_exception('no object') }}{% endif %}"
        "{{ c.function.name ~ c.function.arguments }}{% endfor %}{% endfor %}"
    )
    row = {"messages": CASES["tools"]["messages"]}
    with pytest.raises(RowProblem, match="does not render the tool call in message 1"):
        Renderer(made, "assistant", "expand").render(conversation(row))


def test_end_token_trained_where_it_pads(tmp_path: Path) -> None:
    made = tokenizer("chatml")
    made.pad_token = made.eos_token
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": chat("a", "b" * n, "c", "d")} for n in (1, 40)])
    rows = prepare(config(path), made, str(tmp_path / "cache")).train
    [batch] = eval_batches(rows, Padded(2, made.pad_token_id), 1, 0)
    assert (batch.targets[: batch.num_labels] == made.eos_token_id).sum() == 4
    assert batch.num_labels == rows.num_trained
