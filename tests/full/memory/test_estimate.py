"""Extrapolated plans of more depths against traces of all layers, and the time of planning."""

from itertools import product

import pytest

from tests.harness.python import printed_by
from tests.memory.test_estimate import NEAR, extrapolated_and_exact
from tests.memory.test_planner import planned_preset

PROGRAM = """
import resource
from app.config.load import compose_run
from app.memory.estimate import plan_memory
from app.memory.shape import Shape
run = compose_run({words!r})
plan = plan_memory(run, Shape(1, 4096, (1024,) * 4, 6, 2048, 4096))
used = resource.getrusage(resource.RUSAGE_SELF)
print(plan.peak_bytes, used.ru_utime + used.ru_stime)
"""
SEVENTY = ("hidden_size=8192", "intermediate_size=28672", "num_hidden_layers=80", "num_attention_heads=64")


@pytest.mark.parametrize(("recipe", "recompute"), [*product(("full", "lora", "qlora"), ("0", "1", "4", "8", "true"))])
def test_extrapolated_plan_equals_trace_of_all_layers(recipe: str, recompute: str) -> None:
    guess, whole = extrapolated_and_exact(f"recipe={recipe}", f"training.recompute={recompute}", "precision=bf16")
    assert (guess.peak_where, guess.anatomy) == (whole.peak_where, whole.anatomy)
    assert guess.flops == whole.flops
    assert max(abs(size - whole.phases[phase]) for phase, size in guess.phases.items()) <= NEAR


@pytest.mark.parametrize("recompute", ["0", "4", "true"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_extrapolated_plan_of_steps_in_backward_equals_trace_of_all_layers(recompute: str, precision: str) -> None:
    words = ("optimizer.in_backward=true", "training.clip=0", f"training.recompute={recompute}")
    guess, whole = extrapolated_and_exact(
        "recipe=full", *words, f"precision={precision}", f"precision.trained={precision}"
    )
    assert (guess.peak_where, guess.anatomy) == (whole.peak_where, whole.anatomy)


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


def test_llama_70b_16k_fits_h200_with_fewest_recomputed_layers() -> None:
    found = planned_preset("llama_70b_16k", "h200")
    assert found.shape.width == 16384
    assert found.verdict.fits
    assert found.chosen
    assert 0 < int(found.run.training.recompute) < 80
    spare = found.verdict.memory_bytes - found.verdict.needed_bytes
    stored_layer_bytes = 4.5e9  # activations of one layer, and a margin
    assert spare < stored_layer_bytes
