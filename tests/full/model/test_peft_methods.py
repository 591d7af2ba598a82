"""Every method of PEFT: it trains, loads in plain PEFT with the same logits and merges; or a sentence refuses it."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftType
from safetensors.torch import load_file

from app.config.adapters import ADAPTER_WEIGHTS, METHODS, REFUSED
from app.config.load import compose_run, read_run
from app.config.schema import AdapterConfig, QuantizationConfig, RunConfig
from app.errors import AppError
from app.finished.save import saved_tensors
from app.train import train
from tests.full.model.test_adapter_methods import in_peft, logits, merged, models, run, weights
from tests.harness.runs import SMALL, metrics, result
from tests.model.small import batch_of, build_model, distance, documents_of, model_config, sections, wide_numbers

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
    assert {each.value for each in PeftType} == METHODS.keys() | REFUSED.keys()
    assert not METHODS.keys() & REFUSED.keys()


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
    ("adapter.method=loah",): r"^adapter\.method=loah is no method of PEFT that is offered\. Did you mean LOHA\?",
    ("adapter.method=P_TUNING",): r"^adapter\.method=P_TUNING trains vectors before the prompt.* Set adapter=lora\.$",
    (
        "adapter.method=hra",
        "quantization=nf4",
    ): r"^adapter\.method=hra cannot read a base packed by quantization\.kind=nf4",
    ("adapter.method=oft", "quantization=int8"): r"Set quantization=none, or quantization=nf4\.$",
    ("adapter.method=vblora", "parallel=fsdp"): r"^adapter\.method=vblora has trained tensors that layers share",
    (
        "adapter.method=oft",
        "adapter.fields={bloc_size: 8}",
    ): r"^adapter\.fields: bloc_size is no setting of OFT.*mean oft_bl",
    (
        "adapter.method=oft",
        "adapter.fields={eps: '(a+)+'}",
    ): r"^adapter\.fields=\{eps: \(a\+\)\+\}: a setting is a number",
    ("adapter.method=c3a",): r"^adapter\.method=C3A: PEFT cannot adapt this model so \(The block size should be",
    ("adapter.method=oft", "adapter.targets=[qproj]"): r"^adapter\.targets: qproj matches no linear layer",
    ("adapter.method=ln_tuning", "adapter.targets=[q_proj]"): r"^adapter\.targets: q_proj matches no norm",
    (
        "adapter.method=oft",
        "adapter.train_whole=[embed_tokens]",
        "model.architecture.tie_word_embeddings=true",
    ): r"^adapter\.train_whole: the embedding is tied to the head, and with adapter\.method=OFT PEFT trains them apart",
    ("adapter=lora", "adapter.fields.r=8"): r"^adapter\.fields\.r=8: adapter=lora does not read it",
    ("adapter.r=8",): r"^adapter\.r=8: adapter=peft does not read it",
    ("adapter.start=runs/other",): r"^adapter\.start=runs/other: there is no adapter_config\.json",
}


@pytest.mark.parametrize("given", WRONG, ids=" ".join)
def test_what_cannot_work_is_refused_in_a_sentence(tmp_path: Path, given: tuple[str, ...]) -> None:
    with pytest.raises(AppError, match=WRONG[given]):
        run(tmp_path / "run", "recipe=lora", *(() if "adapter=lora" in given else ("adapter=peft",)), *given)
