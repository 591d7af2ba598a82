"""Compiled layers of more kinds and methods, and with inductor's code."""

from dataclasses import replace

import pytest
import torch

from app.config.adapters import METHODS as METHODS_OF_PEFT
from app.config.adapters import compile_obstacle
from app.config.schema import AdapterConfig
from app.layers.attention import register
from app.layers.compile import compile_blocks
from tests.full.model.test_peft_methods import FIELDS
from tests.model import small
from tests.model.test_compile import (
    BLOCKS,
    CPU,
    GRAPHS,
    INDUCTOR,
    METHODS,
    blocks_of,
    by_its_own,
    check_run,
    graphs_of_one_test,
    kept_bytes,
    max_difference,
    outcome,
    packed,
)

assert graphs_of_one_test  # a fixture

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]


ADAPTERS = {
    **{name: AdapterConfig(kind="peft", method=name, fields=FIELDS.get(name, {})) for name in METHODS_OF_PEFT},
    "LoRA": small.lora(),
    "DoRA": small.lora(dora=True),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # inductor's own
@pytest.mark.parametrize("mode", ["default", "max-autotune-no-cudagraphs"])
def test_inductor_code_equals_uncompiled(mode: str) -> None:
    given = METHODS["lora"]
    expected = by_its_own(range(1, 3), **given)
    training_model = small.training_model_of("llama", compile=replace(INDUCTOR, mode=mode), recompute=1, **given)
    proof = small.verified(training_model, packed(0))
    assert proof is not None, blocks_of(training_model).fault
    for seed, wanted in enumerate(expected, 1):
        assert max_difference(outcome(training_model, packed(seed)), wanted) <= 1e-5
    assert blocks_of(training_model).graphs == GRAPHS["lora"]


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_compiled_layers_keep_less_than_uncompiled_ones() -> None:
    compiled = small.training_model_of("llama", compile=INDUCTOR, recompute=0, **METHODS["lora"])
    assert small.verified(compiled, packed(0)) is not None, blocks_of(compiled).fault
    kept = kept_bytes(compiled, packed(0))  # before another model registers its attention
    plain = small.training_model_of("llama", recompute=0, **METHODS["lora"])
    assert 0 < kept < kept_bytes(plain, packed(0)) / 1.5


@pytest.mark.parametrize(("method", "recompute"), [("full", 1), ("qlora", True), ("int8", 1)])
def test_compiled_run_equals_uncompiled(method: str, recompute: bool | int) -> None:
    check_run(method, recompute)


@pytest.mark.parametrize(("kind", "graphs"), [("gemma3_text", 2), ("bert", 1)])
def test_compiled_layers_not_alike_have_own_graphs(kind: str, graphs: int) -> None:
    (expected,) = by_its_own(range(1, 2), kind)
    training_model = small.training_model_of(kind, compile=BLOCKS)
    proof = small.verified(training_model, packed(0))
    assert proof is not None, blocks_of(training_model).fault
    assert proof.passed
    assert max_difference(outcome(training_model, packed(1)), expected) <= 1e-5
    assert blocks_of(training_model).graphs == graphs


@pytest.mark.filterwarnings("default")  # Dynamo cannot trace a warning that is an error
@pytest.mark.parametrize("name", ADAPTERS)
def test_compile_obstacle_of_adapter_names_what_cannot_be_traced(name: str) -> None:
    """No flag is older than the installed PEFT."""
    adapter = ADAPTERS[name]
    wide = small.model_config(architecture=small.wide_numbers("llama"))
    model = small.training_model_of("llama", adapter, "bf16", model=wide)
    register("sdpa", CPU)
    compile_blocks(model.network, replace(BLOCKS, backend="eager"))
    try:
        is_traced = bool(torch.isfinite(model(packed(0))[0]))
    except torch._dynamo.exc.TorchDynamoException:
        is_traced = False
    assert is_traced == (compile_obstacle(adapter) is None)


def test_compiled_bf16_passes_comparison() -> None:
    training_model = small.training_model_of("llama", small.lora(), "bf16", compile=BLOCKS)
    proof = small.verified(training_model, packed(0))
    assert proof is not None, blocks_of(training_model).fault
    assert proof.passed
