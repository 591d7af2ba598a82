import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from app.assets import ROOT
from app.errors import ConfigError, EnvironmentProblem
from app.model.tokenizer import check, chosen_template, load_tokenizer, template_names, tokenizer_hash
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


def test_random_weights_use_the_tokenizer_that_ships() -> None:
    tokenizer = load(weights="random", path="org/name")
    assert tokenizer.is_fast
    assert tokenizer("Hello there").input_ids
    assert tokenizer.chat_template == (ROOT / "tiny" / "chat_template.jinja").read_text()


def test_pretrained_weights_bring_their_own_unless_another_is_given(bare: Path) -> None:
    assert load(path=str(bare), needs_template=False).chat_template is None
    assert load(path=str(bare), tokenizer="asset:tiny").chat_template


def test_a_template_is_asked_for_only_by_chat_data(bare: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        load(path=str(bare))
    message = str(refused.value)
    assert "has no chat template. Give model.chat_template=FILE or one of" in message
    for name in ("chatml", "llama3", "mistral"):
        assert name in message


@pytest.mark.parametrize("name", template_names())
def test_every_template_that_ships_can_be_named(bare: Path, name: str) -> None:
    tokenizer = load(path=str(bare), chat_template=name)
    assert "Hi" in tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)


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
