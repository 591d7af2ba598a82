"""Extrapolated plans of more depths against traces of all layers, and the time of planning."""

from dataclasses import replace
from typing import Any

import pytest
import torch._subclasses.fake_tensor as fake_tensor

from app.config.commands import all_hardware
from app.config.load import compose_run
from app.distributed.fsdp import MeshSizes
from app.memory.estimate import machine_of, plan_memory
from app.memory.planner import Planned, Planner, random_if_missing
from app.optim.optimizers import OPTIMIZERS
from tests.harness.python import printed_by
from tests.memory.test_estimate import NEAR, check_extrapolated, extrapolated_and_exact
from tests.memory.truth import EXPERTS, PACKED, small_run

PROGRAM = """
import resource
from app.config.load import compose_run
from app.memory.estimate import plan_memory
from app.memory.trace import Shape
run = compose_run({words!r})
plan = plan_memory(run, Shape(1, 4096, (1024,) * 4, 6, 2048, 4096))
used = resource.getrusage(resource.RUSAGE_SELF)
print(plan.peak_bytes, used.ru_utime + used.ru_stime)
"""
SEVENTY = ("hidden_size=8192", "intermediate_size=28672", "num_hidden_layers=80", "num_attention_heads=64")


@pytest.mark.parametrize(
    "words",
    [
        *(("recipe=full", f"training.recompute={each}", "precision=bf16") for each in ("0", "4", "8")),
        *(("recipe=lora", f"training.recompute={each}", "precision=bf16") for each in ("1", "8", "true")),
        *(("recipe=qlora", f"training.recompute={each}", "precision=bf16") for each in ("0", "4", "true")),
        ("recipe=full", "training.recompute=true", "optimizer=muon", "batching.accumulation=3"),
        (*EXPERTS, "recipe=full", "training.recompute=8"),
        ("model.architecture.model_type=gpt2", "recipe=full", "training.recompute=4", "precision=fp16"),
    ],
    ids=" ".join,
)
def test_extrapolated_plan_equals_trace_of_all_layers(words: tuple[str, ...]) -> None:
    check_extrapolated(*words)


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


@pytest.mark.parametrize(("precision", "recompute"), [("fp32", "0"), ("bf16", "4"), ("fp32", "true"), ("bf16", "1")])
def test_extrapolated_plan_of_steps_in_backward_equals_trace_of_all_layers(recompute: str, precision: str) -> None:
    words = ("optimizer.in_backward=true", "training.clip=0", f"training.recompute={recompute}")
    guess, whole = extrapolated_and_exact(
        "recipe=full", *words, f"precision={precision}", f"precision.trained={precision}"
    )
    assert (guess.peak_where, guess.anatomy) == (whole.peak_where, whole.anatomy)


@pytest.mark.parametrize(
    ("recipe", "optimizer"), [*(("full", each) for each in sorted(OPTIMIZERS)), ("qlora", "paged_adamw_8bit")]
)
def test_plan_runs_no_fallback_kernel(recipe: str, optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch runs an operation without a fake kernel on real zeros, the fallback kernel."""
    operations: list[str] = []
    run_kernel = fake_tensor.run_fallback_kernel

    def recorded(mode: Any, operation: Any, *rest: Any) -> Any:
        operations.append(str(operation))
        return run_kernel(mode, operation, *rest)

    monkeypatch.setattr(fake_tensor, "run_fallback_kernel", recorded)
    plan_memory(small_run(f"recipe={recipe}", f"optimizer={optimizer}", "precision=bf16"), PACKED)
    assert operations == []


@pytest.mark.parametrize(
    ("architecture", "recipe", "between"),
    [((), "lora", (16e9, 24e9)), (SEVENTY, "qlora", (40e9, 56e9))],
    ids=["8B", "70B"],
)
def test_large_model_takes_seconds_imports_included(
    architecture: tuple[str, ...], recipe: str, between: tuple[float, float]
) -> None:
    words = [
        *("model=llama", "model.weights=random", f"recipe={recipe}", "training.recompute=true"),
        *(f"model.architecture.{number}" for number in architecture),
    ]
    peak, seconds = printed_by("-c", PROGRAM.format(words=words)).split()[-2:]
    assert between[0] < int(peak) < between[1]
    assert float(seconds) < 20, "processor time; the target is 10 s on two idle cores"


@pytest.mark.parametrize(
    ("kind", "attention", "has_scores"),
    [("gemma2", "auto", True), ("gemma2", "flash", False), ("gpt_oss", "flash", True), ("llama", "sdpa", False)],
)
def test_plan_for_gpu_has_scores_of_attention_that_the_run_takes(kind: str, attention: str, has_scores: bool) -> None:
    """Plain attention keeps the square of a document's length: for sinks, and for soft-capping without flash-attn."""
    words = [f"model.architecture.model_type={kind}", *EXPERTS[1:]]
    run = small_run("recipe=full", "precision=bf16", f"attention={attention}", *words)
    whole, apart = (
        plan_memory(run, replace(PACKED, documents=documents, longest=max(documents)), steps_only=True).peak_bytes
        for documents in ((192,), (64, 64, 64))
    )
    layers, heads, fp32 = 3, 4, 4
    more = layers * heads * fp32 * (192**2 - 3 * 64**2) if has_scores else 0  # the weights of softmax at the least
    assert more <= whole - apart <= 8 * more


def test_keys_that_sdpa_repeats_are_planned() -> None:
    """2 heads of keys and values for 4 of queries: a window has a mask, which torch's flash kernel does not take."""
    words = ("model.architecture.model_type=mistral", "recipe=lora", "precision=bf16", "attention=sdpa")
    shared, repeated = (
        plan_memory(small_run(*words, f"+model.architecture.sliding_window={window}"), PACKED, exact=True)
        for window in (512, 8)
    )
    more = 3 * 2 * 192 * 128 // 2 * 2  # layers, keys and values, tokens, half of the heads, 16 bits
    assert repeated.largest["saved_activations"] - shared.largest["saved_activations"] >= more


def planned_preset(experiment: str, hardware: str) -> Planned:
    words = [f"experiment={experiment}", "dataset=messages", "dataset.path=none.jsonl"]
    (card,) = (each for each in all_hardware() if each.name == hardware)
    return Planner(machine_of(card)).at(random_if_missing(compose_run(words), words))


def test_llama_70b_small_fits_card_of_48_gb() -> None:
    small = planned_preset("llama_70b_small", "a6000")
    assert small.plan.peak_bytes < 45e9
    assert small.plan.offloaded_bytes > 2e9
    assert small.verdict.reserved_bytes < 48e9
    assert small.verdict.fits


def test_llama_70b_16k_fits_h200_with_fewest_recomputed_layers() -> None:
    found = planned_preset("llama_70b_16k", "h200")
    assert found.shape.width == 16384
    assert found.verdict.fits
    assert found.chosen
    assert 0 < int(found.run.training.recompute) < 80
    spare = found.verdict.memory_bytes - found.verdict.needed_bytes
    stored_layer_bytes = 4.5e9  # activations of one layer, and a margin
    assert spare < stored_layer_bytes
