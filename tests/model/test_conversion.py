"""Folders whose tensors have other names, shapes or formats than a model's parameters, read one rule at a time."""

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from app.base.base_model import load_base, quiet_transformers, read_weights
from app.base.base_weights import LoadOptions
from app.base.conversion import FolderReader
from app.config.schema import ModelConfig
from app.errors import ConfigError, EnvironmentProblem
from app.layers.attention import register
from app.model.build import count_weights
from tests.model.small import (
    CAUSAL,
    batch_of,
    build_model,
    built,
    documents_of,
    full,
    lora,
    model_config,
    sections,
    wide_numbers,
)
from tests.model.test_quantization import NF4, packed_bytes, wide

CPU = torch.device("cpu")
BLOCK = 16  # weights to a scale, each way, in the fp8 folders here
FP8 = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}


def read(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return load_base(model_config(path=str(folder)), CAUSAL, LoadOptions(dtype, CPU, register("sdpa")), 0)


def answering(folder: Path) -> Any:
    """As finetune generate reads any model."""
    return read_weights(model_config(path=str(folder)), CAUSAL, folder, dtype="auto")


def by_transformers(folder: Path, dtype: torch.dtype = torch.float32, **given: Any) -> Any:
    quiet_transformers()
    return transformers.AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype, **given)


def state(lm: Any) -> dict[str, Tensor]:
    """Parameters and buffers by all of their names."""
    return {**dict(lm.named_parameters(remove_duplicate=False)), **dict(lm.named_buffers())}


def assert_same(ours: Any, theirs: Any) -> None:
    left, right = state(ours), state(theirs)
    assert left.keys() == right.keys()
    for name, each in left.items():
        assert each.dtype == right[name].dtype, name
        assert torch.equal(each, right[name]), name


def changed(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], **config: Any) -> Path:
    """The folder with other tensors, and keys added to its config.json."""
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    known = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(known | config))
    return folder


