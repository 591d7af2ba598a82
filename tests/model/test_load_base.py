"""Bases filled with the tensors that transformers reads, or with random ones that depend on names alone."""

import json
import logging
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from app.base import base_model
from app.base.base_model import BaseModel, load_base, model_class, open_weights, read_weights
from app.base.base_weights import LoadOptions
from app.base.source import base_path
from app.base.tokenizer import load_tokenizer
from app.config.conf_files import CONF
from app.config.schema import QuantizationConfig
from app.errors import ConfigError, EnvironmentProblem
from app.finished.inference import load_tuned
from app.finished.save import save_model
from app.layers.attention import NAME, register
from app.layers.nf4 import install_forward
from app.layers.quantization import Bits4, other_linear_layers, quantizer_of
from app.model.build import count_weights
from tests.model.small import (
    ALL_KINDS,
    CAUSAL,
    KINDS,
    VOCABULARY,
    batch_of,
    build_model,
    built,
    config_of,
    documents_of,
    full,
    lora,
    model_config,
    numbers,
    sections,
    task_of,
    training_model_of,
    wide_numbers,
)
from tests.model.test_quantization import NF4, packed_bytes, wide

CPU = torch.device("cpu")
IDS = documents_of((10,))[0][None]
OURS = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "olmo2")


