"""A base packed file by file is the one that transformers packs, and needs the memory of one file."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from app.errors import EnvironmentProblem
from app.model import weights
from app.model.attention import register
from app.model.held import Held
from app.model.quantization import quantizer_of
from app.model.shards import read_shards
from app.model.weights import load_packed
from tests.model.small import CAUSAL, built, documents_of, wide_numbers
from tests.model.test_quantization import NF4, packed_bytes, wide

CPU = torch.device("cpu")
IDS = documents_of((10,))[0][None]
OURS = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "olmo2")


def saved(kind: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    built(kind, "eager", dtype, **wide_numbers(kind)).save_pretrained(str(folder), max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    four_bit = quantizer_of(NF4, dtype)
    assert four_bit is not None
    return load_packed(wide(path=str(folder)), CAUSAL, four_bit, Held(dtype, CPU, register("sdpa")), 0)


def state(lm: Any) -> dict[str, Tensor]:
    """All that there is, buffers that no file has among it."""
    others = {name: p.detach() for name, p in (*lm.named_parameters(), *lm.named_buffers())}
    return others | packed_bytes(lm)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", OURS)
def test_what_is_read_is_what_transformers_reads(
    kind: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(kind, tmp_path)
    asked: list[bool] = []

    def noted(*given: Any) -> bool:
        asked.append(read_shards(*given))
        return asked[-1]

    monkeypatch.setattr(weights, "read_shards", noted)
    ours = load(folder, dtype)
    monkeypatch.setattr(weights, "read_shards", lambda *_: False)
    theirs = load(folder, dtype)
    assert asked == [True], "it was read here"
    left, right = state(ours), state(theirs)
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype, name
        assert torch.equal(left[name], right[name]), name
    assert ours.generation_config.to_dict() == theirs.generation_config.to_dict()
    assert not ours.training
    with torch.no_grad():
        assert ours(IDS).logits.equal(theirs(IDS).logits)


def test_what_has_other_names_is_left_to_transformers(tmp_path: Path) -> None:
    """Here a tensor that old files of Llama have, and that nobody reads."""
    folder = saved("llama", tmp_path)
    file = sorted(folder.glob("*.safetensors"))[0]
    extra = "model.layers.0.self_attn.rotary_emb.inv_freq"
    save_file(load_file(file) | {extra: torch.ones(2)}, file, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    known = json.loads(index.read_text())
    known["weight_map"][extra] = file.name
    index.write_text(json.dumps(known))
    assert state(load(folder)).keys() == state(load(saved("llama", tmp_path / "plain"))).keys()


def test_a_tensor_that_is_missing_is_told(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path)
    index = folder / "model.safetensors.index.json"
    known = json.loads(index.read_text())
    name = "model.layers.1.mlp.up_proj.weight"
    file = folder / known["weight_map"].pop(name)
    index.write_text(json.dumps(known))
    save_file({n: t for n, t in load_file(file).items() if n != name}, file, metadata={"format": "pt"})
    with pytest.raises(EnvironmentProblem, match=rf"lack 1 of the model's tensors \({name}\)"):
        load(folder)


@pytest.mark.parametrize("damage", ["shape", "cut", "gone"])
def test_a_damaged_file_is_told_with_its_folder(damage: str, tmp_path: Path) -> None:
    folder = saved("llama", tmp_path)
    file = sorted(folder.glob("*.safetensors"))[1]
    if damage == "shape":
        save_file({n: t[:-1].clone() for n, t in load_file(file).items()}, file, metadata={"format": "pt"})
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    else:
        file.unlink()
    with pytest.raises(EnvironmentProblem, match=r"cannot be loaded") as refusal:
        load(folder)
    assert str(folder) in str(refusal.value)
