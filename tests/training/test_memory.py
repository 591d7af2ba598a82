"""Memory of the machine, memory kept from step to step, and memory of QLoRA with its defaults."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from app.config.load import compose_run
from app.config.schema import RunConfig
from app.data.collate import Padded
from app.data.loader import Loader, StepSplit
from app.data.prepare import Data
from app.distributed.process_group import Runtime, start
from app.errors import EnvironmentProblem
from app.layers.attention import select
from app.memory.estimate import machine_of
from app.model.build import build_training_model, choose_loss_head
from app.tasks.table import loss_of
from app.tracking.console import Console
from app.tracking.output_dir import RunFolder
from app.training import memory
from app.training.memory import Predicted, free_host_bytes
from app.training.run import train_in
from app.training.setup import stepper_of as setup_stepper_of
from app.training.storage_counter import kept_bytes
from app.training.train_step import Stepper
from tests.model.small import documents_of, packed
from tests.training.conftest import needs_for, sections_of, small_run, stepper_of
from tests.training.planners import planner


def test_free_host_bytes_is_the_least_of_machine_and_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "CGROUPS", tmp_path / "no limits")
    whole = free_host_bytes()
    assert 0 < whole < 1 << 45
    (tmp_path / "cgroup").mkdir()
    monkeypatch.setattr(memory, "CGROUPS", tmp_path / "cgroup")
    values = {"max": "1000000", "current": "900000", "stat": "anon 7\ninactive_file 50\nactive_file 25\n"}
    for name, value in values.items():
        (tmp_path / "cgroup" / f"memory.{name}").write_text(value)
    assert free_host_bytes() == 100_075
    assert torch.cuda.is_available() or machine_of(None).memory_bytes == 1_000_000
    (tmp_path / "cgroup" / "memory.max").write_text("max\n")
    assert free_host_bytes() > 100_075


def test_run_larger_than_the_machine_is_refused_before_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.training.run.free_host_bytes", lambda: 1_000_000)
    monkeypatch.setattr("app.training.setup.build_training_model", lambda *_: pytest.fail("weights were loaded"))
    run = replace(small_run("checkpoint.every=0"), output_dir=str(tmp_path / "run"))
    message = r"estimated peak 2(\.0)? MB \(backward\), but this machine has 1(\.0)? MB free"
    with RunFolder.claim(run.output_dir, None) as folder, pytest.raises(EnvironmentProblem, match=message):
        train_in(folder, run, Console(enabled=False), "", planner(predict=Predicted(2_000_000, "backward", {})))
    assert not (tmp_path / "run").exists()


BLOCK = 64  # weights that share a constant of NF4


def after_a_step(data: Data, runtime: Runtime, *overrides: str) -> Stepper:
    stepper = stepper_of(small_run(*overrides), runtime)
    stepper.run(Loader(data.train, Padded(4, pad_id=0), StepSplit(1), seed=0).batches(0), 1e-3)
    return stepper


def found_in(stepper: Stepper) -> dict[str, int]:
    return kept_bytes(stepper.model, stepper.optimizer)


@pytest.mark.parametrize("recipe", ["full", "lora"])
def test_in_fp32_with_adamw(data: Data, runtime: Runtime, recipe: str) -> None:
    stepper = after_a_step(data, runtime, f"recipe={recipe}")
    trained = list(stepper.model.trained().values())
    count = sum(weight.numel() for weight in trained)
    sizes = found_in(stepper)
    everything = sum(weight.numel() for weight in stepper.model.network.parameters())
    buffers = sum(buffer.nbytes for buffer in stepper.model.network.buffers())
    assert sizes["trained_weights"] == sizes["gradients"] == 4 * count
    assert sizes["frozen_weights"] == 4 * (everything - count) + buffers
    assert sizes["optimizer_states"] == 8 * count + 4 * len(trained), "two moments, and a number of steps each"
    assert sizes["quantization_constants"] == 0
    assert (everything == count) == (recipe == "full")


def test_packed_in_four_bits(data: Data, runtime: Runtime) -> None:
    stepper = after_a_step(data, runtime, "recipe=qlora", "optimizer=adamw")
    network = stepper.model.network
    packed = [weight for weight in network.parameters() if hasattr(weight, "quant_state")]
    count = 2 * sum(weight.numel() for weight in packed)  # two in a byte
    others = [w for w in network.parameters() if not w.requires_grad and not hasattr(w, "quant_state")]
    rest = [*others, *network.buffers()]
    sizes = found_in(stepper)
    assert count > 0
    assert sizes["frozen_weights"] == count // 2 + sum(tensor.nbytes for tensor in rest)
    doubled, each_table = count // BLOCK, 4 * (16 + 256)  # a byte a block, and the tables of both levels
    seconds = 4 * sum(-(-2 * weight.numel() // BLOCK // 256) + 1 for weight in packed)
    assert sizes["quantization_constants"] == pytest.approx(doubled + len(packed) * each_table + seconds, rel=0.05)


RECIPE = ("recipe=qlora", "model=llama", "model.weights=random", "precision=bf16", "launch.threads=1")
SMALL = (
    "model.architecture.vocab_size=512",
    "model.architecture.hidden_size=64",
    "model.architecture.intermediate_size=128",
    "model.architecture.num_hidden_layers=2",
    "model.architecture.num_attention_heads=4",
    "model.architecture.num_key_value_heads=2",
    "batching.tokens=64",
    "dataset.max_length=64",
)
CARD = 23e9  # what is left of 24 GB beside the context and the screen


def two_steps(run: RunConfig) -> Stepper:
    """Of a micro-batch as large as the recipe's, every token trained."""
    runtime = start(run.launch, run.precision.kind, run.seed)
    attention = select(run.attention, runtime.device, lambda: needs_for(run))
    model = build_training_model(sections_of(run, attention), loss_of(run), runtime.device, run.seed, "nowhere")
    if runtime.device.type == "cuda":
        assert torch.cuda.max_memory_allocated() < 9e9, "the unpacked base was there as a whole"
    half = run.batching.bin_tokens // 2
    batch = packed(documents_of((half, half)))
    choose_loss_head(model, batch.to(runtime.device))
    assert model.linear is not None
    stepper = setup_stepper_of(model, run, runtime, run.precision.kind)
    before = [p.detach().clone() for p in model.trained().values()]
    for _ in range(2):
        result = stepper.run([batch], 1e-3)
        assert torch.isfinite(result.loss_sum)
        assert not bool(result.skipped)
    pairs = zip(model.trained().values(), before, strict=True)
    assert all(not p.equal(old) for p, old in pairs)
    return stepper


def require_four_bits(stepper: Stepper, layers: int) -> None:
    from bitsandbytes.nn import Linear4bit

    linears: list[Any] = [m for m in stepper.model.network.modules() if isinstance(m, Linear4bit)]
    assert len(linears) == 7 * layers
    for layer in linears:
        assert layer.weight.dtype == torch.uint8
        assert layer.weight.numel() == layer.in_features * layer.out_features / 2
        assert layer.weight.quant_state.nested


def test_qlora_small_run_keeps_four_bits() -> None:
    run = compose_run([*RECIPE, *SMALL])
    assert (run.training.recompute, run.optimizer.kind) == ("auto", "paged_adamw_8bit")
    require_four_bits(two_steps(run), layers=2)
