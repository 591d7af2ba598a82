"""Extrapolated plans against traces of all layers, and needed memory against that of a machine."""

import os
from dataclasses import replace

import pytest
import torch

from app.memory.check import check_memory
from app.memory.estimate import (
    ASSUMED_CONTEXT_BYTES,
    MemoryPlan,
    check_fit,
    hardware_named,
    machine_of,
    plan_memory,
    planned_choices,
    time_bound,
)
from app.memory.fake_tensors import MetaModel, workspace_bytes
from app.memory.planner import Planner
from app.memory.trace import worst_case
from app.training.auto_settings import Choices, sections_of
from tests.harness.composed import composed
from tests.memory.facts import GPU, MIB, gpu, plan
from tests.memory.truth import ONE_LAYER, PACKED, small_run

NEAR = 4096  # bytes: the stack of gradient norms is rounded up


def extrapolated_and_exact(*overrides: str) -> tuple[MemoryPlan, MemoryPlan]:
    run = small_run("model.architecture.num_hidden_layers=9", *overrides)
    shape = replace(PACKED, micro_batches=run.batching.accumulation)
    return plan_memory(run, shape), plan_memory(run, shape, exact=True)


def test_extrapolated_plan_equals_trace_of_all_layers() -> None:
    """Other recipes in tests/full/memory/test_estimate.py."""
    check_extrapolated("recipe=full", "training.recompute=5", "training.offload=true", "precision=bf16")


def test_extrapolated_plan_with_tiles_equals_trace_of_all_layers() -> None:
    check_extrapolated("recipe=lora", "training.recompute=5", "training.tile=64")


def check_extrapolated(*words: str) -> None:
    guess, whole = extrapolated_and_exact(*words)
    assert (whole.exact, guess.exact) == (True, False)
    assert whole.traced_layers == 9 > guess.traced_layers
    assert (guess.peak_where, guess.peak_bytes) == (whole.peak_where, whole.peak_bytes)
    assert guess.anatomy == whole.anatomy
    assert (guess.flops, guess.flops_per_token) == (whole.flops, whole.flops_per_token)
    assert (guess.kept_bytes, guess.host_bytes) == (whole.kept_bytes, whole.host_bytes)
    assert guess.offloaded_bytes == whole.offloaded_bytes
    assert max(abs(size - whole.phases[phase]) for phase, size in guess.phases.items()) <= NEAR


def test_largest_parts_of_recomputed_layers_are_their_inputs_and_all_gradients() -> None:
    """Neither is there at the peak, which is in the backward pass of one layer or in the head."""
    run = small_run("recipe=full", "training.recompute=true")
    plan = plan_memory(run, PACKED, exact=True)
    inputs = 4 * PACKED.width * 128 * run.model.architecture["num_hidden_layers"]
    assert plan.largest["gradients"] == pytest.approx(plan.largest["trained_weights"], rel=0.01)
    assert plan.largest["gradients"] > plan.anatomy["gradients"]
    assert plan.largest["saved_activations"] >= inputs
    assert all(plan.largest[kind] >= size for kind, size in plan.anatomy.items())


def test_plan_of_unequal_layers_traces_all_or_some_periods() -> None:
    """Layers differ by sliding windows, which need a mask on a CPU, or by targets that name a layer by number."""
    gemma = ("recipe=full", "model.architecture.model_type=gemma3_text", "+model.architecture.sliding_window=16")
    words = (*gemma, "+model.architecture.sliding_window_pattern=2")
    plan = plan_memory(small_run(*words), PACKED, "cpu", steps_only=True)
    assert (plan.traced_layers, plan.exact) == (3, True)
    run = small_run(*words, "model.architecture.num_hidden_layers=7")
    plan, whole = (plan_memory(run, PACKED, "cpu", exact=exact) for exact in (False, True))
    assert (plan.traced_layers, plan.exact) == (5, False)
    assert (plan.peak_where, plan.anatomy, plan.flops) == (whole.peak_where, whole.anatomy, whole.flops)
    assert max(abs(size - whole.phases[phase]) for phase, size in plan.phases.items()) <= NEAR
    one_layer = "adapter.targets=[layers.2.mlp.up_proj]"
    for chosen, is_equal in ((("recipe=lora",), True), (("recipe=full",), True), (("recipe=lora", one_layer), False)):
        run = composed("model.weights=random", "attention=sdpa", *chosen)
        meta_model = MetaModel(sections_of(run, planned_choices(run, "cpu")), "sdpa")
        assert meta_model.has_equal_layers == is_equal


def test_plan_with_offload_moves_layer_inputs_to_host() -> None:
    words = ("recipe=lora", "training.recompute=true", "precision=bf16")
    on_gpu, offloaded = (
        plan_memory(small_run(*words, *more), PACKED, steps_only=True) for more in ((), ("training.offload=true",))
    )
    layer = PACKED.tokens * 128 * 2  # the input of one
    assert offloaded.offloaded_bytes == 2 * layer  # all but the last, which backward needs first
    # the input of the first layer lives until the end of the forward pass
    assert on_gpu.phases["forward"] - offloaded.phases["forward"] == layer
    assert on_gpu.flops == offloaded.flops


