"""Every adapter method and method of PEFT: trains, resumes, loads in plain PEFT and merges, or is refused."""

import gc
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftType
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from app.adapters.adapters import quiet_peft
from app.adapters.merged_weights import read_updates
from app.config.adapters import ADAPTER_WEIGHTS, METHODS
from app.config.adapters import REFUSED as REFUSED_METHODS
from app.config.load import compose_run, read_run
from app.config.schema import AdapterConfig, ModelConfig, QuantizationConfig, RunConfig
from app.errors import AppError
from app.finished.save import merged_config, plan_merge, saved_tensors
from app.layers.attention import register
from app.train import train
from app.training.trainer import Trainer
from tests.harness.runs import SMALL, losses, metrics, result
from tests.model.small import batch_of, build_model, distance, documents_of, model_config, sections, wide_numbers

IDS = torch.arange(5, 45)[None]
PLANNED = 64 << 10  # bytes; of trained embeddings and their copies pieces are counted apart
Train = Callable[..., Path]


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The models of all runs of a test, as their loops ended with them."""
    found: list[Any] = []
    fit = Trainer.fit

    def kept(trainer: Trainer, request: Any) -> bool:
        found.append(trainer.parts.stepper.model)
        return fit(trainer, request)

    monkeypatch.setattr(Trainer, "fit", kept)
    yield found
    register("sdpa")
    gc.unfreeze()


def run(folder: Path, *given: str) -> Path:
    keys = {each.partition("=")[0] for each in given}
    small = [each for each in SMALL if each.partition("=")[0] not in keys]
    more = ("training.max_steps=4", "checkpoint.every=2", "model.architecture.initializer_range=0.1")
    train(compose_run([*small, *more, f"output_dir={folder}", *given]))
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "final" / "adapter_model.safetensors")


@torch.no_grad()
def logits(lm: Any) -> torch.Tensor:
    found: torch.Tensor = lm.eval()(input_ids=IDS).logits
    return found


def in_peft(folder: Path, **given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the base, and of the base with final/, as other programs load them."""
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(folder / "base", **given)
    for layer in base.modules():  # or CPUs with avx512_bf16 evaluate layers of bitsandbytes in bf16
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False
    with quiet_peft():
        return logits(base), logits(PeftModel.from_pretrained(base, str(folder / "final")))


def merged(folder: Path, target: Path) -> torch.Tensor:
    """Logits of the merged model, as transformers loads it."""
    final, parts = folder / "final", read_run(folder / "run.yaml")
    model = ModelConfig(path=str(folder / "base"), weights="pretrained", architecture={})
    target.mkdir()
    (target / "config.json").write_text(json.dumps(merged_config(folder / "base", "fp32")))
    updates = read_updates(final, AutoModelForCausalLM.from_pretrained(folder / "base"))
    built = sections(model, parts.adapter, quantization=parts.quantization)
    plan_merge(built, updates, "fp32", torch.device("cpu"), final).write(target, 1e9)
    return logits(AutoModelForCausalLM.from_pretrained(target))


LORA = {
    "plain": (),
    "rslora": ("adapter.rslora=true",),
    "patterns": ("adapter.rank_pattern={q_proj: 4}", "adapter.alpha_pattern={1.mlp.down_proj: 3.5}"),
    "layers": ("adapter.layers=[1]",),
    "whole": ("adapter.train_whole=[lm_head,embed_tokens]",),
    "norm": ("adapter.train_whole=[model.norm]",),
    "tied": ("adapter.train_whole=[embed_tokens]", "model.architecture.tie_word_embeddings=true"),
    "dora": ("adapter.dora=true", "adapter.rslora=true"),
    "gaussian": ("adapter.init=gaussian",),
    "orthogonal": ("adapter.init=orthogonal",),
    "pissa": ("adapter.init=pissa", "adapter.rslora=true", "adapter.rank_pattern={q_proj: 4}"),
    "pissa_niter": ("adapter.init=pissa_niter_4",),
    "olora": ("adapter.init=olora", "adapter.alpha_pattern={q_proj: 8}"),
    "eva": ("adapter.init=eva", "adapter.rank_pattern={q_proj: 4}"),
    "corda": ("adapter.init=corda", "adapter.rslora=true", "adapter.rank_pattern={q_proj: 4}"),
    "tokens": ("adapter.train_tokens=[5,7,30]",),
    "tied tokens": ("adapter.train_tokens=[5,7,30]", "model.architecture.tie_word_embeddings=true"),
    "all tokens": ("adapter.train_tokens=all",),
}


