"""Model folders that somebody sent: what transformers cannot read gives one message, and nothing hangs."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from app.assets import ROOT
from app.base.base_model import BaseModel
from app.base.source import MAX_LAYERS
from app.base.tokenizer import MAX_GROWTH, load_tokenizer, read_tokenizer
from app.errors import AppError, ConfigError, EnvironmentProblem
from app.finished.inference import TextGenerator, load_any, load_tuned_tokenizer
from tests.model.small import CAUSAL, model_config

QUESTION = [{"role": "user", "content": "Name the opposite of new."}]
NESTED = '{"model_type": "llama", "x": ' + "[" * 100_000 + "]" * 100_000 + "}"
CONFIG: list[dict[str, Any]] = [
    {"hidden_size": "a"},
    {"num_hidden_layers": -1},
    {"num_attention_heads": 0},
    {"num_attention_heads": 7},
    {"num_key_value_heads": 0},
    {"num_key_value_heads": 5},
    {"head_dim": 0},
    {"vocab_size": -1},
    {"rms_norm_eps": "nan"},
    {"hidden_act": "nope"},
    {"rope_parameters": {"rope_type": "nope"}},
    {"pad_token_id": 10**6},
    {"eos_token_id": "x"},
    {"quantization_config": 5},
    {"quantization_config": {"quant_method": "gptq", "bits": 4}},
    {"quantization_config": {"quant_method": "auto-round", "bits": 4}},
    {"text_config": 5},
    {"dtype": "float99"},
    {"id2label": 5},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The model that ships."""
    return shutil.copytree(ROOT / "tiny", tmp_path / "model")


def change(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def opened(folder: Path) -> tuple[Any, Any]:
    return load_any(model_config(path=str(folder)), CAUSAL, print)


@pytest.mark.parametrize("changes", CONFIG, ids=str)
def test_config_with_impossible_value_is_refused(folder: Path, changes: dict[str, Any]) -> None:
    change(folder / "config.json", **changes)
    with pytest.raises(AppError, match=rf"^model\.path={folder}: .*config\.json") as of_generation:
        opened(folder)
    assert len(of_generation.value.problems) == 1
    with pytest.raises(AppError, match=rf"^model\.path={folder}: "):
        _trained(folder)


def _trained(folder: Path) -> None:
    """What a training asks of the model's structure."""
    base = BaseModel(model_config(path=str(folder)), CAUSAL)
    base.longest_row(64)
    base.on_meta()
    opened(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [NESTED, "[1]", "{"])
def test_damaged_json_file_is_refused(folder: Path, name: str, content: str) -> None:
    (folder / name).write_text(content)
    if (name, content) == ("generation_config.json", "{"):  # transformers passes over it
        opened(folder)
        return
    with pytest.raises(EnvironmentProblem, match=rf"^model\.path={folder}: "):
        opened(folder)


@pytest.mark.parametrize(
    "changes",
    [{"model_max_length": "x"}, {"tokenizer_class": 5}, {"added_tokens_decoder": 5}, {"eos_token": 5}],
    ids=str,
)
def test_tokenizer_config_with_impossible_value_is_refused(folder: Path, changes: dict[str, Any]) -> None:
    change(folder / "tokenizer_config.json", **changes)
    with pytest.raises(EnvironmentProblem, match=r"no tokenizer can be read from .*model \("):
        load_tokenizer(model_config(path=str(folder)), needs_template=False)
    with pytest.raises(AppError, match=r"^no tokenizer can be read from .*model \("):
        load_tuned_tokenizer(folder)


def test_end_id_that_is_no_number_is_refused(folder: Path) -> None:
    change(folder / "generation_config.json", eos_token_id="x")
    lm, tokenizer = opened(folder)
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id has 'x', which is not a token id"):
        list(TextGenerator(lm, tokenizer, True, 1, {}).answers([QUESTION], 1))


@pytest.mark.parametrize("template", ["{{ '' }}", "{% if false %}x{% endif %}"])
def test_template_that_writes_nothing_is_refused(folder: Path, template: str) -> None:
    (folder / "chat_template.jinja").write_text(template)
    generator = TextGenerator(*opened(folder), True, 1, {})
    with pytest.raises(ConfigError, match=r"^prompt: the chat template writes nothing\. Set chat=false\.$"):
        generator.ids(QUESTION)
    with pytest.raises(ConfigError, match=r"^prompt: it is empty\."):
        TextGenerator(generator.lm, generator.tokenizer, False, 1, {}).ids([{"role": "user", "content": ""}])


@pytest.mark.parametrize("name", ["num_hidden_layers", "n_layer"])
@pytest.mark.parametrize("place", ["whole", "text part", "random weights"])
def test_model_of_a_million_layers_is_refused(folder: Path, name: str, place: str) -> None:
    given: dict[str, Any] = {name: 10**6}
    change(folder / "config.json", **({"text_config": given} if place == "text part" else given))
    config = model_config(path=str(folder))
    if place == "random weights":
        config = model_config(architecture={"model_type": "llama", **given})
    with pytest.raises(ConfigError, match=rf" {name} is 1,000,000, expected 0 to {MAX_LAYERS:,}\.$"):
        _ = BaseModel(config, CAUSAL).numbers
    if place != "random weights":
        with pytest.raises(ConfigError, match=rf"config\.json: {name} is 1,000,000"):
            opened(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json", "model.safetensors"])
def test_folder_with_a_pipe_is_refused(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(EnvironmentProblem, match=rf"{folder / name} is not a regular file"):
        opened(folder)
    with pytest.raises(EnvironmentProblem, match=rf"{folder / name} is not a regular file"):
        _ = BaseModel(model_config(path=str(folder)), CAUSAL).numbers


def test_folder_of_links_is_read(folder: Path, tmp_path: Path) -> None:
    linked = tmp_path / "snapshot"  # as the cache of the hub has them
    linked.mkdir()
    for file in folder.iterdir():
        (linked / file.name).symlink_to(file)
    (linked / "gone").symlink_to(tmp_path / "nowhere")
    assert opened(linked)[0].config.num_hidden_layers == 4


def replaced(text: str, pattern: dict[str, str], times: int) -> dict[str, Any]:
    steps = [{"type": "Replace", "pattern": pattern, "content": text}] * times
    return {"type": "Sequence", "normalizers": steps}


@pytest.mark.parametrize(
    ("rules", "refused"),
    [
        (replaced("e" * 1000, {"String": "e"}, 3), True),
        (replaced("e" * 1000, {"Regex": "e"}, 3), True),
        (replaced("e", {"Regex": ""}, 40), True),
        ({"type": "Sequence", "normalizers": [replaced("e" * 200, {"String": "e"}, 1)] * 2}, True),
        (replaced("<|end|>", {"String": "<|end|> "}, 40), False),
        (replaced("\u2581", {"String": " "}, 40), False),
        ({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, {"type": "NFC"}]}, False),
    ],
)
def test_normalizer_that_makes_texts_too_long_is_refused(folder: Path, rules: dict[str, Any], refused: bool) -> None:
    change(folder / "tokenizer.json", normalizer=rules)
    if not refused:
        read_tokenizer(folder, False)
        return
    with pytest.raises(EnvironmentProblem, match=rf"no tokenizer .* times longer, the limit is {MAX_GROWTH:,}\)"):
        load_tokenizer(model_config(path=str(folder)), needs_template=False)