def test_plan_with_paged_optimizer_counts_large_states_on_host() -> None:
    """States of 100,000 numbers or more are paged."""
    large = ("recipe=full", "model.architecture.vocab_size=4096", ONE_LAYER)
    paged, device = (
        plan_memory(small_run(*large, f"optimizer={kind}"), PACKED, steps_only=True)
        for kind in ("paged_adamw_8bit", "adamw_8bit")
    )
    assert paged.host_bytes == 2 * 2 * 4096 * 128  # 2 bytes per weight of embedding and head
    assert device.kept_bytes - paged.kept_bytes == paged.host_bytes
    assert device.host_bytes == 0


def test_plan_of_present_gpu_has_cublas_workspaces_in_every_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    run, choices = small_run("recipe=lora", ONE_LAYER), Choices("bf16", "varlen")
    without = plan_memory(run, PACKED, choices=choices)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    found = plan_memory(run, PACKED, choices=choices)
    assert found.phases == {phase: peak + 64 * MIB for phase, peak in without.phases.items()}
    assert found.peak_bytes == found.phases[found.peak_where] == sum(found.anatomy.values())
    assert found.largest["workspaces"] == 64 * MIB
    assert plan_memory(run, PACKED, "cpu").largest["workspaces"] == 0


def test_planner_counts_workspaces_of_its_machine() -> None:
    run = small_run("recipe=lora", "precision=bf16", "compile=none", ONE_LAYER)
    plan = Planner(replace(GPU, workspace_bytes=MIB)).of_batch(run, PACKED).plan
    assert plan.anatomy["workspaces"] == MIB
    assert plan.peak_bytes == plan.phases[plan.peak_where] == sum(plan.anatomy.values())


CPU = replace(GPU, device="cpu")  # without a caching allocator


def test_verdict_fits_up_to_the_last_byte() -> None:
    """Needed memory is peak, fragmentation (2.5 %), context (50 MiB) and margin (3 % of 1,000 MiB)."""
    given = plan(frozen_weights=(1000 - 50 - 30) / 1.025)
    full = check_fit(given, GPU)
    assert (full.needed_bytes, full.reserved_bytes, full.fits) == (1000 * MIB, 920 * MIB, True)
    assert not check_fit(replace(given, peak_bytes=given.peak_bytes + 1), GPU).fits


def test_verdict_is_hopeless_if_kept_bytes_do_not_fit() -> None:
    available = 1000 - 50 - 30
    for persistent, is_hopeless in ((available, False), (available + 1, True)):
        verdict = check_fit(plan(frozen_weights=2000, kept_bytes=persistent * MIB), CPU)
        assert (verdict.fits, verdict.is_hopeless) == (False, is_hopeless)


