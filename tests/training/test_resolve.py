"""What a run means: its steps, its precision and attention, and rows no longer than the model has positions for."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.base.base_model import BaseModel
from app.config.schema import PrecisionConfig, RunConfig, TrainingConfig
from app.config.tasks import task_of
from app.errors import ConfigError
from app.layers.attention import BACKENDS
from app.training.auto_settings import choose, choose_precision
from app.training.rows import plan_steps, within_positions
from tests.training.conftest import small_run


def training(epochs: float, max_steps: int | None = None) -> TrainingConfig:
    return TrainingConfig(epochs=epochs, max_steps=max_steps, clip=1.0, recompute=False, max_bad_steps=1)


@pytest.mark.parametrize(
    ("epochs", "max_steps", "per_epoch", "steps"),
    [(1, None, 10, 10), (0.1, None, 30, 3), (0.5, None, 5, 3), (3, 7, 10, 7), (1, 100, 10, 10), (0.001, None, 10, 1)],
)
def test_plan_steps_rounds_and_cuts(epochs: float, max_steps: int | None, per_epoch: int, steps: int) -> None:
    assert plan_steps(training(epochs, max_steps), per_epoch).steps == steps


@given(st.integers(1, 200), st.integers(1, 10_000))
def test_plan_steps_keeps_whole_epochs(epochs: int, per_epoch: int) -> None:
    plan = plan_steps(training(epochs), per_epoch)
    assert plan.steps == epochs * per_epoch
    assert plan.epoch(plan.steps) == epochs


def base_of(run: RunConfig) -> BaseModel:
    return BaseModel(run.model, task_of(run.task))


class Unbuilt(BaseModel):
    def on_meta(self, *_args: Any) -> Any:
        raise AssertionError("a model was built to choose what every model can have")


def chosen_without_model(precision: str, stored: dict[str, str]) -> str:
    run = small_run(f"precision={precision}", "attention=auto")
    return choose(run, Unbuilt(run.model, task_of(run.task)), stored).precision


@pytest.mark.skipif("num_gpus() > 0", reason="tells what a machine without a GPU says")
def test_tf32_without_hardware_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"precision=tf32 needs .* Choose precision=fp32"):
        chosen_without_model("tf32", {})


@pytest.mark.skipif("num_gpus() > 0", reason="tells what a machine without a GPU chooses")
@pytest.mark.parametrize(("flags", "expected"), [("fpu avx2", "fp32"), ("fpu avx512_bf16 amx_bf16", "bf16")])
def test_auto_precision_is_bf16_only_with_cpu_flags(flags: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda _self: f"processor : 0\nflags\t\t: {flags}\n")
    assert choose_precision(PrecisionConfig(kind="auto")) == expected


def test_stored_choices_replace_auto() -> None:
    kept = {"precision": "fp16", "attention": "sdpa"}
    assert chosen_without_model("auto", kept) == "fp16"
    assert chosen_without_model("fp32", kept) == "fp32"


def test_auto_attention_depends_on_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, backend in BACKENDS.items():
        monkeypatch.setitem(BACKENDS, name, replace(backend, requires=lambda _device: []))
    for overrides, expected in (((), "flash"), (("batching.packing=false",), "sdpa")):
        run = small_run("precision=bf16", "attention=auto", *overrides)
        chosen = choose(run, base_of(run), {})
        assert chosen.attention == expected
    kept = {"precision": "fp32", "attention": "varlen"}
    auto = small_run("precision=auto", "attention=auto")
    with pytest.raises(ConfigError, match="attention=varlen cannot do float32 arithmetic"):
        choose(auto, base_of(auto), kept)


@pytest.mark.parametrize(("compiled", "expected"), [("auto", "varlen"), ("blocks", "varlen"), ("none", "flash")])
def test_auto_attention_has_a_kernel_of_compiled_layers(
    compiled: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, backend in BACKENDS.items():
        kernel = None if name == "flash" else backend.compiled
        monkeypatch.setitem(BACKENDS, name, replace(backend, requires=lambda _device: [], compiled=kernel))
    run = small_run("precision=bf16", "attention=auto", f"compile={compiled}")
    assert choose(run, base_of(run), {}).attention == expected


@pytest.mark.parametrize("key", ["max_position_embeddings", "n_positions"])
def test_max_length_is_limited_to_positions(tmp_path: Path, key: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", key: 100}))
    (tmp_path / "model.safetensors").touch()
    run = small_run()
    run = replace(run, model=replace(run.model, path=str(tmp_path), weights="pretrained"))
    said: list[str] = []
    assert within_positions(run.dataset, base_of(run), said.append).max_length == 100
    assert said == [f"note    dataset.max_length=256 -> 100: model.path={tmp_path} reads 100 tokens at most"]
    assert run.dataset.max_length == 256, "what the caller has is left alone"


def test_max_length_above_the_attention_chunk_is_refused_if_typed(tmp_path: Path) -> None:
    numbers = {"model_type": "llama4_text", "attention_chunk_size": 16, "num_hidden_layers": 4}
    (tmp_path / "config.json").write_text(json.dumps(numbers))
    (tmp_path / "model.safetensors").touch()
    run, said = small_run(), list[str]()
    base = base_of(replace(run, model=replace(run.model, path=str(tmp_path), weights="pretrained")))
    limit = f"model.path={tmp_path} is trained on rows of one attention chunk, 16 tokens at most"
    with pytest.raises(ConfigError) as refusal:
        within_positions(replace(run.dataset, max_length=64), base, said.append)
    assert str(refusal.value) == f"dataset.max_length=64: {limit}. Set dataset.max_length=16."
    assert within_positions(replace(run.dataset, max_length=16), base, said.append).max_length == 16
    assert said == []
    assert within_positions(run.dataset, base, said.append).max_length == 16, "the default"
    assert said == [f"note    dataset.max_length=256 -> 16: {limit}"]


@pytest.mark.parametrize("told", [{"pad_token_id": 1}, {}])
def test_max_length_excludes_unused_positions_of_roberta(tmp_path: Path, told: dict[str, int]) -> None:
    """Its padding token is 1 whether or not config.json says so."""
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    numbers = {"model_type": "roberta", "max_position_embeddings": 100, "vocab_size": 300, **sizes, **told}
    (tmp_path / "config.json").write_text(json.dumps(numbers))
    (tmp_path / "model.safetensors").touch()
    run = small_run()
    encoder = replace(run.model, path=str(tmp_path), weights="pretrained")
    run = replace(run, model=encoder, task=replace(run.task, kind="masked", mask_share=0.15))
    for length, kept in ((97, 97), (98, 98), (99, 98), (100, 98), (256, 98)):
        longer = replace(run.dataset, max_length=length)
        assert within_positions(longer, base_of(run), lambda _note: None).max_length == kept


def test_max_length_within_positions_stays() -> None:
    run, said = small_run(), list[str]()
    assert within_positions(run.dataset, base_of(run), said.append) is run.dataset
    assert said == []
