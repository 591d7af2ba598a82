"""Depth extrapolated from a small trace against a trace of every layer, and the time that a plan takes."""

import subprocess
import sys
from dataclasses import replace

import pytest

from app.plan.memory_plan import MemoryPlan, Shape
from app.plan.planner import depths_of, plan_memory, planned_choices
from app.plan.share import DIVIDED, Division
from tests.plan.truth import EXPERTS, PACKED, small_run

NEAR = 4096  # bytes: norms of gradients are stacked, and their stack is rounded up
LARGE = Shape(1, 4096, (1024,) * 4, 6, 2048, 4096)


def both(*overrides: str) -> tuple[MemoryPlan, MemoryPlan]:
    run = small_run("model.architecture.num_hidden_layers=9", *overrides)
    shape = replace(PACKED, micro_batches=run.batching.accumulation)
    return plan_memory(run, shape), plan_memory(run, shape, exact=True)


@pytest.mark.parametrize(
    ("recipe", "recompute"), [("full", "0"), ("full", "true"), ("qlora", "4"), ("lora", "true")]
)
def test_equals_the_trace_of_all_layers(recipe: str, recompute: str) -> None:
    check_all_layers(recipe, recompute)


def check_all_layers(recipe: str, recompute: str) -> None:
    guess, whole = both(f"recipe={recipe}", f"training.recompute={recompute}", "precision=bf16")
    assert whole.traced_layers == 9 > guess.traced_layers
    assert guess.peak_where == whole.peak_where
    assert guess.peak_bytes == whole.peak_bytes
    assert guess.anatomy == whole.anatomy
    assert (guess.flops, guess.flops_per_token) == (whole.flops, whole.flops_per_token)
    assert (guess.kept_bytes, guess.host_bytes) == (whole.kept_bytes, whole.host_bytes)
    apart = [abs(size - whole.phases[phase]) for phase, size in guess.phases.items()]
    assert max(apart) <= NEAR


@pytest.mark.parametrize("words", [("recipe=full", "optimizer=paged_adamw_8bit"), ("recipe=lora",)])
def test_of_one_process_of_several_that_divide(words: tuple[str, ...]) -> None:
    """Buckets of equal layers begin at other tensors than in a trace of few, so one may be on its way or not."""
    large = ("model.architecture.num_hidden_layers=9", "model.architecture.hidden_size=512")
    run = small_run(*large, "model.architecture.intermediate_size=1024", "parallel=zero2", *words)
    guess, whole = (plan_memory(run, PACKED, exact=exact, processes=4) for exact in (False, True))
    outline = depths_of(run, PACKED, "gpu", planned_choices(run.precision, "gpu")).outline
    assert abs(guess.peak_bytes - whole.peak_bytes) <= 2 * Division(outline.trained(9), 4).bucket_bytes
    for kind in DIVIDED:
        assert guess.anatomy[kind] == whole.anatomy[kind]
    assert (guess.kept_bytes, guess.host_bytes) == (whole.kept_bytes, whole.host_bytes)
    alone = plan_memory(run, PACKED)
    assert alone.host_bytes / 4 <= whole.host_bytes <= alone.host_bytes / 2
    assert (alone.host_bytes > 0) == ("recipe=full" in words)


@pytest.mark.parametrize("optimizer", ["muon", "paged_adamw_8bit"])
def test_with_other_optimizers_and_several_micro_batches(optimizer: str) -> None:
    guess, whole = both("recipe=full", f"optimizer={optimizer}", "batching.accumulation=3")
    assert guess.peak_bytes == whole.peak_bytes
    assert (guess.kept_bytes, guess.host_bytes, guess.flops) == (
        whole.kept_bytes,
        whole.host_bytes,
        whole.flops,
    )


