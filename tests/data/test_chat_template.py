"""What a skeleton gives is what prefixes give, whatever is said; and a plain row costs one rendering."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.assets import ROOT, template_names, template_text
from app.data.chat_template import other_template
from app.data.loss_mask import RenderedRow, Renderer
from app.data.rows import Conversation, RowProblem
from app.errors import ConfigError
from tests.data.small import TEMPLATES, chat, tokenizer
from tests.data.template_shapes import SHAPES, shaped

SHIPPED = sorted(file.stem for file in (ROOT / "templates").glob("*.jinja"))
NAMES = [*SHAPES, *TEMPLATES, *SHIPPED]
# those that close a conversation otherwise than it goes on, or open an answer otherwise than they ask for it
WITHOUT = {"channels", "closed_at_the_end", "empty_thoughts", "qwen3", "thinking", "thoughts_of_last"}
ODD = (
    *("", " ", "\n", "b", " a", "a ", "\n\na\n", "\u00a0a", "\x1ca", "a\u200b"),
    *("e\u0301", "'\"\\", "{{ x }}", "assistant", "ASSISTANT:"),
    *("<think>", "</think>", "<think>x</think>y", "a</think>", "<|", ">", "[/INST]"),
    *("<|im_end|>", "</s>", "<|end|>", "<|assistant|>"),
    *("<think>\n\n</think>\n\nb", "<|im_start|>assistant\n", "\N{EM SPACE}a\N{EN SPACE}"),
    *("\U000f0000\U00100000\U000f0001", "\U00100001", "\U000f0000"),
)
words = st.sampled_from(ODD) | st.text(max_size=6) | st.lists(st.sampled_from(ODD), max_size=3).map("".join)


def made(name: str) -> Any:
    if name in SHAPES:
        return shaped(name)
    if name in TEMPLATES:
        return tokenizer(name)
    other = tokenizer("chatml")
    other.chat_template = (ROOT / "templates" / f"{name}.jinja").read_text().rstrip("\n")
    return other


def outcome(renderer: Renderer, messages: list[dict[str, Any]], **more: Any) -> RenderedRow | str:
    try:
        return renderer.render(Conversation(messages, **more))
    except RowProblem as problem:
        return str(problem)


def by_prefixes(renderer: Renderer, messages: list[dict[str, Any]], **more: Any) -> RenderedRow | str:
    """A message with another key has no skeleton, and no template here reads this one."""
    return outcome(renderer, [{**message, "unread": ""} for message in messages], **more)


@settings(max_examples=20)  # each of them for every template
@given(
    said=st.lists(st.tuples(words, words), min_size=1, max_size=3),
    system=st.none() | words,
    marks=st.dictionaries(st.integers(0, 3), st.booleans(), max_size=2),
    weights=st.dictionaries(st.integers(0, 3), st.sampled_from([0.5, 2.0]), max_size=2),
    train_on=st.sampled_from(["assistant", "assistant", "last", "all"]),
)
def test_skeleton_odd_conversations_equal_prefixes(
    said: list[tuple[str, str]], system: str | None, marks: dict[int, bool], weights: dict[int, float], train_on: str
) -> None:
    messages = chat(*(text for pair in said for text in pair), system=system)
    more = {
        "trained": {at: mark for at, mark in marks.items() if at < len(messages)},
        "weights": {at: weight for at, weight in weights.items() if at < len(messages)},
    }
    for name in NAMES:
        renderer = Renderer(made(name), train_on, "expand")
        assert outcome(renderer, messages, **more) == by_prefixes(renderer, messages, **more), name


class Counted:
    """A tokenizer that counts what it renders, and may render in a way of its own."""

    def __init__(self, own: Any, was: str = "", becomes: str = "") -> None:
        self._own, self._was, self._becomes = own, was, becomes
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def apply_chat_template(self, conversation: Any, **given: Any) -> Any:
        self.calls["rendered"] += 1
        changed = [{**m, "content": m["content"].replace(self._was, self._becomes)} for m in conversation]
        return self._own.apply_chat_template(changed if self._was else conversation, **given)

    def since(self) -> int:
        return self.calls.pop("rendered", 0)


@pytest.mark.parametrize("name", NAMES)
def test_skeleton_known_pattern_renders_once(name: str) -> None:
    counted = Counted(made(name))
    renderer = Renderer(counted, "assistant", "expand")
    assert isinstance(outcome(renderer, chat("a", "b", "c", "d")), RenderedRow)
    counted.since()
    outcome(renderer, chat("What?", "That.", "So?", "So."))
    assert (counted.since() == 1) == (name not in WITHOUT)


def test_skeleton_other_text_falls_back_to_prefixes() -> None:
    renderer = Renderer(Counted(tokenizer("chatml"), "x", "X"), "assistant", "expand")
    outcome(renderer, chat("a", "b"))
    row = outcome(renderer, chat("x", "x"))
    assert isinstance(row, RenderedRow)
    assert "X" in row.samples[0].text


def test_other_template_is_never_the_one_in_use() -> None:
    made = tokenizer("chatml")
    for name in template_names():
        made.chat_template = template_text(name)
        assert other_template(made) in {*template_names(), "FILE"} - {name}


def test_template_that_fails_at_a_row_is_blamed() -> None:
    made = tokenizer("chatml")
    made.chat_template += "{% if messages | length > 2 %}\n{{ 1 / 0 }}{% endif %}"
    renderer = Renderer(made, "assistant", "expand")
    assert renderer.render(Conversation(chat("a", "b"))).samples
    with pytest.raises(ConfigError, match=r"^model\.chat_template: fails with ZeroDivisionError .* at line"):
        renderer.render(Conversation(chat("a", "b", "c", "d")))
