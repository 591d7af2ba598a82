"""Values of `auto`: precision, attention, packing, tokens, compile."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.base.base_model import BaseModel
from app.config.schema import PrecisionConfig, RunConfig, TrainingConfig
from app.config.tasks import task_of
from app.distributed.process_group import HostGroup
from app.errors import ConfigError
from app.layers.attention import BACKENDS
from app.training.auto_settings import (
    AutoSettings,
    Choices,
    Savings,
    bin_sizes,
    choose,
    choose_precision,
    size_notes,
    step_tokens,
    suggested_bin,
    with_bins,
    with_packing,
)
from app.training.rows import plan_steps, within_positions
from tests.harness.composed import composed
from tests.training.conftest import small_run
from tests.training.planners import planner

CHOICES = Choices("fp32", "sdpa")
ALONE = HostGroup(0, 1)
PLANNER = planner()


def asked(*words: str) -> RunConfig:
    return composed("model.weights=random", "batching.tokens=auto", *words)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("batching.accumulation=1",), [256]),
        (("batching.accumulation=4",), [1024, 512, 256]),
        (("batching.accumulation=4", "dataset.max_length=100"), [1024, 512, 256, 128]),
        (("batching.accumulation=3", "dataset.max_length=64"), [768, 384, 192, 96]),
        (("model.suggest.tokens=90", "dataset.max_length=20"), [90, 45]),
    ],
)
def test_bin_sizes_divide_the_step_and_hold_a_row(words: tuple[str, ...], expected: list[int]) -> None:
    run = asked(*words)
    assert bin_sizes(run) == expected
    for tokens in expected:
        batching = with_bins(run, tokens).batching
        assert batching.bin_tokens * batching.accumulation == step_tokens(run)


def test_suggested_bin_divides_the_step() -> None:
    assert suggested_bin(asked("batching.accumulation=4", "dataset.max_length=64")) == 256
    assert suggested_bin(asked("batching.accumulation=3", "dataset.max_length=64")) == 192
    assert suggested_bin(asked("batching.accumulation=3", "dataset.max_length=250")) == 384


def auto_settings(planner: Any = PLANNER, host_group: HostGroup = ALONE, **stored: Any) -> AutoSettings:
    return AutoSettings(planner, CHOICES, stored, host_group, lambda _text: None)


def test_auto_bins_planned_stored_or_typed() -> None:
    run = asked("batching.accumulation=4")
    planned = auto_settings().with_bins(run).batching
    assert (planned.tokens, planned.accumulation) == (512, 2)
    batching = auto_settings(tokens="1024").with_bins(run).batching
    assert (batching.tokens, batching.accumulation) == (1024, 1)
    typed = composed("model.weights=random")
    assert auto_settings(tokens="512").with_bins(typed) == typed


@pytest.mark.parametrize(("stored", "layers"), [({}, 3), ({"recompute": "2"}, 2), ({"recompute": "True"}, True)])
def test_auto_recompute_planned_or_stored(stored: dict[str, Any], layers: int) -> None:
    run = composed("model.weights=random", "training.recompute=auto")
    settled = auto_settings(planner(recompute=(Savings(3, 0.4, 2048), "so")), **stored)
    assert settled.with_recompute(run, largest=lambda: None, layers=4).training.recompute == layers  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize(
    ("words", "stored", "expected"),
    [
        (("compile=blocks",), {}, 0.4),
        (("compile=blocks",), {"recompute": "0", "memory_budget": "0.3"}, 0.3),
        (("compile=blocks",), {"recompute": "0"}, 0.6),
        (("compile=blocks", "compile.memory_budget=0.5"), {"recompute": "0", "memory_budget": "0.3"}, 0.5),
        (("compile=blocks", "compile.backend=aot_eager"), {}, 0.6),
    ],
)
def test_auto_memory_budget_planned_stored_or_typed(
    words: tuple[str, ...], stored: dict[str, Any], expected: float
) -> None:
    run = composed("model.weights=random", "training.recompute=0", *words)
    settled = auto_settings(planner(recompute=(Savings(3, 0.4, 2048), "so")), **stored)
    planned = settled.with_recompute(run, largest=lambda: None, layers=4)  # type: ignore[arg-type,return-value]
    assert (planned.compile.memory_budget, planned.training.recompute) == (expected, 0)


@pytest.mark.parametrize(
    ("words", "stored", "expected"),
    [
        (("training.recompute=true",), {}, 2048),
        (("training.recompute=true",), {"recompute": "True"}, 0),
        (("training.recompute=auto",), {"recompute": "2", "tile": "64"}, 64),
        (("training.recompute=auto", "training.tile=32"), {}, 32),
        (("training.recompute=1",), {}, 0),
    ],
)
def test_auto_tile_planned_stored_or_typed(words: tuple[str, ...], stored: dict[str, Any], expected: int) -> None:
    run = composed("model.weights=random", *words)
    settled = auto_settings(planner(recompute=(Savings(3, 0.4, 2048), "so")), **stored)
    planned = settled.with_recompute(run, largest=lambda: None, layers=4)  # type: ignore[arg-type,return-value]
    assert planned.training.tile == expected


def test_auto_settings_of_a_model_that_cannot_be_planned_fall_back() -> None:
    def fails(*_: Any) -> Any:
        raise NotImplementedError("an operation")

    messages: list[str] = []
    auto = AutoSettings(planner(bin_tokens=fails), CHOICES, {}, ALONE, messages.append)
    assert auto.with_bins(asked()).batching.tokens == 256
    assert messages == ["batching.tokens=auto: 256 tokens; no estimate for this model (NotImplementedError)"]


def test_with_bins_that_do_not_divide_the_step_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"started with bins of 1024 tokens, and a step of 512"):
        with_bins(asked("batching.accumulation=2"), 1024)


@dataclass(frozen=True)
class Two(HostGroup):
    """The first of two processes; the other one has the same."""

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value, value]


def test_auto_parallel_planned_stored_or_typed() -> None:
    run, two = composed("model.weights=random"), Two(0, 2)
    planned = auto_settings(host_group=two).with_parallel(run)
    assert planned.parallel.kind == "fsdp"
    assert auto_settings(host_group=two, parallel="ddp").with_parallel(run).parallel.kind == "ddp"
    assert auto_settings().with_parallel(run) == run
    typed = composed("model.weights=random", "parallel=hsdp")
    assert auto_settings(host_group=two, parallel="ddp").with_parallel(typed) == typed
    begun_by_one = auto_settings(host_group=two, parallel="auto")
    assert begun_by_one.with_parallel(run).parallel.kind == "fsdp"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("model=llama",), None),
        (("model=tiny",), None),
        (
            ("model=bert", "dataset=text", "dataset.path=x.txt"),
            "vocab_size=30522 is 2 above a multiple of 8 (30,528 in tiles of 64: 0.02% more FLOPs)",
        ),
        (("model=bert", "task=classification", "dataset=labelled_text", "dataset.path=x.csv"), None),
        (("model=gpt2_xl",), "vocab_size=50257 is 1 above a multiple of 8 (50,304 in tiles of 64: 0.094% more FLOPs)"),
        (
            ("model=tiny", "batching.tokens=1000"),
            "is 40 above a multiple of 64 (1,024 in tiles of 64: 2.4% more FLOPs)",
        ),
        (("model=tiny", "batching.tokens=1000", "batching.packing=false"), None),
        (
            ("model=tiny", "model.architecture.hidden_size=204", "batching.tokens=260"),
            "hidden_size=204 is 4 above a multiple of 8 (256 in tiles of 64: 25% more FLOPs), "
            "batching.tokens=260 is 4 above a multiple of 8 (320 in tiles of 64: 23% more FLOPs)",
        ),
    ],
)
def test_sizes_that_miss_multiples_are_told(words: tuple[str, ...], expected: str | None) -> None:
    run = composed("model.weights=random", *words)
    notes = list(size_notes(run, BaseModel(run.model, task_of(run.task))))
    assert [note.endswith(expected) for note in notes] == [True] if expected else notes == []


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
    stored = {"precision": "fp16", "attention": "sdpa"}
    assert chosen_without_model("auto", stored) == "fp16"
    assert chosen_without_model("fp32", stored) == "fp32"


def test_auto_attention_depends_on_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, backend in BACKENDS.items():
        monkeypatch.setitem(BACKENDS, name, replace(backend, requires=lambda _device: []))
    for overrides, expected in (((), "flash"), (("batching.packing=false",), "sdpa")):
        run = small_run("precision=bf16", "attention=auto", *overrides)
        chosen = choose(run, base_of(run), {})
        assert chosen.attention == expected
    stored = {"precision": "fp32", "attention": "varlen"}
    auto = small_run("precision=auto", "attention=auto")
    with pytest.raises(ConfigError, match="attention=varlen does not support float32 arithmetic"):
        choose(auto, base_of(auto), stored)


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
    notes: list[str] = []
    assert within_positions(run.dataset, base_of(run), notes.append).max_length == 100
    assert notes == [f"note    dataset.max_length=256 -> 100: model.path={tmp_path} reads 100 tokens at most"]
    assert run.dataset.max_length == 256, "what the caller has is left alone"


def test_max_length_above_the_attention_chunk_is_refused_if_typed(tmp_path: Path) -> None:
    numbers = {"model_type": "llama4_text", "attention_chunk_size": 16, "num_hidden_layers": 4}
    (tmp_path / "config.json").write_text(json.dumps(numbers))
    (tmp_path / "model.safetensors").touch()
    run, notes = small_run(), list[str]()
    base = base_of(replace(run, model=replace(run.model, path=str(tmp_path), weights="pretrained")))
    limit = f"model.path={tmp_path} is trained on rows of one attention chunk, 16 tokens at most"
    with pytest.raises(ConfigError) as refusal:
        within_positions(replace(run.dataset, max_length=64), base, notes.append)
    assert str(refusal.value) == f"dataset.max_length=64: {limit}. Set dataset.max_length=16."
    assert within_positions(replace(run.dataset, max_length=16), base, notes.append).max_length == 16
    assert notes == []
    assert within_positions(run.dataset, base, notes.append).max_length == 16, "the default"
    assert notes == [f"note    dataset.max_length=256 -> 16: {limit}"]


@pytest.mark.parametrize("padding", [{"pad_token_id": 1}, {}])
def test_max_length_excludes_unused_positions_of_roberta(tmp_path: Path, padding: dict[str, int]) -> None:
    """Its padding token is 1 whether or not config.json says so."""
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    numbers = {"model_type": "roberta", "max_position_embeddings": 100, "vocab_size": 300, **sizes, **padding}
    (tmp_path / "config.json").write_text(json.dumps(numbers))
    (tmp_path / "model.safetensors").touch()
    run = small_run()
    encoder = replace(run.model, path=str(tmp_path), weights="pretrained")
    run = replace(run, model=encoder, task=replace(run.task, kind="masked", mask_share=0.15))
    for length, limit in ((97, 97), (98, 98), (99, 98), (100, 98), (256, 98)):
        longer = replace(run.dataset, max_length=length)
        assert within_positions(longer, base_of(run), lambda _note: None).max_length == limit


def test_max_length_within_positions_stays() -> None:
    run, notes = small_run(), list[str]()
    assert within_positions(run.dataset, base_of(run), notes.append) is run.dataset
    assert notes == []


SIZES: dict[str, dict[str, Any]] = {
    "nemotron": {"num_key_value_heads": 2},  # mixes documents of a row
    "bloom": {},  # does not call the interface
}


def run_of(kind: str, *overrides: str) -> RunConfig:
    run = small_run("attention=auto", *overrides)
    return replace(run, model=replace(run.model, architecture={"model_type": kind, **SIZES.get(kind, {})}))


def settled(run: RunConfig) -> tuple[RunConfig, list[str]]:
    notes: list[str] = []
    return with_packing(run, base_of(run), notes.append), notes


def test_packing_auto_is_true_for_a_proven_kind_and_says_nothing() -> None:
    run, notes = settled(run_of("llama"))
    assert (run.batching.packing, notes) == (True, [])


@pytest.mark.parametrize(("kind", "attention"), [("nemotron", "sdpa"), ("bloom", "own")])
def test_packing_auto_pads_other_kinds_aloud(kind: str, attention: str) -> None:
    run, notes = settled(run_of(kind))
    assert run.batching.packing is False
    assert len(notes) == 1
    assert notes[0].startswith(f"note    batching: padded rows, because {kind} models do not separate documents")
    assert choose(run, base_of(run), {}).attention == attention


def test_packing_auto_goes_with_the_attention_that_is_typed() -> None:
    run, notes = settled(run_of("llama", "attention=own"))
    assert (run.batching.packing, len(notes)) == (False, 1)


@pytest.mark.parametrize(
    ("kind", "overrides", "message"),
    [
        (
            "nemotron",
            ("batching.packing=true",),
            r"^batching.packing=true is not supported for nemotron models .* batching\.packing=auto\.$",
        ),
        ("bloom", ("attention=sdpa",), r"^attention=sdpa is not supported for bloom models, .* Set attention=auto\.$"),
        (
            "nemotron",
            ("batching.tokens=auto",),
            r"padded rows have no bins.* nemotron models do not separate documents",
        ),
    ],
)
def test_packing_of_padded_kinds_is_refused_with_the_key(kind: str, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settled(run_of(kind, *overrides))


def test_packing_typed_as_false_stays() -> None:
    assert settled(run_of("llama", "batching.packing=false"))[0].batching.packing is False
