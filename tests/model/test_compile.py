"""Compiled layers: numbers of the layers' own forward, one graph for all that are alike, none later."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from app.batch import Batch, PackedSequences
from app.config.schema import AdapterConfig, CompileConfig, QuantizationConfig
from app.errors import ConfigError, TrainingError
from app.layers.attention import BACKENDS, register
from app.layers.attention.sdpa import compiled_sdpa, plain_packed, sdpa
from app.layers.compile import CompiledLayers
from app.model.training_model import TrainingModel
from app.oom_retry import halve
from tests.choices import taking_turns
from tests.model import small
from tests.model.test_attention import PLAIN

# torch's compiler does both, and ignores its own warnings where pytest has not set that back
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

CPU, GPU = torch.device("cpu"), torch.device("cuda")
BLOCKS = CompileConfig(kind="blocks", backend="aot_eager")  # no C++, which takes seconds a graph; tests/full has one
INDUCTOR, NONE = replace(BLOCKS, backend="inductor"), CompileConfig(kind="none")
TOKENS, LONGEST, PLACES = 96, 40, 48
NF4 = QuantizationConfig(kind="nf4", double_quant=True)


@pytest.fixture(autouse=True)
def graphs_of_one_test() -> Iterator[None]:
    yield
    torch._dynamo.reset()
    register("sdpa")


def packed(seed: int) -> Batch:
    """Batches of one shape, with other documents at each seed."""
    drawn = random.Random(seed)
    lengths: list[int] = []
    while sum(lengths) < TOKENS:
        lengths.append(min(drawn.randrange(1, LONGEST), TOKENS - sum(lengths)))
    batch = small.packed(small.documents_of(tuple(lengths), seed=seed))
    return replace(batch, documents=PackedSequences.from_lengths(lengths, LONGEST, PLACES))


def outcome(training_model: TrainingModel, batch: Batch) -> list[Tensor]:
    loss, labels = training_model(batch)
    trained = list(training_model.trained().values())
    return [loss.detach(), *torch.autograd.grad(loss / labels, trained)]


def max_difference(found: list[Tensor], expected: list[Tensor]) -> float:
    pairs = zip(found, expected, strict=True)
    return max(float((a - b).norm() / b.norm().clamp_min(1e-30)) for a, b in pairs)


def by_its_own(seeds: range, kind: str = "llama", **given: Any) -> list[list[Tensor]]:
    """Outcomes without compiling; called first, since models of one process share their attention kernel."""
    training_model = small.training_model_of(kind, **given)
    return [outcome(training_model, packed(seed)) for seed in seeds]


def blocks_of(training_model: TrainingModel) -> CompiledLayers:
    assert training_model.compiled_layers is not None
    return training_model.compiled_layers


# The input of the first layer on a frozen embedding needs no gradient, which is a graph of its own.
GRAPHS = {"full": 1, "lora": 2, "qlora": 2, "int8": 2}
METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"adapter": small.lora()},
    "qlora": {"adapter": small.lora(), "quantization": NF4},
    "int8": {"adapter": small.lora(), "quantization": QuantizationConfig(kind="int8")},
}


def check_run(method: str, recompute: bool | int) -> TrainingModel:
    """Compare a compiled model with one that is not; verification changes nothing of it."""
    given = METHODS[method]
    expected = by_its_own(range(1, 5), recompute=recompute, **given)
    training_model = small.training_model_of("llama", recompute=recompute, compile=BLOCKS, **given)
    layers = blocks_of(training_model)
    before = {name: each.clone() for name, each in training_model.network.state_dict().items()}
    state = torch.get_rng_state()
    found = small.verified(training_model, packed(0))
    assert found is not None, layers.fault
    assert found.passed
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in training_model.network.parameters())
    assert all(torch.equal(each, before[name]) for name, each in training_model.network.state_dict().items())
    for seed, wanted in enumerate(expected, 1):
        assert max_difference(outcome(training_model, packed(seed)), wanted) <= 1e-5
    assert layers.graphs == GRAPHS[method]
    return training_model


def kept_bytes(model: TrainingModel, batch: Batch) -> int:
    """Storages that the forward pass keeps for the backward pass, without parameters."""
    kept: dict[int, int] = {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss, _ = model(batch)
    loss.backward()
    return sum(kept.values())


def test_compiled_run_equals_uncompiled_and_is_used_for_one_shape() -> None:
    training_model = check_run("lora", recompute=False)
    assert len({packed(seed).documents.lengths for seed in range(5)}) == 5  # type: ignore[union-attr]
    # another shape, an evaluation, a padded batch
    half = small.packed(small.documents_of((20, 11)))
    assert bool(torch.isfinite(training_model(half)[0]))
    training_model.scores(packed(1))
    training_model(small.batch_of(small.documents_of((20, 11))))
    assert blocks_of(training_model).graphs == GRAPHS["lora"]
    # another graph in the middle of a run
    batch = packed(1)
    assert batch.documents is not None
    fewer = replace(batch, documents=replace(batch.documents, cu_seqlens=batch.documents.cu_seqlens[:-1].clone()))
    with pytest.raises(TrainingError, match=r"a compiled layer would need another graph.*Set compile=none"):
        training_model(fewer)


@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_tiles_equal_uncompiled_layers(recompute: bool) -> None:
    """Graphs: a layer up to its MLP, of the first and of other layers, the sum after it, a tile with and without a
    gradient.
    """
    expected = by_its_own(range(1, 4), adapter=small.lora())
    training_model = small.training_model_of("llama", small.lora(), compile=BLOCKS, recompute=recompute, tile=40)
    layers = blocks_of(training_model)
    passed = small.verified(training_model, packed(0))
    assert passed is not None, layers.fault
    assert layers.graphs == 6
    for seed, wanted in enumerate(expected, 1):
        assert max_difference(outcome(training_model, packed(seed)), wanted) <= 1e-5
    assert layers.graphs == 6
    training_model.scores(packed(1))
    assert layers.graphs == 6


def test_parts_of_micro_batch_recompute_uncompiled_layers() -> None:
    (whole,) = by_its_own(range(1, 2), adapter=small.lora())
    training_model = small.training_model_of("llama", small.lora(), compile=BLOCKS, recompute=1)
    small.with_one_graph(training_model)
    small.verified(training_model, packed(0))
    first, second = (outcome(training_model, part) for part in halve(packed(1)))
    labels = [part.num_labels for part in halve(packed(1))]
    parts = [first[0] + second[0]]
    parts += [(a * labels[0] + b * labels[1]) / sum(labels) for a, b in zip(first[1:], second[1:], strict=True)]
    assert max_difference(parts, whole) <= 1e-5
    assert blocks_of(training_model).graphs == 1
    kept, inputs = kept_bytes(training_model, halve(packed(1))[0]), 4 * small.WIDTH * TOKENS
    assert kept < kept_bytes(training_model, packed(1)) / 2
    assert kept < 6 * inputs


def test_compiler_error_leaves_own_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_graph: Any, _inputs: Any) -> Any:
        raise RuntimeError("no code for this")

    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda _name: broken)
    (expected,) = by_its_own(range(1, 2), adapter=small.lora())
    training_model = small.training_model_of("llama", small.lora(), compile=BLOCKS)
    assert small.verified(training_model, packed(0)) is None
    (remark,) = training_model.remarks()
    assert "compiled layers disabled: layer 0 cannot be compiled" in remark
    assert "no code for this" in remark
    assert max_difference(outcome(training_model, packed(1)), expected) <= 1e-5


def test_compiled_layers_that_differ_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(graph: Any, _inputs: Any) -> Any:
        return lambda *given: tuple(each * 1.01 for each in graph(*given))

    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda _name: wrong)
    training_model = small.training_model_of("llama", small.lora(), compile=BLOCKS)
    small.with_one_graph(training_model)
    assert small.verified(training_model, packed(0)) is None
    assert (
        "compiled layers disabled: layer 0, gradient of self_attn.o_proj.lora_A: error 1.0e-02 is"
        in training_model.remarks()[0]
    )


@pytest.mark.parametrize(("causal", "window", "key_heads"), taking_turns([True, False], [None, 3, 100], [1, 2, 4]))
def test_compiled_sdpa_equals_sdpa(causal: bool, window: int | None, key_heads: int) -> None:
    rules = replace(PLAIN, causal=causal, window=window, scale=0.7)
    generator = torch.Generator().manual_seed(0)
    documents = PackedSequences.from_lengths((20, 1, 11, 5), 40, 9)
    leaves = [torch.randn(1, n, 37, 8, generator=generator).requires_grad_() for n in (4, key_heads, key_heads)]
    weight = torch.randn(1, 4, 37, 8, generator=generator)
    found, expected = (
        [out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)]
        for out in (kernel(leaves[0], leaves[1], leaves[2], rules, documents) for kernel in (compiled_sdpa, sdpa))
    )
    assert max_difference(found, expected) <= 1e-5


@pytest.mark.parametrize(("causal", "window", "key_heads"), taking_turns([True, False], [None, 3], [1, 4]))
@pytest.mark.parametrize("kernel", [sdpa, compiled_sdpa])
def test_sdpa_of_documents_of_one_length_equals_each_by_itself(
    kernel: Any, causal: bool, window: int | None, key_heads: int
) -> None:
    rules = replace(PLAIN, causal=causal, window=window)
    documents = PackedSequences.from_lengths((12, 12, 12))
    q, k, v = (torch.randn(1, n, 36, 8, generator=torch.Generator().manual_seed(n)) for n in (4, key_heads, key_heads))
    with torch.profiler.profile() as profile:
        found = kernel(q, k, v, rules, documents)
    assert max_difference([found], [plain_packed(q, k, v, rules, documents)]) <= 1e-5
    calls = {each.key: each.count for each in profile.key_averages()}
    assert calls["aten::scaled_dot_product_attention"] == 1


def test_compiled_sdpa_passes_opcheck_and_refuses_other_rules() -> None:
    q, k, v = (torch.randn(1, n, 37, 8, requires_grad=True) for n in (4, 2, 2))
    documents = PackedSequences.from_lengths((20, 1, 11, 5), 40, 9)
    for window in (None, 3):
        torch.library.opcheck(torch.ops.app.split_attention, (q, k, v, documents.cu_seqlens, True, 0.7, window))
    for changes in ({"softcap": 2.0}, {"sinks": torch.zeros(4)}, {"dropout": 0.1}):
        with pytest.raises(ConfigError, match="attention=sdpa does not support"):
            compiled_sdpa(q, k, v, replace(PLAIN, **changes), documents)


def test_compiled_layers_with_adapted_experts_call_grouped_function() -> None:
    training_model = small.training_model_of("mixtral", small.lora(experts=True), "bf16", compile=BLOCKS)
    small.with_one_graph(training_model)
    assert any("experts of 32 inputs, grouped" in each.what for each in training_model.grouped_experts)
    assert small.verified(training_model, packed(0)) is not None, blocks_of(training_model).fault


def test_every_backend_has_a_kernel_of_compiled_layers() -> None:
    assert all(backend.compiled for backend in BACKENDS.values())


@pytest.mark.parametrize(
    ("kind", "remark"),
    [
        ("qwen3_5_text", "1 layers with a recurrent mixer are not compiled"),
        ("mamba2", "every layer has a recurrent mixer"),
    ],
)
def test_layers_with_recurrent_mixer_are_not_compiled(kind: str, remark: str) -> None:
    (expected,) = by_its_own(range(1, 2), kind)
    training_model = small.training_model_of(kind, compile=replace(BLOCKS, backend="eager"))
    assert small.verified(training_model, packed(0)) is not None, blocks_of(training_model).fault
    assert max_difference(outcome(training_model, packed(1)), expected) <= 1e-5
    assert remark in "".join(training_model.remarks())


@pytest.mark.parametrize(
    ("adapter", "setting"),
    [(AdapterConfig(kind="peft", method="loha"), "adapter.method=loha"), (small.lora(dora=True), "adapter.dora=true")],
)
def test_layers_of_untraceable_adapter_are_not_compiled(adapter: AdapterConfig, setting: str) -> None:
    training_model = small.training_model_of("llama", adapter, compile=BLOCKS)
    remarks = training_model.remarks()
    assert f"compiled layers disabled: {setting}: torch.compile cannot trace PEFT's layers" in remarks
    training_model(packed(0))
    assert blocks_of(training_model).graphs == 0