@pytest.mark.parametrize("name", LORA)
def test_lora_trains_loads_and_merges(tmp_path: Path, models: list[Any], name: str) -> None:
    whole = run(tmp_path / "whole", "recipe=lora", "optimizer.lr=1e-2", *LORA[name])
    assert losses(whole)[-1] < losses(whole)[0]
    counted = result(whole)
    assert abs(counted["memory_predicted_bytes"] - counted["memory_measured_bytes"]) <= PLANNED
    ours = logits(models[0].language_model)
    base, tuned = in_peft(whole)
    assert distance(ours, base) > 1e-2
    assert distance(tuned, ours) <= 5e-6
    assert distance(merged(whole, tmp_path / "merged"), ours) <= 5e-6


def test_loftq_is_of_the_ordinary_nf4_base(tmp_path: Path, models: list[Any]) -> None:
    words = ("recipe=qlora", "optimizer.lr=1e-2", "adapter.init=loftq")
    whole = run(tmp_path / "whole", *words, "training.stop_after=2")
    run(tmp_path / "whole", *words, "resume=auto")
    assert losses(whole)[-1] < losses(whole)[0]
    ours = logits(models[1].language_model)
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    _, tuned = in_peft(whole, quantization_config=nf4, device_map={"": "cpu"}, dtype="float32")
    assert distance(tuned, ours) <= 5e-6
    assert distance(merged(whole, tmp_path / "merged"), ours) <= 5e-6
    notes = (whole / "log.txt").read_text().count("adapter.init=loftq: corrects")
    assert notes == 1, "a resumed run computes nothing again"


def test_what_pissa_began_with_goes_along_to_another_folder(tmp_path: Path) -> None:
    words = ("recipe=lora", "adapter.init=pissa")
    whole = run(tmp_path / "whole", *words, "checkpoint.every=2")
    saved = min((whole / "checkpoints").iterdir())
    other = run(tmp_path / "other", *words, "checkpoint.every=2", f"resume={saved}")
    assert all(torch.equal(each, weights(other)[name]) for name, each in weights(whole).items())


REFUSED = {
    ("adapter.init=lora_ga",): r"adapter\.init=lora_ga needs gradients before the first step",
    ("adapter.init=loftq",): r"adapter\.init=loftq needs a 4-bit base",
    (
        "adapter.init=corda",
        "recipe=qlora",
    ): r"adapter\.init=corda needs unquantized base weights.* Set adapter\.init=eva or default",
    ("adapter.init=pisa",): r"adapter\.init=pisa is not one of default",
    ("adapter.init=pissa", "adapter.dora=true"): r"adapter\.init=pissa with adapter\.dora=true",
    ("adapter.init=orthogonal", "recipe=qlora"): r"adapter\.init=orthogonal needs unquantized base weights",
    ("adapter.dora=true", "quantization=int8"): r"adapter\.dora=true needs the base weights",
    ("adapter.experts=true", "adapter.dora=true"): r"adapter\.dora=true with adapter\.experts=true: stacked experts",
    ("adapter.experts=true", "adapter.init=pissa"): r"adapter\.init=pissa with adapter\.experts=true",
    ("adapter.layers=[9]",): r"adapter\.layers: no adapted layer has the number 9\. Use numbers from 0 to 1\.",
    ("adapter.rank_pattern={qproj: 4}",): r"adapter\.rank_pattern: qproj is not an adapted layer.*q_proj",
    ("adapter.rank_pattern={q_proj: 99}",): r"adapter\.rank_pattern\.q_proj=99: the adapted layers",
    ("adapter.rank_pattern={q_proj: x}",): r"adapter\.rank_pattern=\{q_proj: x\}: expected a whole number",
    ("adapter.train_whole=[lmhead]",): r"adapter\.train_whole: lmhead is not a module with weights in this model",
    ("adapter.train_whole=[mlp]",): r"adapter\.train_whole: mlp contains the adapted layer model\.layers\.0\.mlp",
    ("adapter.train_tokens=[99999]",): r"adapter\.train_tokens: unknown token ID 99999",
    ("adapter.train_tokens=some",): r"adapter\.train_tokens=some: expected a list like \[3, 17\], all or new",
}


