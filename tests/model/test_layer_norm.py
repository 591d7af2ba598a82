"""`model.norm`: gradients near those of float32, with layers compiled and recomputed; what it is refused for."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from app.config.schema import CompileConfig
from app.errors import ConfigError
from app.layers.attention import register
from app.memory.estimate import plan_memory
from app.model.build import count_weights
from app.model.training_model import TrainingModel
from tests.memory.truth import PACKED, small_run
from tests.model import small
from tests.model.test_compile import outcome, packed

CONFIG = CompileConfig(kind="blocks", backend="aot_eager")
LAYER_NORMS = ("gpt2", "bert", "modernbert")


@pytest.fixture(autouse=True)
def graphs_of_one_test() -> Iterator[None]:
    yield
    torch._dynamo.reset()
    register("sdpa")


def model_with(norm: str, kind: str, precision: str = "bf16", **given: Any) -> TrainingModel:
    """Weights as small as those of a fresh model: large ones multiply every rounding."""
    model = small.model_config(kind, architecture=small.numbers(kind, initializer_range=0.02), norm=norm)
    return small.training_model_of(kind, model=model, precision=precision, **given)


def gradient(training_model: TrainingModel) -> torch.Tensor:
    return torch.cat([each.flatten() for each in outcome(training_model, packed(0))[1:]])


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("kind", LAYER_NORMS)
def test_gradients_of_norms_are_near_those_of_fp32(kind: str) -> None:
    exact, own, low, fp32 = (
        gradient(model_with(norm, kind, precision))
        for norm, precision in (("own", "fp32"), ("own", "bf16"), ("low", "bf16"), ("fp32", "bf16"))
    )
    assert apart(low, own) > 0
    assert apart(low, exact) < 0.01
    assert apart(fp32, own) < 0.001


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(("kind", "precision"), [("gpt2", "bf16"), ("bert", "fp16")])
def test_norms_of_compiled_and_recomputed_layers_compute_alike(kind: str, precision: str) -> None:
    expected = gradient(model_with("low", kind, precision))
    assert torch.equal(gradient(model_with("low", kind, precision, recompute=True)), expected)
    compiled = model_with("low", kind, precision, recompute=True, compile=CONFIG)
    small.verified(compiled, packed(0))
    assert apart(gradient(compiled), expected) < 1e-3
    assert compiled.compiled_layers is not None
    assert compiled.compiled_layers.graphs == 1
    assert compiled.compiled_layers.fault is None


def test_evaluation_scores_with_the_norms_of_training() -> None:
    training_model, batch = model_with("low", "gpt2").eval(), packed(0)
    scored = training_model.scores(batch)[0].sum()
    assert float(scored) == pytest.approx(training_model(batch)[0].item(), rel=1e-6)
    assert float(scored) != float(model_with("own", "gpt2").eval().scores(batch)[0].sum())


@pytest.mark.parametrize(
    ("kind", "precision", "message"),
    [
        ("llama", "bf16", "model.norm=low is for LayerNorms of torch, but this model has none"),
        ("gpt2", "fp32", "model.norm=low is for bf16 or fp16, but precision=auto means fp32 on this machine"),
    ],
)
def test_norms_that_cannot_be_set_are_refused(kind: str, precision: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        count_weights(small.sections(small.model_config(kind, norm="low"), small.full(), precision))


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_planned_activations_of_low_norms_are_fewer(device: str) -> None:
    words = ("model=bert", "dataset=text", "dataset.path=none.txt", "recipe=full", "precision=bf16")
    planned = {
        norm: plan_memory(small_run(*words, "training.recompute=0", f"model.norm={norm}"), PACKED, device)
        for norm in ("own", "low")
    }
    own, low = (each.anatomy["saved_activations"] for each in planned.values())
    assert low < own
