"""Plans extrapolated from traces of a few layers against traces of all layers; they run no kernel on real tensors."""

from dataclasses import replace

import pytest
import torch

from app.memory.estimate import MemoryPlan, plan_memory, planned_choices
from app.memory.fake_tensors import MetaModel
from app.memory.planner import Planner
from app.training.auto_settings import Choices, sections_of
from tests.harness.composed import composed
from tests.memory.facts import GPU, MIB
from tests.memory.truth import PACKED, small_run

NEAR = 4096  # bytes: the stack of gradient norms is rounded up


def extrapolated_and_exact(*overrides: str) -> tuple[MemoryPlan, MemoryPlan]:
    run = small_run("model.architecture.num_hidden_layers=9", *overrides)
    shape = replace(PACKED, micro_batches=run.batching.accumulation)
    return plan_memory(run, shape), plan_memory(run, shape, exact=True)


def test_extrapolated_plan_equals_trace_of_all_layers() -> None:
    """Other recipes in tests/full/memory/test_estimate.py."""
    check_extrapolated("recipe=full", "training.recompute=5", "training.offload=true", "precision=bf16")


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
    gemma = ("model.architecture.model_type=gemma3_text", "+model.architecture.sliding_window=16")
    words = ("+model.architecture.sliding_window_pattern=3", "model.architecture.num_hidden_layers=4")
    plan = plan_memory(small_run(*gemma, *words), PACKED, "cpu")
    assert (plan.traced_layers, plan.exact) == (4, True)
    run = small_run(*gemma, "+model.architecture.sliding_window_pattern=2", "model.architecture.num_hidden_layers=7")
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
        plan_memory(small_run("model.architecture.num_hidden_layers=4", *words, *more), PACKED)
        for more in ((), ("training.offload=true",))
    )
    layer = PACKED.tokens * 128 * 2  # the input of one
    assert offloaded.offloaded_bytes == 3 * layer  # all but the last, which backward needs first
    # the input of the first layer lives until the end of the forward pass
    assert on_gpu.phases["forward"] - offloaded.phases["forward"] == 2 * layer
    assert on_gpu.flops == offloaded.flops


def test_plan_with_paged_optimizer_counts_large_states_on_host() -> None:
    """States of 100,000 numbers or more are paged."""
    large = ("recipe=full", "model.architecture.vocab_size=4096")
    paged, device = (
        plan_memory(small_run(*large, f"optimizer={kind}"), PACKED) for kind in ("paged_adamw_8bit", "adamw_8bit")
    )
    assert paged.host_bytes == 2 * 2 * 4096 * 128  # 2 bytes per weight of embedding and head
    assert device.kept_bytes - paged.kept_bytes == paged.host_bytes
    assert device.host_bytes == 0


def test_plan_of_present_gpu_has_cublas_workspaces_in_every_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    run, choices = small_run("recipe=lora"), Choices("bf16", "varlen")
    without = plan_memory(run, PACKED, choices=choices)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    found = plan_memory(run, PACKED, choices=choices)
    assert found.phases == {phase: peak + 64 * MIB for phase, peak in without.phases.items()}
    assert found.peak_bytes == found.phases[found.peak_where] == sum(found.anatomy.values())
    assert found.largest["workspaces"] == 64 * MIB
    assert plan_memory(run, PACKED, "cpu").largest["workspaces"] == 0


def test_planner_counts_workspaces_of_its_machine() -> None:
    run = small_run("recipe=lora", "precision=bf16")
    plain, larger = (Planner(replace(GPU, workspace_bytes=size)).of_batch(run, PACKED) for size in (0, MIB))
    assert larger.plan.peak_bytes == plain.plan.peak_bytes + MIB
