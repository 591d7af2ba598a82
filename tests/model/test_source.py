"""Model folders: fingerprints, and received folders that transformers cannot read."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from app.assets import ROOT
from app.base.base_model import BaseModel
from app.base.source import MAX_LAYERS, base_fingerprint, require_weights, weight_files, weights_fingerprint
from app.base.tokenizer import MAX_GROWTH, load_tokenizer, read_tokenizer
from app.errors import AppError, ConfigError, EnvironmentProblem
from app.finished.inference import TextGenerator, load_any, load_tuned_tokenizer
from tests.model.small import CAUSAL, built, model_config

MIB = 1 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "model"
    built("llama", "sdpa").save_pretrained(str(place))
    return place


def of(folder: Path) -> str | None:
    return base_fingerprint(model_config(path=str(folder)))


def test_a_copy_has_it_and_another_model_of_the_same_sizes_has_not(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere"
    shutil.copytree(folder, copy)
    assert of(copy) == of(folder) is not None
    lm = built("llama", "sdpa")
    lm.model.norm.weight.data *= 1.01
    lm.save_pretrained(str(copy))
    assert (copy / "model.safetensors").stat().st_size == (folder / "model.safetensors").stat().st_size
    assert of(copy) != of(folder)


def test_only_the_files_of_the_model_count(folder: Path) -> None:
    """A folder of the hub may hold the same weights once more in another form."""
    before = of(folder)
    (folder / "consolidated.safetensors").write_bytes(b"x")
    assert of(folder) == before
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "consolidated.safetensors"}}))
    assert of(folder) == before
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    of_parts = of(folder)
    (folder / "consolidated.safetensors").unlink()
    assert of(folder) == of_parts is not None


def test_there_is_none_without_weights(folder: Path, tmp_path: Path) -> None:
    assert base_fingerprint(model_config()) is None
    assert of(tmp_path) is None
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert of(folder) is None, "a part is missing"


@pytest.mark.parametrize(
    ("size", "at", "seen"),
    [
        (4 * MIB, 3 * MIB + 7, True),  # whole
        (16 * MIB, 0, True),
        (16 * MIB, 16 * MIB - 1, True),
        (16 * MIB, 100_000, False),  # between two blocks
    ],
)
def test_large_files_are_read_in_blocks(tmp_path: Path, size: int, at: int, seen: bool) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(size))
    before = weights_fingerprint([file])
    with file.open("r+b") as stream:
        stream.seek(at)
        stream.write(b"\x01")
    assert (weights_fingerprint([file]) != before) == seen


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "../model.safetensors", "/model.safetensors", "a/b.safetensors", 3]
)
@pytest.mark.parametrize("key", ["weight_map", "transformers_weights"])
def test_weight_file_outside_of_the_folder_or_of_another_format_is_refused(folder: Path, key: str, name: Any) -> None:
    if key == "weight_map":
        (folder / "model.safetensors").rename(folder / "other.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({key: {"a": name}}))
    else:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {key: name}))
    with pytest.raises(EnvironmentProblem, match=r"is not the name of a \.safetensors file in this folder"):
        require_weights(folder, "mine")


@pytest.mark.parametrize("text", ["[]", "{", '{"weight_map": 3}', "{}"])
def test_index_that_is_none_is_refused(folder: Path, text: str) -> None:
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(EnvironmentProblem, match="cannot be read as an index"):
        require_weights(folder, "mine")


def test_links_of_a_hub_cache_are_weight_files(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").rename(tmp_path / "blob")
    (folder / "model.safetensors").symlink_to(tmp_path / "blob")
    assert weight_files(folder) == [folder / "model.safetensors"]


def test_named_weight_file_is_read_as_transformers_reads_it(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    built("llama", "sdpa", tie_word_embeddings=False).save_pretrained(str(folder))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": "other.safetensors"}))
    assert weight_files(folder) == [folder / "other.safetensors"]


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
def tiny_folder(tmp_path: Path) -> Path:
    """The model that ships."""
    return shutil.copytree(ROOT / "tiny", tmp_path / "model")


def change(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def opened(folder: Path) -> tuple[Any, Any]:
    return load_any(model_config(path=str(folder)), CAUSAL, print)


@pytest.mark.parametrize("changes", CONFIG, ids=str)
def test_config_with_impossible_value_is_refused(tiny_folder: Path, changes: dict[str, Any]) -> None:
    change(tiny_folder / "config.json", **changes)
    with pytest.raises(AppError, match=rf"^model\.path={tiny_folder}: .*config\.json") as of_generation:
        opened(tiny_folder)
    assert len(of_generation.value.problems) == 1
    with pytest.raises(AppError, match=rf"^model\.path={tiny_folder}: "):
        _trained(tiny_folder)


def _trained(folder: Path) -> None:
    """What a training asks of the model's structure."""
    base = BaseModel(model_config(path=str(folder)), CAUSAL)
    base.longest_row(64)
    base.on_meta()
    opened(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [NESTED, "[1]", "{"])
