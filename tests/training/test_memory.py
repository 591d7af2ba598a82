"""Memory of other processes, of what stays from step to step, and of QLoRA with its defaults."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
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
from app.training.memory import Predicted, Taken, device_used_bytes, free_host_bytes, notes, taken_by_others
from app.training.run import train_in
from app.training.setup import stepper_of as setup_stepper_of
from app.training.storage_counter import kept_bytes
from app.training.train_step import Stepper
from tests.model.small import documents_of, packed
from tests.training.conftest import needs_for, sections_of, small_run, stepper_of
from tests.training.planners import planner

UUID = "01234567-89ab-cdef-0123-456789abcdef"


class NVMLError(Exception):
    pass


def driver() -> Any:
    """It knows one GPU, with a process of another, one whose memory it may not tell, and this one."""

    def handle(uuid: str) -> str:
        if uuid != f"GPU-{UUID}":
            raise NVMLError
        return uuid

    def unknown(*_: Any) -> None:
        raise NVMLError

    processes = [(1234, 22_000_000_000), (os.getpid(), 600_000_000), (77, None)]
    return SimpleNamespace(
        NVMLError=NVMLError,
        NVML_CLOCK_SM=1,
        NVML_CLOCK_MEM=2,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByUUID=handle,
        nvmlDeviceGetMemoryInfo=lambda _gpu: SimpleNamespace(total=80_000_000_000, used=23_000_000_000),
        nvmlDeviceGetComputeRunningProcesses=lambda _gpu: [
            SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in processes
        ],
        nvmlDeviceGetClockInfo=lambda _gpu, clock: {1: 1665, 2: 9501}[clock],
        nvmlDeviceGetMaxClockInfo=unknown,
        nvmlDeviceGetEnforcedPowerLimit=lambda _gpu: 350_000,
    )


def test_driver_names_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", driver())
    taken = memory.taken_by_driver(UUID)
    assert taken == Taken(80_000_000_000, 22_400_000_000, ((77, None), (1234, 22_000_000_000)))
    assert taken.words == "other processes use 22.4 of 80.0 GB of GPU memory (pid 77, pid 1234: 22.0 GB)"
    assert memory.taken_by_driver("another") is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert memory.taken_by_driver(UUID) is None


def test_clocks_are_what_the_driver_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch.cuda.is_available() or memory.clocks() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(uuid=UUID))
    monkeypatch.setitem(sys.modules, "pynvml", driver())
    assert memory.clocks() == {"sm_mhz": 1665, "memory_mhz": 9501, "power_limit_watts": 350}
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert memory.clocks() is None


def test_memory_of_the_device_is_asked_of_cuda_where_the_driver_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch.cuda.is_available() or device_used_bytes() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(uuid=UUID))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (60, 80))
    monkeypatch.setattr(torch.cuda, "device_memory_used", lambda _device: 620)
    assert device_used_bytes() == 620
    monkeypatch.setattr(torch.cuda, "device_memory_used", lambda _device: driver().nvmlDeviceGetMaxClockInfo())
    assert device_used_bytes() == 20


@pytest.mark.parametrize(
    ("running", "reserved", "expected"),
    [
        ([], 0, 620),
        ([7], 0, None),
        ([os.getpid()], 20, 620),
        ([7], 20, 620),  # this process, by the pid that it has outside of its container
        ([7, 8], 20, None),
        ([7, os.getpid()], 20, None),
    ],
)
def test_device_used_bytes_beside_other_processes_is_none(
    running: list[int], reserved: int, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = driver()
    nvml.nvmlDeviceGetComputeRunningProcesses = lambda _gpu: [SimpleNamespace(pid=pid) for pid in running]
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    for name, value in (
        ("is_available", True),
        ("get_device_properties", SimpleNamespace(uuid=UUID)),
        ("memory_reserved", reserved),
        ("device_memory_used", 620),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    assert device_used_bytes() == expected


def test_memory_plan_counts_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(total_memory=80 << 30, major=8, minor=0)
    for name, value in (("is_available", True), ("get_device_name", "Some GPU"), ("get_device_properties", properties)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    full = Taken(80 << 30, 23 << 30, ((5, 22 << 30),))
    for module in ("app.training.memory", "app.memory.estimate"):
        monkeypatch.setattr(f"{module}.taken_by_others", lambda: full)
    assert machine_of(None).memory_bytes == 57 << 30
    assert machine_of(None).label == "Some GPU, 24.7 GB of it used by other processes"
    reserved = Taken(81 << 30, 1 << 30)  # by the driver, beyond what torch counts
    monkeypatch.setattr("app.memory.estimate.taken_by_others", lambda: reserved)
    assert machine_of(None).memory_bytes == 80 << 30
    assert notes() == [full.words]
    monkeypatch.setattr(memory, "taken_by_others", lambda: Taken(80 << 30, 100 << 20))
    assert notes() == [], "a screen is nothing to speak of"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_gpu_nothing_is_in_use() -> None:
    taken_by_others.cache_clear()
    assert taken_by_others() is None


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