@pytest.mark.parametrize("given", REFUSED, ids=" ".join)
def test_what_cannot_work_is_refused_in_a_sentence(tmp_path: Path, given: tuple[str, ...]) -> None:
    recipe = () if any(each.startswith("recipe=") for each in given) else ("recipe=lora",)
    with pytest.raises(AppError, match=REFUSED[given]):
        run(tmp_path / "run", *recipe, *given)


__all__ = ("models",)

# what the sizes of the small model need, and PEFT's defaults do not suit
FIELDS = {
    "C3A": {"block_size": 16},
    "ROAD": {"group_size": 16},
    "TINYLORA": {"u": 4},
    "VBLORA": {"num_vectors": 16, "vector_length": 16},
}
SHORT = ("training.max_steps=3", "eval.every=3", "eval.samples=0", "dataset.max_rows=40", "optimizer.lr=1e-2")
WIDER = "model.architecture.initializer_range=0.1"  # logits that one wrong weight moves


def short() -> list[str]:
    """Words of a short run."""
    keys = {each.partition("=")[0] for each in SHORT}
    return [*(each for each in SMALL if each.partition("=")[0] not in keys), *SHORT, WIDER, "recipe=lora"]


@cache
def settings() -> RunConfig:
    """Of such a run: composed once."""
    return compose_run([*short(), "adapter=peft", "output_dir=somewhere"])


def trained(folder: Path, method: str, targets: Sequence[str] = (), **given: Any) -> Path:
    """The folder of a run of three steps with a method, or more of it."""
    base = settings()
    adapter = replace(base.adapter, method=method.lower(), fields=FIELDS.get(method, {}), targets=list(targets))
    training = replace(base.training, stop_after=given.pop("stop_after", None))
    train(replace(base, output_dir=str(folder), adapter=adapter, training=training, **given))
    return folder


def test_every_method_of_peft_is_offered_or_refused() -> None:
    assert {each.value for each in PeftType} == METHODS.keys() | REFUSED_METHODS.keys()
    assert not METHODS.keys() & REFUSED_METHODS.keys()


@pytest.mark.parametrize("method", METHODS)
def test_method_trains_loads_and_merges(tmp_path: Path, models: list[Any], method: str) -> None:
    targets = () if METHODS[method].of_norms else ("q_proj", "v_proj", "down_proj")
    whole = trained(tmp_path / "whole", method, targets)
    counted = result(whole)
    assert abs(counted["memory_predicted_bytes"] - counted["memory_measured_bytes"]) <= 64 << 10
    ours = logits(models[0].language_model)
    assert len(saved_tensors(models[0])) == len(load_file(whole / "final" / ADAPTER_WEIGHTS))  # as FSDP writes it
    base, tuned = in_peft(whole)
    assert distance(ours, base) > 2e-3
    assert distance(tuned, ours) <= 5e-6
    if METHODS[method].merges:
        assert distance(merged(whole, tmp_path / "merged"), ours) <= 2e-5
    else:
        with pytest.raises(AppError, match=f"^kind=merged: {method} cannot be merged"):
            merged(whole, tmp_path / "merged")