@pytest.mark.parametrize(("recipe", "recompute"), [("lora", "true"), ("full", "5")])
def test_with_inputs_of_layers_on_the_host(recipe: str, recompute: str) -> None:
    words = (f"recipe={recipe}", f"training.recompute={recompute}", "training.offload=true", "precision=bf16")
    guess, whole = both(*words)
    assert (guess.peak_where, guess.anatomy) == (whole.peak_where, whole.anatomy)
    assert guess.offloaded_bytes == whole.offloaded_bytes > 0
    here, _ = both(*words[:2], *words[3:])
    layer = PACKED.tokens * 128 * (2 if recipe == "lora" else 4)  # the input of one
    layers = 9 if recompute == "true" else int(recompute)
    assert guess.offloaded_bytes == (layers - 1) * layer
    embedded = 1  # what the first layer is given lives as long as the forward pass
    assert here.phases["forward"] - guess.phases["forward"] == (layers - 1 - embedded) * layer
    assert here.flops == guess.flops


@pytest.mark.parametrize("recompute", ["0", "true"])
def test_with_weights_stepped_in_the_backward_pass(recompute: str) -> None:
    check_stepped_in_the_backward_pass(recompute, "fp32")


def check_stepped_in_the_backward_pass(recompute: str, precision: str) -> None:
    """The norm of each gradient is kept: by its layer until the step is over, and after it."""
    words = ("optimizer.in_backward=true", "training.clip=0", f"training.recompute={recompute}")
    narrow = (f"precision={precision}", f"precision.trained={precision}")
    guess, whole = both("recipe=full", *words, *narrow)
    for phase in ("optimizer", "evaluation"):
        assert abs(guess.phases[phase] - whole.phases[phase]) <= NEAR
    assert (guess.peak_where, guess.anatomy) == (whole.peak_where, whole.anatomy)


def test_of_a_mixture_of_experts() -> None:
    guess, whole = both(*EXPERTS, "recipe=full", "training.recompute=4")
    assert guess.phases == whole.phases
    assert guess.flops == whole.flops
    assert guess.traced_layers == 6


def test_layers_that_differ_are_traced_one_by_one() -> None:
    """A window needs a mask on a CPU."""
    gemma = (
        "model.architecture.model_type=gemma3_text",
        "model.architecture.num_hidden_layers=8",
        "+model.architecture.sliding_window=16",
    )
    plan = plan_memory(small_run(*gemma), PACKED, "cpu")
    assert plan.traced_layers == 8
    assert plan.events is not None


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


def test_events_lead_to_the_peak() -> None:
    plan = plan_memory(small_run("recipe=qlora"), PACKED, exact=True)
    assert plan.events is not None
    current, step = 0, []
    for _, size in plan.events:
        current += size
        step.append(current)
    in_step = max(size for phase, size in plan.phases.items() if phase not in ("save", "evaluation"))
    assert max(step) == in_step
    assert min(step) >= 0


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


PROGRAM = """
import resource
from app.config.load import compose_run
from app.plan.memory_plan import Shape
from app.plan.planner import plan_memory
run = compose_run({words!r})
plan = plan_memory(run, Shape(1, 4096, (1024,) * 4, 6, 2048, 4096))
used = resource.getrusage(resource.RUSAGE_SELF)
print(plan.peak_bytes, used.ru_utime + used.ru_stime)
"""
SEVENTY = (
    "hidden_size=8192",
    "intermediate_size=28672",
    "num_hidden_layers=80",
    "num_attention_heads=64",
)


@pytest.mark.parametrize(
    ("architecture", "recipe", "between"),
    [((), "lora", (16e9, 24e9)), (SEVENTY, "qlora", (40e9, 56e9))],
    ids=["8B", "70B"],
)
def test_a_large_model_takes_seconds_imports_included(
    architecture: tuple[str, ...], recipe: str, between: tuple[float, float]
) -> None:
    words = [
        *("model=llama", "model.weights=random", f"recipe={recipe}", "training.recompute=true"),
        *(f"model.architecture.{number}" for number in architecture),
    ]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(words=words)], capture_output=True, text=True, check=True
    )
    peak, seconds = done.stdout.split()[-2:]
    assert between[0] < int(peak) < between[1]
    assert float(seconds) < 20, "of processor time; promised are 10 s on two quiet cores"
