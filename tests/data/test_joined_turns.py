"""dataset.on_unstable_template=join: one sample with the trained tokens of all samples of `expand`."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.assets import template_names, template_text
from app.data.loss_mask import RenderedRow, Renderer
from app.data.prepare import Data, prepare
from app.data.rows import AnswerPair, Conversation, RowProblem
from app.data.tokenizer import Encoder
from app.errors import DataError
from tests.data.small import chat, config, tokenizer, trained_texts, write_chats, write_jsonl
from tests.data.template_shapes import ADD, CALL, SHAPES, conversation, shaped

EMPTY = "<think>\n\n</think>\n\n"
TALK = chat("Hi", "Hello.", "And you?", "Fine.", "Bye", "Bye.", system="Be brief.")
REWRITING = ("qwen3", "qwen3 without thoughts", "empty_thoughts", "kept_until_question")
# Keeps the empty thoughts of all answers after the last question, as Qwen 3.5 does.
KEPT_UNTIL_QUESTION = (
    "{% set last = namespace(user=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 > last.user %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name ~ call.function.arguments | tojson }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Writes a shorter opening, not a part of the first one, once an answer is no longer the last message.
OTHER_OPENING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{{ EMPTY if loop.last else '<note>' }}{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
).replace("EMPTY", repr(EMPTY))


@cache
def templated(name: str) -> Any:
    """A tokenizer with a shipped template, or with one of those that are written for tests."""
    if name in SHAPES:
        return shaped(name)
    made = tokenizer("chatml")
    if name == "kept_until_question":
        made.chat_template = KEPT_UNTIL_QUESTION
    elif name == "other_opening":
        made.chat_template = OTHER_OPENING
    elif name == "qwen3 without thoughts":
        made.chat_template = "{% set enable_thinking = false %}" + template_text("qwen3")
    else:
        made.chat_template = template_text(name)
    return made


def render_row(made: Any, row: dict[str, Any], policy: str, thinking: str = "train") -> RenderedRow:
    return Renderer(made, "assistant", policy, thinking).render(conversation(row))


def trained_tokens(made: Any, row: RenderedRow) -> list[tuple[int, float]]:
    """The trained tokens of all samples in their order, each with its weight."""
    found: list[tuple[int, float]] = []
    for sample in Encoder(made).encode(row.samples):
        weights = sample.loss_mask.astype(float) if sample.weights is None else sample.weights
        found += zip(sample.ids[sample.loss_mask].tolist(), weights[sample.loss_mask].tolist(), strict=True)
    return found


words = st.one_of(
    st.sampled_from(["ok", "", " ", "\n", "ok ", "<", "<think>", EMPTY, "</think>", "<|im_end|>\n", "assistant\n"]),
    st.text(st.characters(codec="utf-8"), max_size=8),
)
called = st.lists(words, min_size=1, max_size=3)  # what consecutive tools return
turns = st.lists(
    st.tuples(words, words, st.none() | called, st.sampled_from([{}, {"weight": 0.5}, {"train": False}])),
    min_size=2,
    max_size=5,
)


def talk_of(said: list[Any], system: str | None, more: str | None) -> dict[str, Any]:
    messages: list[dict[str, Any]] = chat(system=system) if system else []
    for question, answer, results, wish in said:
        messages += chat(question)
        if results:
            messages.append({"role": "assistant", "content": "", "tool_calls": [CALL] * len(results)})
            messages += [{"role": "tool", "content": result} for result in results]
        messages.append({"role": "assistant", "content": answer, **wish})
    messages += chat(more) if more else []
    return (
        {"messages": messages, "tools": [ADD]} if any(results for _, _, results, _ in said) else {"messages": messages}
    )


@given(
    name=st.sampled_from([*template_names(), *REWRITING[1:], *SHAPES]),
    said=turns,
    system=st.none() | words,
    more=st.none() | words,
)
def test_join_any_conversation_trains_tokens_of_expand(
    name: str, said: list[Any], system: str | None, more: str | None
) -> None:
    made, row = templated(name), talk_of(said, system, more)
    try:
        expanded = render_row(made, row, "expand")
    except RowProblem:
        with pytest.raises(RowProblem):
            render_row(made, row, "join")
        return
    if expanded.reasoning and len(expanded.samples) > 1:
        with pytest.raises(RowProblem, match="has reasoning"):
            render_row(made, row, "join")
        return
    joined = render_row(made, row, "join")
    assert trained_tokens(made, joined) == trained_tokens(made, expanded)
    if not expanded.joined:
        assert joined == expanded
        return
    [sample] = joined.samples
    assert len(sample.text) <= sum(len(each.text) for each in expanded.samples)
    for each, (start, end), (_, through) in zip(
        expanded.samples, [each.spans[0] for each in expanded.samples], sample.spans, strict=True
    ):
        assert sample.text[:through].endswith(each.text[start:end])
        assert without(sample.text[:through], each.text[:end])


def without(text: str, shorter: str) -> bool:
    """Whether the shorter text is the longer one with some of its characters left out."""
    characters = iter(text)
    return all(character in characters for character in shorter)


plain = st.text("abc é\n.", min_size=1, max_size=8).map(str.strip).filter(bool)


@given(
    name=st.sampled_from(REWRITING),
    said=st.lists(
        st.tuples(plain, plain, st.none() | st.lists(plain, min_size=1, max_size=3), st.just({})),
        min_size=2,
        max_size=5,
    ),
    system=st.none() | plain,
    more=st.none() | plain,
)
def test_join_plain_conversation_has_one_sample(
    name: str, said: list[Any], system: str | None, more: str | None
) -> None:
    made, row = templated(name), talk_of(said, system, more)
    expanded, joined = render_row(made, row, "expand"), render_row(made, row, "join")
    assert expanded.unstable
    [sample] = joined.samples
    assert len(sample.spans) == len(expanded.samples)
    for each, (_, end) in zip(expanded.samples, sample.spans, strict=True):
        history = each.text[: each.spans[0][1]]
        assert sample.text[:end].replace(EMPTY, "") == history.replace(EMPTY, "")


@pytest.mark.parametrize("name", ["qwen3", "qwen3 without thoughts", "empty_thoughts"])
def test_join_keeps_empty_thought_of_each_answer(name: str) -> None:
    made = templated(name)
    joined = render_row(made, {"messages": TALK}, "join")
    turn = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n" + EMPTY + "{}<|im_end|>\n"
    said = (turn.format(*pair) for pair in (("Hi", "Hello."), ("And you?", "Fine."), ("Bye", "Bye.")))
    [sample] = joined.samples
    assert sample.text == "<|im_start|>system\nBe brief.<|im_end|>\n" + "".join(said)
    [tokens] = Encoder(made).encode([sample])
    ends = ["Hello.<|im_end|>", "Fine.<|im_end|>", "Bye.<|im_end|>"]
    assert trained_texts(made, tokens.ids, tokens.loss_mask) == ends
    assert joined.joined is not None
    assert joined.joined.dropped == EMPTY


@pytest.mark.parametrize(
    ("name", "messages"),
    [
        ("channels", TALK),  # rewrites the end of an answer
        ("inst_system_in_last", TALK),  # moves the system message
        ("other_opening", TALK),  # replaces the opening of an answer
        ("qwen3", chat("Hi", "<think>", "And you?", "Fine.")),  # trains the empty thought
        ("thinking", chat("Hi", "Hello. ", "And you?", "Fine.")),  # trims the answer
    ],
)
def test_join_other_rewriting_expands(name: str, messages: list[dict[str, str]]) -> None:
    made = tokenizer("thinking") if name == "thinking" else templated(name)
    row = {"messages": messages}
    expanded = render_row(made, row, "expand")
    assert (expanded.unstable, expanded.joined) == (True, None)
    assert len(expanded.samples) > 1
    assert render_row(made, row, "join") == expanded


def test_join_markers_without_tokens_expands() -> None:
    """A tokenizer that does not divide the text there might make other tokens of the next turn."""
    made = tokenizer("chatml")
    made.chat_template = template_text("qwen3").replace("<|im_end|>", "END").replace("<|im_start|>", "START")
    row = render_row(made, {"messages": TALK}, "join")
    assert (row.joined, len(row.samples)) == (None, 3)


def test_join_reasoning_in_earlier_turn_refused() -> None:
    made = templated("qwen3")
    row = {
        "messages": [*chat("Hi"), {"role": "assistant", "content": "a", "reasoning_content": "Hm."}, *chat("b", "c")]
    }
    for thinking in ("train", "mask"):
        with pytest.raises(RowProblem, match=r"message 1 has reasoning, .*=expand, or dataset\.thinking=drop"):
            render_row(made, row, "join", thinking)
    [sample] = render_row(made, row, "join", "drop").samples
    assert len(sample.spans) == 2
    last = [*chat("Hi", "a", "b"), {**row["messages"][1], "content": "c"}]
    [sample] = render_row(made, {"messages": last}, "join").samples
    assert [sample.text[start:end] for start, end in sample.spans] == [
        "a<|im_end|>",
        "<think>\nHm.\n</think>\n\nc<|im_end|>",
    ]


def test_join_compared_answers_refused() -> None:
    made = templated("qwen3")
    pair = AnswerPair(
        *(Conversation([*chat("Hi"), *chat("", *said)[1:]], completion_start=1) for said in ("abc", "abe"))
    )
    for policy in ("expand", "join"):
        with pytest.raises(
            RowProblem, match="rewrites earlier turns of an answer, which preference data does not support"
        ):
            Renderer(made, "completion", policy).render(pair)


def read(path: Path, **changes: Any) -> Data:
    return prepare(config(path, max_length=1000, **changes), templated("qwen3"), str(path.parent / "cache"))


def test_join_report_has_both_sizes_and_dropped_text(tmp_path: Path) -> None:
    talks = [chat(*(f"{n} {at}" for at in range(12))) for n in range(20)]
    path = write_chats(tmp_path / "a.jsonl", *talks, chat("Hi", "Hello"), chat("Hi", "<think>", "a", "b"))
    counts, lines = {}, {}
    for policy in ("expand", "join", "last"):
        report = read(path, on_unstable_template=policy).report
        counts[policy] = report.train
        [lines[policy]] = [line for line in report.lines() if line.startswith("train: expand: about")]
    made = {policy: (c.unstable, c.joined, c.expanded_into, c.samples) for policy, c in counts.items()}
    assert made == {"expand": (21, 0, 122, 123), "join": (21, 20, 2, 23), "last": (21, 0, 0, 22)}
    single = read(write_chats(tmp_path / "b.jsonl", chat("Hi", "Hello"))).report.train.tokens
    sizes = {policy: counts[policy].tokens - single for policy in ("expand", "join")}
    for policy, count in counts.items():
        assert count.unstable_tokens == pytest.approx(sizes, rel=0.03), policy
    for policy in sizes:
        assert counts[policy].unstable_tokens[policy] == sizes[policy]
    assert counts["join"].trained_tokens == counts["expand"].trained_tokens
    kept = 'earlier answers keep "<think>\\n\\n</think>\\n\\n", which the template drops'
    for policy, line in lines.items():
        expand, join = (counts[policy].unstable_tokens[name] for name in ("expand", "join"))
        assert f" tokens, {expand / join:.1f}x; join: about {join // 1000}," in line
        assert line.endswith(kept)
        wish = (
            ". Set dataset.on_unstable_template=join to train the same answers in one sample per conversation, where "
        )
        assert (wish in line) == (policy != "join")
    rewrites = "train: the chat template rewrites earlier turns: 20 conversations joined into one sample each; "
    expanded = "1 conversation became 2 samples, one per trained turn"
    assert rewrites + expanded in read(path, on_unstable_template="join").report.lines()


def test_join_reasoning_reported_before_it_is_refused(tmp_path: Path) -> None:
    thinks = [*chat("Hi"), {"role": "assistant", "content": "a", "reasoning_content": "Hm."}, *chat("b", "c")]
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": thinks}, {"messages": TALK}])
    [line] = [line for line in read(path).report.lines() if line.startswith("train: expand: about")]
    assert line.endswith("=join does not support 1 conversation with reasoning in earlier turns")
    with pytest.raises(DataError, match=r"a\.jsonl:1: message 1 has reasoning"):
        read(path, on_unstable_template="join")
    counts = read(path, on_unstable_template="join", on_bad_row="skip").report.train
    assert (counts.bad_rows, counts.joined, counts.samples) == (1, 1, 1)