@pytest.mark.parametrize("method", ["IA3", "LN_TUNING", "LOHA", "OFT", "VERA"])  # all 26 pass
def test_method_goes_on_from_its_end_and_resumes_to_the_same_bits(tmp_path: Path, method: str) -> None:
    """Method, fields and layers are those of the first run, untyped, on its base, with other drawn numbers."""
    targets = () if METHODS[method].of_norms else ("q_proj", "v_proj", "down_proj")
    first = trained(tmp_path / "first", method, targets)
    words = [each for each in short() if not each.startswith("model.")]
    words += ["adapter=peft", f"adapter.start={first}", f"model.path={first / 'base'}", "seed=3", "eval.at_start=true"]

    def goes_on(name: str, *more: str) -> Path:
        train(compose_run([*words, f"output_dir={tmp_path / name}", *more]))
        return tmp_path / name

    whole = goes_on("whole")
    assert metrics(whole)[0]["eval_loss"] == pytest.approx(result(first)["eval_loss"], rel=1e-6)
    assert read_run(whole / "run.yaml").adapter.method == method
    goes_on("parts", "training.stop_after=2")
    parts = goes_on("parts", "resume=auto")
    assert all(torch.equal(each, weights(parts)[name]) for name, each in weights(whole).items())


@pytest.mark.parametrize("method", METHODS)
def test_method_in_bf16_on_packed_base_where_it_can_gets_gradients(method: str) -> None:
    adapter = AdapterConfig(kind="peft", method=method, fields=FIELDS.get(method, {}))
    base = QuantizationConfig(kind="nf4" if METHODS[method].quantized else "none")
    parts = sections(model_config(architecture=wide_numbers("llama")), adapter, "bf16", quantization=base)
    model = build_model(parts, torch.device("cpu"), 0, "base")
    model(batch_of(documents_of((9, 4))))[0].backward()
    assert any(each.grad is not None and each.grad.any() for each in model.trained().values())
    assert {each.dtype for each in model.trained().values()} == {torch.float32}


WRONG = {
    ("adapter.method=lora",): r"^adapter\.method=lora is adapter=lora",
    ("adapter.method=loah",): r"^adapter\.method=loah is not a supported PEFT method\. Did you mean LOHA\?",
    ("adapter.method=P_TUNING",): r"^adapter\.method=P_TUNING trains vectors before the prompt.* Set adapter=lora\.$",
    ("adapter.method=hra", "quantization=nf4"): r"^adapter\.method=hra does not support quantization\.kind=nf4",
    ("adapter.method=oft", "quantization=int8"): r"Set quantization=none, or quantization=nf4\.$",
    ("adapter.method=vblora", "parallel=fsdp"): r"^adapter\.method=vblora has trained tensors that layers share",
    (
        "adapter.method=oft",
        "adapter.fields={bloc_size: 8}",
    ): r"^adapter\.fields: bloc_size is not a setting of OFT.*mean oft_bl",
    ("adapter.method=oft", "adapter.fields={eps: '(a+)+'}"): r"^adapter\.fields=\{eps: \(a\+\)\+\}: expected a number",
    ("adapter.method=c3a",): r"^adapter\.method=C3A: PEFT cannot adapt this model \(The block size should be",
    ("adapter.method=oft", "adapter.targets=[qproj]"): r"^adapter\.targets: qproj matches no linear layer",
    ("adapter.method=ln_tuning", "adapter.targets=[q_proj]"): r"^adapter\.targets: q_proj matches no norm",
    (
        "adapter.method=oft",
        "adapter.train_whole=[embed_tokens]",
        "model.architecture.tie_word_embeddings=true",
    ): r"^adapter\.train_whole: the embedding is tied to the head, but PEFT trains them separately with adapter\.met",
    ("adapter=lora", "adapter.fields.r=8"): r"^adapter\.fields\.r=8: adapter=lora ignores it",
    ("adapter.r=8",): r"^adapter\.r=8: adapter=peft ignores it",
    ("adapter.start=runs/other",): r"^adapter\.start=runs/other: no adapter_config\.json",
}


@pytest.mark.parametrize("given", WRONG, ids=" ".join)
def test_methods_of_peft_that_cannot_work_refused(tmp_path: Path, given: tuple[str, ...]) -> None:
    with pytest.raises(AppError, match=WRONG[given]):
        run(tmp_path / "run", "recipe=lora", *(() if "adapter=lora" in given else ("adapter=peft",)), *given)
