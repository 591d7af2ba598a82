"""What is trained of a conversation, to the character, under five kinds of chat template."""

import pytest

from app.data.loss_mask import RenderedRow, Renderer
from app.data.rows import Conversation, Document, RenderedText, RowProblem
from app.data.tokenizer import Encoder, check_tokenizer
from app.errors import ConfigError
from tests.data.small import TEMPLATES, chat, tokenizer, trained_texts

TALK = chat("What is rain?", "Rain is wet.", "Thank you", "You are welcome!")


def render_row(
    kind: str, messages: list[dict[str, str]], train_on: str = "auto", on_unstable: str = "expand"
) -> RenderedRow:
    return Renderer(tokenizer(kind), train_on, on_unstable).render(Conversation(messages))


def trained(text: RenderedText) -> list[str]:
    return [text.text[start:end] for start, end in text.spans]


def labels(kind: str, messages: list[dict[str, str]], train_on: str = "auto") -> list[list[str]]:
    """The trained tokens of each sample, run by run, decoded."""
    made = tokenizer(kind)
    samples = Encoder(made).encode(render_row(kind, messages, train_on).samples)
    return [trained_texts(made, sample.ids, sample.loss_mask) for sample in samples]


GOLDEN = {
    "chatml": ["Rain is wet.<|im_end|>", "You are welcome!<|im_end|>"],
    "llama3": ["Rain is wet.<|eot_id|>", "You are welcome!<|eot_id|>"],
    "mistral": [" Rain is wet.</s>", " You are welcome!</s>"],
    "gemma": ["Rain is wet.<end_of_turn>", "You are welcome!<end_of_turn>"],
    "thinking": ["Rain is wet.<|im_end|>", "You are welcome!<|im_end|>"],
}


@pytest.mark.parametrize("kind", TEMPLATES)
def test_loss_mask_assistant_turns_and_ends(kind: str) -> None:
    assert labels(kind, TALK) == [GOLDEN[kind]]
    assert labels(kind, TALK, "assistant") == [GOLDEN[kind]]


def of_two_columns(
    kind: str, prompt: list[dict[str, str]], completion: list[dict[str, str]], train_on: str = "auto"
) -> list[list[str]]:
    """The trained texts of each sample."""
    talk = Conversation([*prompt, *completion], completion_start=len(prompt))
    return [trained(text) for text in Renderer(tokenizer(kind), train_on, "expand").render(talk).samples]


@pytest.mark.parametrize("kind", TEMPLATES)
def test_loss_mask_completion(kind: str) -> None:
    """Which is what the template writes after what it asks with."""
    made = tokenizer(kind)
    asked = made.apply_chat_template(TALK[:3], tokenize=False, add_generation_prompt=True)
    whole = made.apply_chat_template(TALK, tokenize=False)
    assert of_two_columns(kind, TALK[:3], TALK[3:]) == [[whole[len(asked) :].rstrip()]]
    assert of_two_columns(kind, TALK[:3], TALK[3:], "completion") == of_two_columns(kind, TALK[:3], TALK[3:])
    with_a_question_between = of_two_columns(kind, TALK[:1], TALK[1:])
    assert [text for sample in with_a_question_between for text in sample] == GOLDEN[kind]


def test_loss_mask_completion_other_train_on() -> None:
    assert of_two_columns("chatml", TALK[:3], TALK[3:], "assistant") == [GOLDEN["chatml"]]
    assert of_two_columns("chatml", TALK[:1], TALK[1:], "last") == [GOLDEN["chatml"][1:]]
    [[everything]] = of_two_columns("chatml", TALK[:3], TALK[3:], "all")
    assert everything == tokenizer("chatml").apply_chat_template(TALK, tokenize=False)
    with pytest.raises(RowProblem, match="no assistant message in the completion, so "):
        of_two_columns("chatml", TALK[:2], TALK[2:3])
    marked = Conversation(TALK, trained={1: True}, completion_start=2)
    with pytest.raises(RowProblem, match=r"message 1 is in the prompt and has train=true, .* only the completion"):
        Renderer(tokenizer("chatml"), "auto", "expand").render(marked)
    assert Renderer(tokenizer("chatml"), "assistant", "expand").render(marked).samples


def test_loss_mask_white_space_of_answer() -> None:
    assert labels("chatml", chat("Hi", " two \n")) == [[" two \n<|im_end|>"]]


THOUGHT = chat("Hi", "<think>hm</think>Hello", "And?", "<think>oh</think>Bye")


def test_unstable_template_last() -> None:
    only = render_row("thinking", THOUGHT, on_unstable="last")
    assert only.unstable
    assert [trained(sample) for sample in only.samples] == [["<think>oh</think>Bye<|im_end|>"]]
    assert not render_row("thinking", THOUGHT, "last").unstable  # its last turn is not rewritten
    assert [trained(sample) for sample in render_row("thinking", [*THOUGHT, *chat("?")], "last").samples] == [
        ["<think>oh</think>Bye<|im_end|>"]
    ]


def test_loss_mask_prompt_longer_than_answer_head() -> None:
    made = tokenizer("chatml")
    made.chat_template = TEMPLATES["chatml"].replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
    [text] = Renderer(made, "auto", "expand").render(Conversation(TALK[:2])).samples
    assert trained(text) == ["Rain is wet.<|im_end|>"]
    [text] = Renderer(made, "auto", "expand").render(Conversation(chat("Hi", "<thin> ice"))).samples
    assert trained(text) == ["<thin> ice<|im_end|>"]  # and not what answer and question have in common


def test_loss_mask_template_without_generation_prompt() -> None:
    made = tokenizer("chatml")
    made.chat_template = TEMPLATES["chatml"].partition("{% if add_generation_prompt")[0]
    [text] = Renderer(made, "auto", "expand").render(Conversation(TALK[:2])).samples
    assert trained(text) == ["<|im_start|>assistant\nRain is wet.<|im_end|>"]


def test_loss_mask_rewritten_prompt_refused() -> None:
    made = tokenizer("chatml")
    made.chat_template = "{{ messages | length }} {{ messages[-1]['content'] }}"
    with pytest.raises(RowProblem, match="changes the text before message 1 when that message is added"):
        Renderer(made, "auto", "expand").render(Conversation(TALK[:2]))


def test_unseen_message_counted() -> None:
    made = tokenizer("chatml")
    made.chat_template = "{% for m in messages if m['role'] != 'system' %}" + TEMPLATES["chatml"].partition("%}")[2]
    said = Conversation(chat("Hi", "Hello", system="Be brief."))
    assert Renderer(made, "auto", "expand").render(said).unseen == 1
    assert render_row("chatml", said.messages).unseen == 0


@pytest.mark.parametrize(("train_on", "expected"), [("auto", ["cd"]), ("completion", ["cd"]), ("all", ["abcd"])])
def test_loss_mask_documents(train_on: str, expected: list[str]) -> None:
    made = Renderer(tokenizer(None), train_on, "expand").render(Document("abcd", completion_start=2))
    assert [trained(sample) for sample in made.samples] == [expected]


def test_check_tokenizer_refuses_unusable() -> None:
    bare = tokenizer(None)
    with pytest.raises(ConfigError, match=r"model\.chat_template"):
        check_tokenizer(bare, "messages")
    check_tokenizer(bare, "text")
    bare.eos_token = None
    with pytest.raises(ConfigError, match="no end-of-text token"):
        check_tokenizer(bare, "text")