def saved(kind: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    built(kind, "eager", dtype, **wide_numbers(kind)).save_pretrained(str(folder), max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def load_weights(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
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
    ours, theirs = load_weights(folder, dtype), by_transformers(folder, dtype)
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

    outside = other_linear_layers(load_weights(folder, dtype))
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
    assert state(load_weights(folder)).keys() == state(load_weights(saved("llama", tmp_path / "plain"))).keys()


def test_a_file_that_is_missing_is_told_with_its_folder(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path)
    sorted(folder.glob("*.safetensors"))[1].unlink()
    with pytest.raises(EnvironmentProblem, match=r"cannot be loaded") as refusal:
        load_weights(folder)
    assert str(folder) in str(refusal.value)


def drawn(kind: str, seed: int = 0, four_bit: Any = None) -> Any:
    options = LoadOptions(torch.float32, CPU, "eager")
    config = model_config(kind) if four_bit is None else wide(kind)
    return base_model.load_base(config, task_of(kind), options, seed, four_bit)


@pytest.mark.parametrize("kind", [*ALL_KINDS, "deepseek_v3", "opt"])
def test_random_base_is_as_large_as_its_own_initialization_makes_it(kind: str) -> None:
    """Buffers are equal, tied weights tied; what a kind initializes by the role of a module is, too."""
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


def test_random_weights_that_only_a_constructor_initializes_are_its_own() -> None:
    lm = base_model.load_base(
        model_config("apertus"), CAUSAL, LoadOptions(torch.float32, CPU, register("sdpa")), seed=0
    )
    own = type(lm)(lm.config).state_dict()
    learnt = {name: each for name, each in lm.state_dict().items() if "alpha" in name}
    assert len(learnt) == 4
    assert all(torch.equal(each, own[name].float()) for name, each in learnt.items())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A local model, written by transformers itself."""
    place = tmp_path / "model"
    built("llama", "sdpa").save_pretrained(str(place))
    return place


def load(config: Any, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    return load_base(config, CAUSAL, LoadOptions(dtype, CPU, register("sdpa")), seed)


@pytest.mark.parametrize(
    ("model", "weights"), [("llama", 8_030_261_248), ("qwen", 8_190_735_360), ("mistral", 7_248_023_552)]
)
def test_the_numbers_in_conf_are_those_of_the_real_models(model: str, weights: int) -> None:
    given = OmegaConf.to_container(OmegaConf.load(CONF / "model" / f"{model}.yaml"))
    assert isinstance(given, dict)
    config = model_config(architecture=given["architecture"])
    assert count_weights(sections(config, full())).total == weights
    assert {p.device.type for p in BaseModel(config, CAUSAL).on_meta().parameters()} == {"meta"}


def test_wrong_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.architecture\.model_type=lama: .* Did you mean llama\?"):
        load(model_config(architecture=numbers("llama") | {"model_type": "lama"}))
    with pytest.raises(ConfigError, match=r"model\.architecture\.model_type=None"):
        load(model_config(architecture={"hidden_size": 8}))
    with pytest.raises(ConfigError, match=r"n_embd=8 and model\.architecture\.hidden_size=\d+ are the same setting"):
        load(model_config(architecture=numbers("gpt2") | {"hidden_size": 16, "n_embd": 8}))
    with pytest.raises(ConfigError, match=r"model\.architecture \(model_type: llama\)"):
        load(model_config(architecture=numbers("llama") | {"hidden_size": "wide"}))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "phi"])  # an own head, a tied one, one with a bias
def test_resized_vocabulary_has_the_mean_in_its_new_rows(kind: str, tmp_path: Path) -> None:
    built(kind, "eager").save_pretrained(str(tmp_path))
    ours = load(model_config(path=str(tmp_path), vocab_size=100))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    theirs.resize_token_embeddings(100)
    found, expected = ours.state_dict(), theirs.state_dict()
    assert ours.config.vocab_size == 100
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        torch.testing.assert_close(found[name], each, rtol=0, atol=2e-4)  # they draw closely around the mean
        assert found[name][:VOCABULARY].equal(each[:VOCABULARY])


@pytest.mark.parametrize("kind", KINDS)
def test_a_local_folder_gives_its_weights(kind: str, tmp_path: Path) -> None:
    source = built(kind, "sdpa" if kind not in {"gemma2", "gpt_oss"} else "eager")
    source.save_pretrained(str(tmp_path))
    lm = load(model_config(path=str(tmp_path)))
    expected = source.state_dict()
    assert {n: t.shape for n, t in lm.state_dict().items()} == {n: t.shape for n, t in expected.items()}
    assert all(torch.equal(t, expected[n]) for n, t in lm.state_dict().items())
    assert lm.config._attn_implementation == NAME


def test_the_plan_counts_the_folder_and_not_the_yaml(folder: Path) -> None:
    other = model_config(path=str(folder), architecture=numbers("llama", hidden_size=64))
    assert count_weights(sections(other, full())).total == sum(p.numel() for p in built("llama").parameters())


def only_pickles(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")


def shorten(name: str) -> Callable[[Path], None]:
    def cut(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])

    return cut


def change(key: str, value: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        file = folder / "config.json"
        content = json.loads(file.read_text()) | {key: value}
        file.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))

    return write


def without_head(folder: Path) -> None:
    file = folder / "model.safetensors"
    save_file({n: t for n, t in load_file(file).items() if n != "lm_head.weight"}, file, {"format": "pt"})


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "only pickles": (only_pickles, r"only pytorch_model\.bin, which can run code when loaded"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), r"no \*\.safetensors in .* \(none\)"),
    "no config": (lambda f: (f / "config.json").unlink(), r"has no config\.json"),
    "half a config": (shorten("config.json"), r"config\.json cannot be read as a model configuration"),
    "no kind": (change("model_type", None), r"cannot be read as a model configuration \(KeyError: 'model_type'\)"),
    "a number as kind": (change("model_type", 3), r"model_type in .* is 3, expected a name"),
    "an unknown kind": (change("model_type", "nonesuch"), r"not supported by this version of transformers"),
    "an impossible number": (change("hidden_size", "wide"), r"not supported by this version of transformers"),
    "half the weights": (shorten("model.safetensors"), r"cannot be loaded \(.*\)\. Download it again"),
    "other shapes": (change("hidden_size", 64), r"cannot be loaded \(.*\)\. Download it again"),
    "no head": (without_head, r"lack 1 of the model's tensors \(lm_head\.weight\)"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_folder_that_cannot_be_trained_gives_one_message(
    folder: Path, damage: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    do, words = DAMAGES[damage]
    do(folder)
    with pytest.raises(EnvironmentProblem, match=words) as refused:
        load(model_config(path=str(folder)))
    (message,) = refused.value.problems
    assert message.startswith(f"model.path={folder}: ")
    assert "\n" not in message
    assert "LOAD REPORT" not in caplog.text + capfd.readouterr().err, "a table of transformers"


@pytest.mark.parametrize("damage", ["no config", "an unknown kind", "an impossible number", "no weights"])
def test_a_dry_run_tells_what_it_can_of_it(folder: Path, damage: str) -> None:
    do, words = DAMAGES[damage]
    do(folder)
    with pytest.raises(EnvironmentProblem, match=words):
        count_weights(sections(model_config(path=str(folder)), full()))


@pytest.mark.parametrize("path", ["./nowhere", "/nowhere/at/all", "~/nowhere/at/all", "nowhere"])
def test_a_folder_that_is_not_there(path: str) -> None:
    with pytest.raises(EnvironmentProblem, match=rf"^model\.path={path}: no such folder\. Set a folder"):
        load(model_config(path=path))


def test_a_hub_model_without_a_network_says_all_that_helps() -> None:
    config = model_config(path="org/gated", revision="v2", licence_page="https://example.com/license")
    with pytest.raises(EnvironmentProblem) as refused:
        load(config)
    (message,) = refused.value.problems
    assert message.startswith("model.path=org/gated at revision v2 is not on this machine and could not be downloaded")
    for words in ("HF_TOKEN", "https://example.com/license", "model.path=DIR", "model.weights=random"):
        assert words in message
    with pytest.raises(EnvironmentProblem, match=r"license at https://huggingface\.co/org/open"):
        load(model_config(path="org/open"))


def test_a_hub_model_can_be_planned_without_a_network() -> None:
    assert count_weights(sections(model_config(path="org/gated"), full())).total == 19616


@pytest.fixture
def calls_out(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every attempt to reach another machine, with the libraries' offline switch off."""
    import huggingface_hub.constants

    made: list[str] = []

    def refuse(*args: Any, **_given: Any) -> Any:
        made.append(str(args))
        raise OSError("no network in this test")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    for name in ("getaddrinfo", "create_connection", "socket"):
        monkeypatch.setattr(socket, name, refuse)
    return made


@pytest.mark.parametrize("adapter", [full(), lora()], ids=["full", "lora"])
def test_nothing_is_asked_of_the_hub_when_all_is_local(
    folder: Path, tmp_path: Path, adapter: Any, calls_out: list[str]
) -> None:
    config = model_config(path=str(folder), tokenizer="asset:tiny")
    parts = sections(config, adapter)
    tokenizer = load_tokenizer(config, needs_template=True)
    count_weights(parts)
    training_model = build_model(parts, CPU, 0, base_path(config, tmp_path / "base"))
    training_model(batch_of(documents_of((5,))))[0].backward()
    save_model(training_model, tokenizer, tmp_path / "run" / "final")
    load_tuned(tmp_path / "run", config, CAUSAL, adapter=True)
    assert calls_out == []


def test_saving_an_adapter_asks_the_hub_nothing_about_its_base(tmp_path: Path, calls_out: list[str]) -> None:
    training_model = build_model(sections(model_config(), lora()), CPU, 0, "org/name")
    save_model(training_model, load_tokenizer(model_config(), needs_template=True), tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == "org/name"
    assert calls_out == []
    with pytest.raises(
        EnvironmentProblem, match=r"org/name is not on this machine and could not be downloaded \(no connection\)"
    ):
        load(model_config(path="org/name"))
    assert calls_out, "such calls are seen"


def test_the_path_in_an_adapter_is_one_that_others_can_use(folder: Path, tmp_path: Path) -> None:
    assert base_path(model_config(path=str(folder)), tmp_path) == str(folder)
    assert base_path(model_config(path="org/name"), tmp_path) == "org/name"
    assert base_path(model_config(), tmp_path / "base") == str(tmp_path / "base")


@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_weights_with_nan_are_refused_by_tensor_and_file(quantization: str, tmp_path: Path) -> None:
    lm = built("llama", "sdpa", **wide_numbers("llama"))
    lm.model.layers[1].mlp.up_proj.weight.data[3, 5] = float("nan")
    lm.save_pretrained(str(tmp_path))
    parts = sections(
        model_config(path=str(tmp_path)), lora(), quantization=QuantizationConfig(kind=quantization, double_quant=True)
    )
    words = r"cannot be loaded \(model\.layers\.1\.mlp\.up_proj\.weight in model\.safetensors has NaN"
    with pytest.raises(EnvironmentProblem, match=words):
        build_model(parts, CPU, 0, "base")


def answering(config: Any) -> Any:
    """As finetune generate reads any model."""
    return read_weights(config, CAUSAL, Path(config.path), dtype="auto")


@pytest.mark.parametrize("read", [load, answering])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda weight: weight.clamp(min=torch.nan), "has NaN, or numbers too large for torch.float32"),
        (lambda weight: weight.log2(), "has NaN, or numbers too large for torch.float32"),
        (lambda weight: weight.to(torch.int8), "has integers (torch.int8), but the model needs torch.float32"),
    ],
)
def test_weights_that_are_no_finite_floats_are_refused(folder: Path, read: Any, change: Any, words: str) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {name: change(tensors[name])}, file, {"format": "pt"})
    with pytest.raises(EnvironmentProblem, match=rf"{re.escape(name)}.* {re.escape(words)}"):
        read(model_config(path=str(folder)))


