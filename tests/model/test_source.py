"""The hash of a base: what it tells apart, what it reads of a folder, and what it cannot see."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from app.base.source import base_fingerprint, require_weights, weight_files, weights_fingerprint
from app.errors import EnvironmentProblem
from tests.model.small import built, model_config

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