def in_fp8(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Matrices inside the layers but the routers, in blocks with a scale each."""
    found = dict(tensors)
    for name, each in tensors.items():
        if ".layers." in name and each.ndim == 2 and not name.endswith("gate.weight"):
            blocks = each.float().unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
            scales = blocks.abs().amax((1, 3)) / 448
            packed = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
            found |= {name: packed.reshape(each.shape), f"{name}_scale_inv": scales}
    return found


def in_ue8m0(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """In fp8 with scales that are powers of two, of one byte each."""
    packed = in_fp8(tensors).items()
    return {n: each.log2().ceil().exp2().to(torch.float8_e8m0fnu) if "_scale" in n else each for n, each in packed}


def in_mxfp4(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Stacks of experts [experts, in, out] as random blocks of 32 weights, their scales powers of two."""
    generator, found = torch.Generator().manual_seed(0), dict(tensors)
    for name, each in tensors.items():
        if each.ndim == 3:
            experts, rows, columns = each.shape
            shape = (experts, columns, rows // 32)
            del found[name]
            found[f"{name}_blocks"] = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
            found[f"{name}_scales"] = torch.randint(118, 126, shape, generator=generator, dtype=torch.uint8)
    return found


def fp8_folder(kind: str, folder: Path, dtype: torch.dtype = torch.float32, packed: Any = in_fp8) -> Path:
    built(kind, "eager", dtype, **wide_numbers(kind)).save_pretrained(str(folder))
    return changed(folder, packed, quantization_config=FP8)


def mxfp4_folder(folder: Path) -> Path:
    built("gpt_oss", "eager", **wide_numbers("gpt_oss")).save_pretrained(str(folder))
    return changed(folder, in_mxfp4, quantization_config={"quant_method": "mxfp4"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_folder_with_other_names_is_read_as_transformers_reads_it(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """deepseek_v3 has a buffer among its weights, and keeps it in float32."""
    built(kind, "eager").save_pretrained(str(tmp_path), max_shard_size="30KB")
    assert_same(read(tmp_path, dtype), by_transformers(tmp_path, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "gpt_oss"])
def test_quantized_folder_is_unpacked_to_the_bit(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    if kind == "gpt_oss":
        theirs: Any = transformers.Mxfp4Config(dequantize=True)
        folder = mxfp4_folder(tmp_path)
    else:
        theirs = transformers.FineGrainedFP8Config(dequantize=True, weight_block_size=(BLOCK, BLOCK))
        folder = fp8_folder(kind, tmp_path, dtype)
    ours = read(folder, dtype)
    assert_same(ours, by_transformers(folder, dtype, quantization_config=theirs))
    assert not hasattr(ours.config, "quantization_config"), "what is saved is not quantized"


def test_fp8_scales_of_one_byte_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    folder = fp8_folder("llama", tmp_path, torch.bfloat16, in_ue8m0)
    theirs: Any = transformers.FineGrainedFP8Config(dequantize=True, weight_block_size=(BLOCK, BLOCK))
    assert_same(read(folder, torch.bfloat16), by_transformers(folder, torch.bfloat16, quantization_config=theirs))


def test_fp8_folder_is_packed_to_nf4_as_it_is_read_and_told(tmp_path: Path) -> None:
    folder = fp8_folder("llama", tmp_path / "fp8")
    read(folder).save_pretrained(str(tmp_path / "plain"))
    found = []
    for each in (folder, tmp_path / "plain"):
        parts = sections(wide(path=str(each)), lora(), quantization=NF4)
        found.append(build_model(parts, CPU, 0, "base"))
    ours, plain = (packed_bytes(model.network) for model in found)
    assert all(ours[name].equal(plain[name]) for name in plain)
    (remark,) = set(found[0].remarks()) - set(found[1].remarks())
    assert remark == "model: 0.1 MB of fp8 weights, dequantized while loading and quantized again to nf4"
    found[0](batch_of(documents_of((8, 5))))[0].backward()


def bitsandbytes_folder(folder: Path, **given: Any) -> Path:
    """A folder that transformers has packed and saved."""
    plain = folder / "plain"
    built("llama", "eager", **wide_numbers("llama")).save_pretrained(str(plain))
    config = transformers.BitsAndBytesConfig(llm_int8_skip_modules=["lm_head"], **given)
    by_transformers(plain, quantization_config=config).save_pretrained(str(folder / "packed"))
    return folder / "packed"


def test_weights_of_bitsandbytes_are_used_as_they_are(tmp_path: Path) -> None:
    nf4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    folder = bitsandbytes_folder(tmp_path, **nf4)
    found = []
    for each in (folder, tmp_path / "plain"):
        parts = sections(wide(path=str(each)), lora(), quantization=NF4)
        count_weights(parts)
        found.append(build_model(parts, CPU, 0, "base"))
    used, packed = (packed_bytes(model.network) for model in found)
    assert used.keys() == packed.keys()
    assert all(used[name].equal(packed[name]) for name in packed)
    assert "model: 0.0 MB of weights quantized by bitsandbytes, used unchanged" in found[0].remarks()
    batch = batch_of(documents_of((8, 5)))
    losses = [model(batch)[0] for model in found]
    losses[0].backward()
    assert losses[0].equal(losses[1])
    with pytest.raises(ConfigError, match=r"to nf4 by bitsandbytes\. Set recipe=qlora quantization=nf4 "):
        count_weights(sections(wide(path=str(folder)), lora()))


@pytest.mark.parametrize(
    ("given", "words"),
    [({"load_in_8bit": True}, "quantized with bitsandbytes in 8 bits"), ({"load_in_4bit": True}, "to fp4 by bitsandb")],
)
def test_other_weights_of_bitsandbytes_are_refused(given: dict[str, Any], words: str, tmp_path: Path) -> None:
    folder = bitsandbytes_folder(tmp_path, **given)
    parts = sections(wide(path=str(folder)), lora(), quantization=NF4)
    ways: list[Callable[[], object]] = [lambda: count_weights(parts), lambda: read(folder)]
    for way in ways:
        with pytest.raises(ConfigError, match=words):
            way()


def test_stack_is_read_with_no_tensor_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One expert a tensor, 4 experts, gate and up in one stack: 8 pieces at most; each tensor is read once."""
    built("qwen3_moe", "eager").save_pretrained(str(tmp_path))
    plain, alive, most, names = FolderReader._whole, list[weakref.ref[Tensor]](), [], list[str]()

    def whole(self: Any, place: Any) -> Tensor:
        tensor = plain(self, place)
        names.append(place.name)
        alive.append(weakref.ref(tensor))
        most.append(sum(each() is not None for each in alive))
        return tensor

    monkeypatch.setattr(FolderReader, "_whole", whole)
    read(tmp_path)
    assert sorted(names) == sorted(load_file(tmp_path / "model.safetensors"))
    assert max(most) == 8


_UNNAMED = "a method that its config.json does not name"
FORMATS: list[tuple[Any, str]] = [
    *(({"quant_method": name}, name) for name in ("nvfp4", "nonesuch")),
    *(({"quant_method": name}, f"{name} (None bits)") for name in ("gptq", "awq")),
    ({"quant_method": "compressed-tensors"}, "compressed-tensors (format None)"),
    ({"quant_method": "modelopt"}, "modelopt (quant_algo None)"),
    *((given, _UNNAMED) for given in ({}, 3, "fp8", {"quant_method": ["fp8"]})),
]


@pytest.mark.parametrize(("given", "words"), FORMATS)
def test_format_that_is_not_read_is_refused_before_any_weight(given: Any, words: str, tmp_path: Path) -> None:
    built("llama").config.save_pretrained(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"not read")
    known = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(known | {"quantization_config": given}))
    config = model_config(path=str(tmp_path))
    ways: list[Callable[[], object]] = [lambda: count_weights(sections(config, full())), lambda: read(tmp_path)]
    for way in ways:
        with pytest.raises(ConfigError) as refused:
            way()
        (message,) = refused.value.problems
        assert message == (
            f"model.path={tmp_path}: its weights are quantized with {words}, which is not supported. "
            "Set model.path to the unquantized model; recipe=qlora quantizes while loading."
        )


def without(part: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {name: each for name, each in tensors.items() if part not in name}


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("layers.1.mlp.experts", r"lack 2 of .* \(model\.layers\.1\.mlp\.experts\.down_proj, model\.layers\.1\.mlp\."),
        ("layers.1.mlp.experts.2.", r"model\.layers\.1\.mlp\.experts\..* becomes \(3, .*\), the model has \(4, "),
        ("layers.0.mlp.gate.", r"lack 1 of the model's tensors \(model\.layers\.0\.mlp\.gate\.weight\)"),
    ],
)
def test_parameter_that_no_tensor_makes_is_refused_by_name(part: str, words: str, tmp_path: Path) -> None:
    built("qwen3_moe", "eager").save_pretrained(str(tmp_path))
    changed(tmp_path, without(part))
    with pytest.raises(EnvironmentProblem, match=words):
        read(tmp_path)


def named(scale: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {n.replace("weight_scale_inv", scale): each for n, each in in_fp8(tensors).items()}


@pytest.mark.parametrize("scale", ["weight_scale_inv", "scale", "qscale_weight"])
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_fp8_weight_without_its_scale_is_refused_by_name(kind: str, scale: str, tmp_path: Path) -> None:
    folder = fp8_folder(kind, tmp_path, packed=named(scale))
    read(folder)
    place = "up_proj" if kind == "llama" else "experts.1.up_proj"
    changed(folder, without(f"layers.0.mlp.{place}.{scale}"))
    words = rf"lack 1 of .* \(the scale of model\.layers\.0\.mlp\.{place}\.weight\)"
    for way in (read, answering):
        with pytest.raises(EnvironmentProblem, match=words):
            way(folder)


def test_fp8_scales_under_the_names_of_another_format_are_not_ignored(tmp_path: Path) -> None:
    folder = fp8_folder("llama", tmp_path, packed=named("weight_scale"))
    for way in (read, answering):
        with pytest.raises(EnvironmentProblem, match=r"lack 14 of .* \(the scale of model\.layers\.0"):
            way(folder)


def test_mxfp4_blocks_without_their_scales_are_refused_by_name(tmp_path: Path) -> None:
    folder = changed(mxfp4_folder(tmp_path), without("layers.1.mlp.experts.down_proj_scales"))
    with pytest.raises(EnvironmentProblem, match=r"1\.mlp\.experts\.down_proj_blocks has no .*\.down_proj_scales"):
        read(folder)


def test_fp8_weights_of_a_config_without_their_format_are_refused(tmp_path: Path) -> None:
    folder = changed(fp8_folder("llama", tmp_path), dict, quantization_config=None)
    with pytest.raises(EnvironmentProblem, match="the scale of"):
        read(folder)


@pytest.mark.parametrize("differ", [False, True])
def test_tied_weights_that_are_stored_twice(differ: bool, tmp_path: Path) -> None:
    """As transformers has it, they are tied where they are equal."""
    built("llama", "eager", tie_word_embeddings=True).save_pretrained(str(tmp_path))
    changed(tmp_path, lambda known: known | {"lm_head.weight": known["model.embed_tokens.weight"] + int(differ)})
    ours = read(tmp_path)
    assert_same(ours, by_transformers(tmp_path))
    assert (ours.lm_head.weight is ours.model.embed_tokens.weight) != differ


def test_classifier_is_drawn_as_transformers_draws_it(tmp_path: Path) -> None:
    from app.base.base_model import drawing_by
    from app.config.schema import TaskConfig
    from app.config.tasks import task_of

    built("bert").save_pretrained(str(tmp_path))
    config = ModelConfig(path=str(tmp_path), weights="pretrained", architecture={})
    task = task_of(TaskConfig(kind="classification", labels=["a", "b", "c"]))
    ours = load_base(config, task, LoadOptions(torch.float32, CPU, register("sdpa")), 3)
    with drawing_by(3):
        theirs = read_weights(config, task, tmp_path, dtype=torch.float32)
    assert_same(ours, theirs)