def test_integers_are_refused_before_they_are_quantized(tmp_path: Path) -> None:
    lm = built("llama", "sdpa", **wide_numbers("llama"))
    lm.save_pretrained(str(tmp_path))
    file, name = tmp_path / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    save_file({n: each.to(torch.int8) if n == name else each for n, each in load_file(file).items()}, file)
    parts = sections(
        model_config(path=str(tmp_path)), lora(), quantization=QuantizationConfig(kind="nf4", double_quant=True)
    )
    with pytest.raises(EnvironmentProblem, match=rf"{re.escape(name)} in .* has integers"):
        build_model(parts, CPU, 0, "base")


def test_index_beside_the_whole_weights_is_ignored_with_a_remark(folder: Path) -> None:
    """As transformers does, which PEFT and vLLM read by."""
    lm = built("llama", "sdpa")
    lm.model.norm.weight.data *= 2
    lm.save_pretrained(str(folder / "shards"), max_shard_size="30KB")
    for file in (folder / "shards").glob("model*"):
        file.rename(folder / file.name)
    config = model_config(path=str(folder))
    base = open_weights(config, CAUSAL, LoadOptions(torch.float32, CPU, register("sdpa")), 0)
    assert base.whole().model.norm.weight.equal(answering(config).model.norm.weight)
    remark = f"{folder}/model.safetensors.index.json is ignored, because model.safetensors is there too"
    assert base.remarks == (f"model: {remark}",)


def test_home_is_a_place(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    config = model_config(path="~/model")
    assert base_path(config, tmp_path) == str(folder)
    assert torch.equal(load(config).lm_head.weight, built("llama").lm_head.weight)


def test_transformers_says_nothing_while_a_model_is_built_and_run(
    folder: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    import transformers

    transformers.logging.set_verbosity_warning()
    logging.Logger.warning_once.cache_clear()  # type: ignore[attr-defined]  # or an earlier test has used them up
    build_model(sections(model_config(path=str(folder)), lora()), CPU, 0, "base")
    for kind in ("llama", "gpt2"):  # GPT-2 would ask for a mask
        training_model_of(kind, lora())(batch_of(documents_of((5, 3))))
    assert capfd.readouterr() == ("", "")
    assert [r.getMessage() for r in caplog.records] == []
