"""Depth extrapolated from small traces against a trace of every layer."""

from dataclasses import replace

import pytest

from app.config.load import compose_run
from app.distributed.fsdp import MeshSizes
from app.memory.estimate import MemoryPlan, plan_memory, planned_choices
from app.memory.outline import Outline
from app.training.resolve import sections_of
from tests.memory.truth import EXPERTS, PACKED, small_run

NEAR = 4096  # bytes: norms of gradients are stacked, and their stack is rounded up


def both(*overrides: str) -> tuple[MemoryPlan, MemoryPlan]:
    run = small_run("model.architecture.num_hidden_layers=9", *overrides)
    shape = replace(PACKED, micro_batches=run.batching.accumulation)
    return plan_memory(run, shape), plan_memory(run, shape, exact=True)


@pytest.mark.parametrize(
    "words",
    [
        ("recipe=full", "training.recompute=0", "precision=bf16"),
        ("recipe=full", "training.recompute=true", "optimizer=muon", "batching.accumulation=3"),
        ("recipe=full", "training.recompute=5", "training.offload=true", "precision=bf16"),
        ("recipe=lora", "training.recompute=true", "precision=bf16"),
        ("recipe=qlora", "training.recompute=4", "precision=bf16"),
        (*EXPERTS, "recipe=full", "training.recompute=8"),
        ("recipe=full", "optimizer.in_backward=true", "training.clip=0", "training.recompute=1"),
    ],
    ids=" ".join,
)
def test_extrapolated_plan_equals_trace_of_all_layers(words: tuple[str, ...]) -> None:
    guess, whole = both(*words)
    assert (whole.exact, guess.exact) == (True, False)
    assert whole.traced_layers == 9 > guess.traced_layers
    assert (guess.peak_where, guess.peak_bytes) == (whole.peak_where, whole.peak_bytes)
    assert guess.anatomy == whole.anatomy
    assert (guess.flops, guess.flops_per_token) == (whole.flops, whole.flops_per_token)
    assert (guess.kept_bytes, guess.host_bytes) == (whole.kept_bytes, whole.host_bytes)
    assert guess.offloaded_bytes == whole.offloaded_bytes
    assert max(abs(size - whole.phases[phase]) for phase, size in guess.phases.items()) <= NEAR


def test_layers_that_differ_are_all_traced() -> None:
    """A window needs a mask on a CPU; a target may name one layer by its number."""
    gemma = (
        "model.architecture.model_type=gemma3_text",
        "model.architecture.num_hidden_layers=8",
        "+model.architecture.sliding_window=16",
    )
    plan = plan_memory(small_run(*gemma), PACKED, "cpu")
    assert (plan.traced_layers, plan.exact) == (8, True)
    for words, alike in (
        (("recipe=lora",), True),
        (("recipe=full", "adapter.targets=[layers.2.mlp.up_proj]"), True),  # nothing is adapted
        (("recipe=lora", "adapter.targets=[layers.2.mlp.up_proj]"), False),
    ):
        run = compose_run(["model.weights=random", "attention=sdpa", *words])
        outline = Outline(sections_of(run, planned_choices(run.precision, "cpu")), "sdpa")
        assert outline.alike == alike


def test_inputs_on_the_host_are_not_on_a_gpu() -> None:
    words = ("recipe=lora", "training.recompute=true", "precision=bf16")
    here, away = (
        plan_memory(small_run("model.architecture.num_hidden_layers=9", *words, *more), PACKED)
        for more in ((), ("training.offload=true",))
    )
    layer = PACKED.tokens * 128 * 2  # the input of one
    assert away.offloaded_bytes == 8 * layer  # the last one's turn comes first
    # what the first layer is given lives as long as the forward pass
    assert here.phases["forward"] - away.phases["forward"] == 7 * layer
    assert here.flops == away.flops


def test_anatomy_adds_up_and_recomputation_saves_memory() -> None:
    kept, again = (
        plan_memory(small_run("recipe=lora", f"training.recompute={each}"), PACKED)
        for each in ("false", "true")
    )
    for plan in (kept, again):
        assert sum(plan.anatomy.values()) == plan.peak_bytes == max(plan.phases.values())
    assert kept.peak_bytes > again.peak_bytes
    assert kept.flops < again.flops
    assert kept.flops_per_token == again.flops_per_token


def test_paged_states_lie_on_the_host() -> None:
    """Those of a hundred thousand numbers and more."""
    large = ("recipe=full", "model.architecture.vocab_size=4096")
    paged, device = (
        plan_memory(small_run(*large, f"optimizer={kind}"), PACKED)
        for kind in ("paged_adamw_8bit", "adamw_8bit")
    )
    assert paged.host_bytes == 2 * 2 * 4096 * 128  # two bytes a number, of embedding and head
    assert device.kept_bytes - paged.kept_bytes == paged.host_bytes
    assert device.host_bytes == 0


def test_sharded_plan_of_many_processes_holds_the_share_of_one() -> None:
    run = small_run("recipe=full", "parallel=fsdp", "precision=bf16")
    whole, eighth = plan_memory(run, PACKED), plan_memory(run, PACKED, mesh_sizes=MeshSizes(1, 8))
    for part in ("trained_weights", "optimizer_states"):
        assert eighth.anatomy[part] == pytest.approx(whole.anatomy[part] / 8, rel=0.05)
    assert eighth.anatomy["gathered_weights"] > 0 == whole.anatomy["gathered_weights"]


def test_sharded_plan_extrapolated_equals_trace_of_all_layers() -> None:
    run = small_run(
        *("recipe=lora", "parallel=hsdp", "training.recompute=true", "precision=bf16"),
        *("model.architecture.num_hidden_layers=9", "batching.accumulation=3"),
    )
    shape, sizes = replace(PACKED, micro_batches=3), MeshSizes(2, 4)
    guess, whole = (plan_memory(run, shape, exact=exact, mesh_sizes=sizes) for exact in (False, True))
    assert whole.traced_layers == 9 > guess.traced_layers
    assert (guess.peak_where, guess.anatomy) == (whole.peak_where, whole.anatomy)
    assert guess.flops == whole.flops
    assert max(abs(size - whole.phases[phase]) for phase, size in guess.phases.items()) <= 2 * NEAR
