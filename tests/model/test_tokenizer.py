import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from app import chat_rendering
from app.assets import ROOT
from app.base.tokenizer import check, chosen_template, load_tokenizer, tokenizer_hash
from app.config.tasks import TASKS
from app.errors import ConfigError, EnvironmentProblem
from tests.model.small import model_config

MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """The tokenizer that ships, without its chat template."""
    folder = tmp_path / "bare"
    shutil.copytree(ROOT / "tiny", folder)
    (folder / "chat_template.jinja").unlink()
    return folder


def load(needs_template: bool = True, **given: Any) -> Any:
    return load_tokenizer(model_config(**given), needs_template=needs_template)


def test_random_weights_of_hidden_tokens_use_wordpiece() -> None:
    random = model_config(weights="random", path="org/name")
    tokenizer = load_tokenizer(random, needs_template=False, shipped=TASKS["masked"].tokenizer)
    assert tokenizer.convert_tokens_to_ids(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]) == [0, 1, 2, 3, 4]
    assert tokenizer.mask_token_id == 4
    seen = tokenizer("Hello xqvy", "there")
    tokens = tokenizer.convert_ids_to_tokens(seen.input_ids)
    assert (tokens[0], tokens.count("[SEP]"), "##y" in tokens) == ("[CLS]", 2, True)
    assert set(seen.token_type_ids) == {0, 1}


def test_pretrained_weights_bring_their_own_unless_another_is_given(bare: Path) -> None:
    assert load(path=str(bare), needs_template=False).chat_template is None
    assert load(path=str(bare), tokenizer="asset:tiny").chat_template


def test_a_template_is_asked_for_only_by_chat_data(bare: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        load(path=str(bare))
    message = str(refused.value)
    assert "has no chat template. Set model.chat_template=FILE or one of" in message
    for name in ("chatml", "llama3", "mistral"):
        assert name in message


def test_a_template_can_be_a_file(bare: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    tokenizer = load(path=str(bare), chat_template=str(file))
    assert tokenizer.apply_chat_template(MESSAGES, tokenize=False) == "<user>Hi"


def test_a_misspelt_template_is_told_before_anything_is_loaded() -> None:
    config = model_config(chat_template="chatlm")
    (problem,) = check(config)
    assert problem.startswith("model.chat_template=chatlm is neither a file nor one of alpaca, chatml,")
    assert check(model_config(chat_template="chatml")) == []
    assert check(model_config()) == []
    assert chosen_template(model_config()) is None


@pytest.mark.parametrize("content", [None, "{ broken", "{}"])
def test_a_folder_without_a_readable_tokenizer(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(
        (EnvironmentProblem, ConfigError), match=rf"^model.tokenizer={tmp_path}: no tokenizer can be read"
    ):
        load(tokenizer=str(tmp_path))


def test_the_hash_is_of_all_that_turns_text_into_ids(bare: Path) -> None:
    own = load()
    assert tokenizer_hash(own) == tokenizer_hash(load())
    assert tokenizer_hash(own) != tokenizer_hash(load(chat_template="zephyr"))
    file = bare / "tokenizer.json"
    content = json.loads(file.read_text())
    content["added_tokens"][0]["content"] = "<other>"
    file.write_text(json.dumps(content))
    shutil.copy(ROOT / "tiny" / "chat_template.jinja", bare)
    assert tokenizer_hash(load(path=str(bare))) != tokenizer_hash(own)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a\n{{ 1 / 0 }}", "fails with ZeroDivisionError (division by zero) at line 2."),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "fails with RecursionError (maximum recursion depth"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "fails with OverflowError (Range too big."),
        ("{{ 'a' * 10 ** 15 }}", "not allowed: * creates a value of more than 134,217,728 characters."),
        ("a\n{% if %}", "line 2: Expected an expression, got 'end of statement block'."),
        ("{{ messages | nothing }}", "line 1: No filter named 'nothing'."),
        ("{{ messages.append(1) }}", "not allowed: "),
    ],
)
def test_a_template_that_fails_is_blamed_before_any_row(bare: Path, tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "own.jinja").write_text(text)
    with pytest.raises(ConfigError) as fault:
        load(path=str(bare), chat_template=str(tmp_path / "own.jinja"))
    [problem] = fault.value.problems
    assert problem.startswith(f"model.chat_template={tmp_path}/own.jinja: {said}")
    assert problem.endswith("Fix it, or set another: model.chat_template=FILE or the name of a built-in template.")


def test_an_endless_template_is_blamed_in_time(bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_rendering, "MAX_SECONDS", 0.1)
    nested = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
    (tmp_path / "own.jinja").write_text(nested)
    with pytest.raises(ConfigError, match=r"own\.jinja: rendering one conversation takes more than 0\.1 seconds\. Fix"):
        load(path=str(bare), chat_template=str(tmp_path / "own.jinja"))
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_template_options_are_defaults_of_the_template(bare: Path) -> None:
    def asked(options: dict[str, Any], **of_row: Any) -> str:
        tokenizer = load(path=str(bare), chat_template="qwen3", template_options=options)
        return chat_rendering.render_chat(tokenizer, MESSAGES, ask=True, options=of_row)

    empty_thought = "<think>\n\n</think>\n\n"
    assert not asked({}).endswith(empty_thought)
    assert asked({"enable_thinking": False}) == asked({}) + empty_thought
    assert asked({"enable_thinking": False}, enable_thinking=True) == asked({})
    assert tokenizer_hash(load(template_options={"role": "x"})) != tokenizer_hash(load())


def test_a_template_option_that_is_not_read_is_refused(bare: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"model\.template_options\.enable_thinkin: .* Did you mean enable_thinking\?"
    ):
        load(path=str(bare), chat_template="qwen3", template_options={"enable_thinkin": False})
