"""A text that is filled in is the one that the template writes, and so are its spans, whatever is said."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.assets import ROOT
from app.data.mould import Moulds, mould_of, stand_ins
from app.data.rendering import Drafts, Renderer
from app.data.script import Script
from app.data.shapes import Conversation, RowProblem
from tests.data.shapes import SHAPES, shaped
from tests.data.small import TEMPLATES, chat, tokenizer

SHIPPED = sorted(file.stem for file in (ROOT / "templates").glob("*.jinja"))
# of templates that only write, those that close a conversation otherwise than it goes on, or open an answer otherwise
RENDERED = {
    "channels",
    "closed_at_the_end",
    "empty_thoughts",
    "thoughts_dropped",
    "thoughts_of_last",
    "thinking",
}


def made(name: str) -> Any:
    if name in SHAPES:
        return shaped(name)
    if name in TEMPLATES:
        return tokenizer(name)
    other = tokenizer("chatml")
    other.chat_template = (ROOT / "templates" / f"{name}.jinja").read_text().rstrip("\n")
    return other


def outcome(renderer: Renderer, content: Conversation) -> Drafts | str:
    try:
        return renderer.drafts(content, "a.jsonl:1")
    except RowProblem as problem:
        return str(problem)


ODD = [
    *(
        "<|im_end|>",
        "</s>",
        "<think>\n\n</think>\n\nb",
        "<think>x</think>y",
        "<|",
        ">",
        "[/INST]",
        " ",
        "\n",
        "",
        "b",
    ),
    *(
        " a",
        "a ",
        "\n\na\n",
        "c",
        "\N{EM SPACE}a\N{EN SPACE}",
        "\U000f0000\U00100000\U000f0001",
        "assistant",
        "{{ x }}",
    ),
    *("\u00a0a", "\x1ca", "a\u200b", "e\u0301", "ASSISTANT:", "'\"\\"),
]
words = st.sampled_from(ODD) | st.text(max_size=6) | st.lists(st.sampled_from(ODD), max_size=3).map("".join)


@settings(max_examples=400)
@given(
    name=st.sampled_from([*SHAPES, *TEMPLATES, *SHIPPED]),
    said=st.lists(st.tuples(words, words), min_size=1, max_size=3),
    system=st.none() | words,
    marks=st.dictionaries(st.integers(0, 6), st.booleans(), max_size=2),
    weights=st.dictionaries(st.integers(0, 6), st.sampled_from([0.5, 2.0]), max_size=2),
    train_on=st.sampled_from(["assistant", "last", "all"]),
)
def test_it_is_what_is_rendered(
    name: str,
    said: list[tuple[str, str]],
    system: str | None,
    marks: dict[int, bool],
    weights: dict[int, float],
    train_on: str,
) -> None:
    messages = chat(*(text for pair in said for text in pair), system=system)
    marked = {"marks": {at: mark for at, mark in marks.items() if at < len(messages)}}
    weighed = {"weights": {at: weight for at, weight in weights.items() if at < len(messages)}}
    content = Conversation(messages, **marked, **weighed)  # type: ignore[arg-type]
    alike = Conversation([{**message, "content": "words"} for message in messages], **marked)  # type: ignore[arg-type]
    practised = Renderer(made(name), train_on, "expand")
    for _ in range(3):
        outcome(practised, alike)
    assert outcome(practised, content) == outcome(Renderer(made(name), train_on, "expand"), content)


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    calls = []
    render = Script._rendered

    def counted(self: Script, *given: Any, **named: Any) -> str:
        calls.append(1)
        return render(self, *given, **named)

    monkeypatch.setattr(Script, "_rendered", counted)

    def since() -> int:
        number = len(calls)
        calls.clear()
        return number

    return since


@pytest.mark.parametrize("name", [*SHAPES, *TEMPLATES, *SHIPPED])
def test_the_third_of_a_kind_is_not_rendered(name: str, count: Callable[[], int]) -> None:
    renderer = Renderer(made(name), "assistant", "expand")
    for at in range(2):
        renderer.drafts(Conversation(chat("a", f"b{at}", "c", "d")), "")
    assert count() > 0
    renderer.drafts(Conversation(chat("What?", "That.", "So?", "So.")), "")
    assert (count() > 0) == (name in RENDERED)


@pytest.mark.parametrize(
    "other",
    [
        Conversation(chat("a", "b", "c", "d"), tools=[{"type": "function", "function": {"name": "f"}}]),
        Conversation([*chat("a", "b", "c"), {"role": "assistant", "content": "d", "name": "x"}]),
        Conversation(chat("a", "b", "c", " ")),
        Conversation(chat("a", "b")),
        Conversation(chat("a", "b", "c", "d"), marks={1: False}),
    ],
    ids=["tools", "another key", "blank", "fewer", "other answers"],
)
def test_what_is_not_quite_of_a_kind_is_rendered(other: Conversation, count: Callable[[], int]) -> None:
    renderer = Renderer(tokenizer("chatml"), "assistant", "expand")
    for _ in range(3):
        renderer.drafts(Conversation(chat("a", "b", "c", "d")), "")
    count()
    outcome(renderer, other)
    assert count() > 0


def test_a_tokenizer_that_renders_in_a_way_of_its_own_is_asked_each_time(count: Callable[[], int]) -> None:
    own = tokenizer("chatml")

    class Shouting(type(own)):  # type: ignore[misc]
        def apply_chat_template(self, conversation: Any, **given: Any) -> Any:
            loud = [[{**m, "content": m["content"].replace("x", "X")} for m in each] for each in conversation]
            return super().apply_chat_template(loud, **given)

    own.__class__ = Shouting
    renderer = Renderer(own, "assistant", "expand")
    for _ in range(3):
        renderer.drafts(Conversation(chat("a", "b")), "")
    [draft] = renderer.drafts(Conversation(chat("x", "x")), "").samples
    assert "X" in draft.text


def test_a_span_that_begins_inside_a_message_has_no_mould() -> None:
    [first, second] = stand_ins(["user", "assistant"])
    text = f"u{first['content']}a{second['content']}e"
    size = len(first["content"])
    mould = mould_of(text, [(size + 2, len(text))])
    assert mould is not None
    assert mould.filled(chat(" x ", "y\n")) == ("u x ay\ne", ((5, 8),))
    assert mould_of(text, [(3, len(text))]) is None
    stripped = mould_of(f"u{first['content'].strip()}{second['content'].lstrip()}", [])
    assert stripped is not None
    assert stripped.filled(chat(" x ", " y "))[0] == "uxy "


def test_kinds_that_come_once_cost_nothing_more() -> None:
    moulds, asked = Moulds(), []
    for kind in [*range(10_000), 1, 1, 9_999]:
        moulds.find(kind, lambda kind=kind: asked.append(kind))  # type: ignore[misc]
    assert asked == [1]
