"""A base is filled with the tensors that transformers reads, or with random ones that depend on names alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from app.base import base_model
from app.base.base_model import model_class
from app.base.base_weights import LoadOptions
from app.errors import EnvironmentProblem
from app.layers.attention import register
from app.layers.nf4 import install_forward
from app.layers.quantization import Bits4, other_linear_layers, quantizer_of
from tests.model.small import ALL_KINDS, CAUSAL, built, config_of, documents_of, model_config, task_of, wide_numbers
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
    options = LoadOptions(dtype, CPU, register("sdpa"))
    return base_model.load_base(wide(path=str(folder)), CAUSAL, options, 0, four_bit)


def state(lm: Any) -> dict[str, Tensor]:
    """All that there is, buffers that no file has among it."""
    others = {name: p.detach() for name, p in (*lm.named_parameters(), *lm.named_buffers())}
    return others | packed_bytes(lm)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", OURS)
def test_what_is_read_is_what_transformers_reads(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = saved(kind, tmp_path)
    ours, theirs = load(folder, dtype), by_transformers(folder, dtype)
    left, right = state(ours), state(theirs)
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype, name
        assert torch.equal(left[name], right[name]), name
    assert ours.generation_config.to_dict() == theirs.generation_config.to_dict()
    assert not ours.training
    with torch.no_grad():
        assert ours(IDS).logits.equal(theirs(IDS).logits)


def by_transformers(folder: Path, dtype: torch.dtype) -> Any:
    """Packed by it as it reads."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    outside = other_linear_layers(load(folder, dtype))
    config = BitsAndBytesConfig(**Bits4("nf4", True, dtype).bitsandbytes_arguments(outside))
    lm = AutoModelForCausalLM.from_pretrained(
        str(folder), dtype=dtype, attn_implementation=register("sdpa"), quantization_config=config
    )
    install_forward(lm)
    return lm


def test_tensor_that_makes_no_parameter_is_passed_over(tmp_path: Path) -> None:
    """Here one that old files of Llama have."""
    folder = saved("llama", tmp_path)
    file = sorted(folder.glob("*.safetensors"))[0]
    extra = "model.layers.0.self_attn.rotary_emb.inv_freq"
    save_file(load_file(file) | {extra: torch.ones(2)}, file, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    known = json.loads(index.read_text())
    known["weight_map"][extra] = file.name
    index.write_text(json.dumps(known))
    assert state(load(folder)).keys() == state(load(saved("llama", tmp_path / "plain"))).keys()


def test_a_file_that_is_missing_is_told_with_its_folder(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path)
    sorted(folder.glob("*.safetensors"))[1].unlink()
    with pytest.raises(EnvironmentProblem, match=r"cannot be loaded") as refusal:
        load(folder)
    assert str(folder) in str(refusal.value)


def drawn(kind: str, seed: int = 0, four_bit: Any = None) -> Any:
    options = LoadOptions(torch.float32, CPU, "eager")
    config = model_config(kind) if four_bit is None else wide(kind)
    return base_model.load_base(config, task_of(kind), options, seed, four_bit)


@pytest.mark.parametrize("kind", [*ALL_KINDS, "deepseek_v3", "opt"])
def test_random_base_is_as_large_as_its_own_initialisation_makes_it(kind: str) -> None:
    """Buffers are equal, tied weights tied; what a kind initialises by the role of a module is, too."""
    lm, whole = drawn(kind), fresh(kind)
    expected = dict(whole.named_parameters())
    assert {name for name, _ in lm.named_parameters()} == expected.keys()
    for name, parameter in lm.named_parameters():
        assert parameter.device == CPU
        spread = float(expected[name].detach().float().std(correction=0))
        if spread == 0:
            assert parameter.equal(expected[name]), name
        elif parameter.numel() > 500:
            assert float(parameter.detach().std()) == pytest.approx(spread, rel=0.2), name
    buffers = dict(whole.named_buffers())
    assert all(buffer.equal(buffers[name]) for name, buffer in lm.named_buffers())
    head, embedding = lm.get_output_embeddings().weight, lm.get_input_embeddings().weight
    assert (head is embedding) == lm.config.tie_word_embeddings


def fresh(kind: str) -> Any:
    config = config_of(kind)
    with torch.random.fork_rng(devices=[]):
        return model_class(task_of(kind)).from_config(config, attn_implementation="eager")


def test_random_numbers_depend_on_seed_and_name_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first = drawn("llama").state_dict()
    assert torch.rand(3).equal(expected), "what the program draws stays what it was"
    again, other = drawn("llama").state_dict(), drawn("llama", seed=1).state_dict()
    assert all(first[name].equal(again[name]) for name in first)
    assert not first["lm_head.weight"].equal(other["lm_head.weight"])
    layers = [first[f"model.layers.{at}.mlp.up_proj.weight"] for at in range(2)]
    assert not layers[0].equal(layers[1])


def test_random_weights_that_only_a_constructor_initialises_are_its_own() -> None:
    lm = base_model.load_base(
        model_config("apertus"), CAUSAL, LoadOptions(torch.float32, CPU, register("sdpa")), seed=0
    )
    own = type(lm)(lm.config).state_dict()
    learnt = {name: each for name, each in lm.state_dict().items() if "alpha" in name}
    assert len(learnt) == 4
    assert all(torch.equal(each, own[name].float()) for name, each in learnt.items())