@pytest.mark.parametrize(("expandable", "share"), [(True, 0.025), (False, 0.12)])
def test_fragmentation_on_gpu_is_share_of_peak(expandable: bool, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.memory.estimate.has_expandable_segments", lambda: expandable)
    given = plan(frozen_weights=100)
    assert check_fit(given, GPU).lost_bytes == round(share * 100 * MIB)
    assert check_fit(given, replace(GPU, device="cpu")).lost_bytes == 0


def test_time_bound_is_flops_at_peak_rate() -> None:
    shape = worst_case(composed("batching.tokens=512", "batching.accumulation=4"))
    assert time_bound(plan(flops=2e12), shape, GPU, "bf16") == {"step_seconds": 2.0, "tokens_per_second": 1024.0}
    with_fp8 = replace(GPU, fp8_flops_per_second=2e12)
    bound = time_bound(plan(flops=2e12, fp8_flops=1.5e12), shape, with_fp8, "bf16")
    assert bound is not None
    assert bound["step_seconds"] == pytest.approx(1.25)
    assert time_bound(plan(), shape, replace(GPU, flops_per_second=None), "bf16") is None
    assert time_bound(plan(), shape, GPU, "fp32") is None  # the rate is unknown


def test_time_bound_of_mixed_precision_is_higher() -> None:
    words = ("model=bert_large", "recipe=full", "dataset=text", "dataset.path=x", "compile=none")
    rates = {}
    for precision in ("bf16", "tf32", "fp32"):
        run = composed(*words, f"precision={precision}")
        bound = check_memory(run, (), gpu("a100"))["bound"]
        rates[precision] = bound["tokens_per_second"]
    assert rates["bf16"] == pytest.approx(2 * rates["tf32"]) == pytest.approx(16 * rates["fp32"])
    assert check_memory(run, (), gpu("a100", fp32_tflops=None))["bound"] is None


def test_worst_case_is_largest_micro_batch_of_settings() -> None:
    packed = worst_case(composed("batching.tokens=600", "dataset.max_length=256"))
    assert (packed.rows, packed.width, packed.documents) == (1, 600, (256, 256, 88))
    assert (packed.label_rows, packed.longest, packed.tokens) == (600, 256, 600)
    padded = worst_case(
        composed("batching.packing=false", "batching.rows=3", "dataset.max_length=250", "batching.accumulation=5")
    )
    assert (padded.rows, padded.width, padded.documents) == (3, 256, ())
    assert (padded.label_rows, padded.micro_batches) == (750, 5)
    words = ["model=bert", "dataset=text", "dataset.path=x", "batching.tokens=1024", "task.mask_share=0.25"]
    encoder = worst_case(composed(*words))
    assert (encoder.documents, encoder.label_rows) == ((512, 512), 258)
    padded_encoder = worst_case(composed(*words, "batching.packing=false", "batching.rows=2", "dataset.max_length=60"))
    assert (padded_encoder.width, padded_encoder.documents) == (64, (60, 4, 60, 4))


@pytest.mark.parametrize(
    ("words", "documents", "places", "labels"),
    [
        (("model=bert", "batching.packing=false", "batching.rows=2", "dataset.max_length=60"), (60, 4, 60, 4), 4, 2),
        (("model=bert", "batching.packing=false", "batching.rows=16"), (512,) * 16, 32, 16),
        (("model=bert", "batching.tokens=1000"), (512, 488), 2, 2),
        (("model=tiny", "batching.packing=false", "batching.rows=2"), (), 0, 2),
    ],
)
@pytest.mark.parametrize("is_pair", [True, False])
def test_worst_case_of_classifier_is_that_of_the_collator(
    words: tuple[str, ...], documents: tuple[int, ...], places: int, labels: int, is_pair: bool
) -> None:
    rows = f"dataset={'text_pair' if is_pair else 'labelled_text'}"
    found = worst_case(composed("task=classification", rows, "dataset.path=x", *words))
    assert (found.documents, found.places, found.label_rows, found.pairs) == (documents, places, labels, is_pair)


NAMES = {
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 PCIe": None,  # slower than the SXM card of the table
    "NVIDIA GeForce RTX 4090": "rtx4090",
    "NVIDIA GeForce RTX 4090 Laptop GPU": None,
    "NVIDIA L40S": "l40s",
    "NVIDIA L40": "l40",
    "NVIDIA A10": "a10",
    "NVIDIA A100-SXM4-40GB": "a100_40",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA A100 80GB PCIe": "a100",
    "AMD Instinct MI300X": "mi300x",
    "Tesla T4": "t4",
    "NVIDIA GB10": "dgx_spark",
    "Tesla V100-SXM2-16GB": None,
}


@pytest.mark.parametrize("name", NAMES)
def test_hardware_named_matches_driver_name(name: str) -> None:
    known = hardware_named(name)
    assert (known and known.name) == NAMES[name]


def test_machine_of_hardware_has_bytes_and_rates() -> None:
    machine = machine_of(gpu("h100", memory_gib=2, context_gib=0.5))
    assert (machine.memory_bytes, machine.context_bytes, machine.context_is_measured) == (2**31, 2**29, True)
    assert (machine.flops_per_second, machine.bytes_per_second, machine.device) == (989e12, 3.35e12, "gpu")
    assert [machine.rate(kind) for kind in ("auto", "fp16", "tf32", "fp32")] == [989e12, 989e12, 495e12, 67e12]
    unmeasured = machine_of(gpu("b200"))
    assert (unmeasured.context_bytes, unmeasured.context_is_measured) == (ASSUMED_CONTEXT_BYTES, False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is present")
def test_machine_without_gpu_is_processor_and_its_memory() -> None:
    machine = machine_of(None)
    assert (machine.device, machine.flops_per_second) == ("cpu", None)
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 1 << 28 < machine.memory_bytes <= whole
    assert 50 << 20 < machine.context_bytes < whole  # resident memory of this process, with torch loaded


def test_machine_of_present_gpu_has_reported_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        total_memory, major, minor = 80 << 30, 7, 5

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr("app.memory.estimate.taken_by_others", lambda: None)
    known = machine_of(None)
    assert (known.name, known.memory_bytes, known.flops_per_second) == ("h100", 80 << 30, 989e12)
    assert known.workspace_bytes == 64 * MIB
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla V100-SXM2-16GB")
    other = machine_of(None)
    assert (other.name, other.device, other.memory_bytes) == ("Tesla V100-SXM2-16GB", "gpu", 80 << 30)
    assert (other.flops_per_second, other.context_is_measured, other.before_ampere) == (None, False, True)
    assert other.workspace_bytes == 2 * 8_519_680


@pytest.mark.parametrize(
    ("capability", "size"),
    [("8.9", 17_039_360), ("9.0", 64 * MIB), ("10.0", 64 * MIB), ("12.0", 17_039_360), (None, 17_039_360)],
)
def test_workspace_bytes_follow_compute_capability(capability: str | None, size: int) -> None:
    assert workspace_bytes(capability) == size