def test_damaged_json_file_is_refused(tiny_folder: Path, name: str, content: str) -> None:
    (tiny_folder / name).write_text(content)
    if (name, content) == ("generation_config.json", "{"):  # transformers passes over it
        opened(tiny_folder)
        return
    with pytest.raises(EnvironmentProblem, match=rf"^model\.path={tiny_folder}: "):
        opened(tiny_folder)


@pytest.mark.parametrize(
    "changes",
    [{"model_max_length": "x"}, {"tokenizer_class": 5}, {"added_tokens_decoder": 5}, {"eos_token": 5}],
    ids=str,
)
def test_tokenizer_config_with_impossible_value_is_refused(tiny_folder: Path, changes: dict[str, Any]) -> None:
    change(tiny_folder / "tokenizer_config.json", **changes)
    with pytest.raises(EnvironmentProblem, match=r"no tokenizer can be read from .*model \("):
        load_tokenizer(model_config(path=str(tiny_folder)), needs_template=False)
    with pytest.raises(AppError, match=r"^no tokenizer can be read from .*model \("):
        load_tuned_tokenizer(tiny_folder)


def test_end_id_that_is_no_number_is_refused(tiny_folder: Path) -> None:
    change(tiny_folder / "generation_config.json", eos_token_id="x")
    lm, tokenizer = opened(tiny_folder)
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id has 'x', which is not a token id"):
        list(TextGenerator(lm, tokenizer, True, 1, {}).answers([QUESTION], 1))


@pytest.mark.parametrize("template", ["{{ '' }}", "{% if false %}x{% endif %}"])
def test_template_that_writes_nothing_is_refused(tiny_folder: Path, template: str) -> None:
    (tiny_folder / "chat_template.jinja").write_text(template)
    generator = TextGenerator(*opened(tiny_folder), True, 1, {})
    with pytest.raises(ConfigError, match=r"^prompt: the chat template renders nothing\. Set chat=false\.$"):
        generator.ids(QUESTION)
    with pytest.raises(ConfigError, match=r"^prompt: it is empty\."):
        TextGenerator(generator.lm, generator.tokenizer, False, 1, {}).ids([{"role": "user", "content": ""}])


@pytest.mark.parametrize("name", ["num_hidden_layers", "n_layer"])
@pytest.mark.parametrize("place", ["whole", "text part", "random weights"])
def test_model_of_a_million_layers_is_refused(tiny_folder: Path, name: str, place: str) -> None:
    given: dict[str, Any] = {name: 10**6}
    change(tiny_folder / "config.json", **({"text_config": given} if place == "text part" else given))
    config = model_config(path=str(tiny_folder))
    if place == "random weights":
        config = model_config(architecture={"model_type": "llama", **given})
    with pytest.raises(ConfigError, match=rf" {name} is 1,000,000, expected 0 to {MAX_LAYERS:,}\.$"):
        _ = BaseModel(config, CAUSAL).numbers
    if place != "random weights":
        with pytest.raises(ConfigError, match=rf"config\.json: {name} is 1,000,000"):
            opened(tiny_folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json", "model.safetensors"])
def test_folder_with_a_pipe_is_refused(tiny_folder: Path, name: str) -> None:
    (tiny_folder / name).unlink()
    os.mkfifo(tiny_folder / name)
    with pytest.raises(EnvironmentProblem, match=rf"{tiny_folder / name} is not a regular file"):
        opened(tiny_folder)
    with pytest.raises(EnvironmentProblem, match=rf"{tiny_folder / name} is not a regular file"):
        _ = BaseModel(model_config(path=str(tiny_folder)), CAUSAL).numbers


def test_folder_of_links_is_read(tiny_folder: Path, tmp_path: Path) -> None:
    linked = tmp_path / "snapshot"  # as the cache of the hub has them
    linked.mkdir()
    for file in tiny_folder.iterdir():
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
def test_normalizer_that_makes_texts_too_long_is_refused(
    tiny_folder: Path, rules: dict[str, Any], refused: bool
) -> None:
    change(tiny_folder / "tokenizer.json", normalizer=rules)
    if not refused:
        read_tokenizer(tiny_folder, False)
        return
    with pytest.raises(EnvironmentProblem, match=rf"no tokenizer .* times longer, the limit is {MAX_GROWTH:,}\)"):
        load_tokenizer(model_config(path=str(tiny_folder)), needs_template=False)
