"""Tiled MLPs: gradients of the untiled ones, two forward passes with gradient checkpointing, models that fit."""

from typing import Any

import pytest
import torch
from torch import Tensor

from app.config.schema import QuantizationConfig
from app.errors import ConfigError
from app.layers.activation_checkpointing import repeated_layers
from app.layers.tiled_mlp import gated_mlps, own_forward, require_tileable
from app.model.training_model import TrainingModel, evaluating
from tests.model.small import batch_of, distance, documents_of, full, lora, outcome, packed, training_model_of

TOKENS = 50
BATCH = packed(documents_of((24, 9, 17)))
TILE = 16  # four tiles, the last one short
NF4 = QuantizationConfig(kind="nf4")
METHODS: dict[str, tuple[Any, Any]] = {
    "full": (full(), None),
    "lora": (lora(), None),
    "qlora": (lora(), NF4),
    "fp8": (lora(), QuantizationConfig(kind="fp8")),
}


def gradients_of_mlp(mlp: Any) -> list[Tensor]:
    """Output, dx, and gradients of the trained parameters."""
    generator = torch.Generator().manual_seed(5)
    size = mlp.gate_proj.in_features
    x = torch.randn(2, TOKENS // 2, size, generator=generator).requires_grad_()
    upstream = torch.randn(x.shape, generator=generator)
    out = mlp(x)
    trained = [parameter for parameter in mlp.parameters() if parameter.requires_grad]
    return [out.detach(), *torch.autograd.grad(out, [x, *trained], upstream)]


@pytest.mark.parametrize("method", METHODS)
def test_tiled_mlp_gradients_equal_untiled(method: str) -> None:
    adapter, quantization = METHODS[method]
    model = training_model_of("llama", adapter, tile=TILE, quantization=quantization)
    mlp = gated_mlps(model.network)[0]
    tiled = gradients_of_mlp(mlp)
    with mlp.tiling.computed_by(own_forward):
        whole = gradients_of_mlp(mlp)
    for result, expected in zip(tiled, whole, strict=True):
        assert distance(result, expected) <= 1e-5


@pytest.mark.parametrize(
    ("kind", "precision", "recompute"), [("llama", "fp32", 1), ("gemma3_text", "fp32", True), ("llama", "bf16", True)]
)
def test_tiled_model_loss_and_gradients_equal_untiled(kind: str, precision: str, recompute: bool | int) -> None:
    plain = training_model_of(kind, lora(), precision)
    model = training_model_of(kind, lora(), precision, tile=TILE, recompute=recompute)
    (loss, expected), (tiled_loss, gradients) = outcome(plain, BATCH), outcome(model, BATCH)
    assert tiled_loss == pytest.approx(loss, rel=1e-6 if precision == "fp32" else 1e-2)
    assert distance(gradients, expected) <= (1e-5 if precision == "fp32" else 2e-2)
    with evaluating(model), evaluating(plain):
        torch.testing.assert_close(model.scores(BATCH)[0], plain.scores(BATCH)[0], rtol=1e-2, atol=1e-2)


def calls_of_tiles(model: TrainingModel, *, passes: int = 1) -> list[int]:
    """Calls of each MLP's up projection, and the calls of hooks on one of its parameters, in a step."""
    counts, hooks = [], 0
    for mlp in gated_mlps(model.network):
        counts.append(0)

        def count(*_: Any, at: int = len(counts) - 1) -> None:
            counts[at] += 1

        mlp.up_proj.register_forward_hook(count)

    def hook(_parameter: Tensor) -> None:
        nonlocal hooks
        hooks += 1

    parameter = next(p for p in gated_mlps(model.network)[0].parameters() if p.requires_grad)
    parameter.register_post_accumulate_grad_hook(hook)
    for _ in range(passes):
        model(BATCH)[0].backward()
    return [*counts, hooks]


@pytest.mark.parametrize("recompute", [False, True])
def test_tiled_mlp_runs_twice_with_or_without_gradient_checkpointing(recompute: bool) -> None:
    tiles = -(-TOKENS // TILE)
    model = training_model_of("llama", lora(), tile=TILE, recompute=recompute)
    assert calls_of_tiles(model) == [2 * tiles, 2 * tiles, 1]


def test_tiled_mlp_saves_one_input() -> None:
    def saved(**settings: Any) -> int:
        storages: dict[int, int] = {}
        model = training_model_of("llama", lora(), **settings)
        weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        mlp = gated_mlps(model.network)[0]
        x = torch.ones(1, TOKENS, mlp.gate_proj.in_features).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            mlp(x)
        assert saved_input(x, storages)
        return sum(storages.values())

    def saved_input(x: Tensor, storages: dict[int, int]) -> bool:
        return x.untyped_storage().data_ptr() in storages

    size = 4 * TOKENS * 32
    assert saved(tile=TILE) == size
    assert saved() > 5 * size


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "gemma3_text", "olmo2", "granite", "cohere2"])
def test_gated_mlp_is_found_in_each_layer(kind: str) -> None:
    network = training_model_of(kind, lora()).network
    assert len(gated_mlps(network)) == len(repeated_layers(network)) == 2
    require_tileable(network, TILE)


@pytest.mark.parametrize(
    ("kind", "adapter", "reason"),
    [
        ("mixtral", lora(), r"training\.tile=16: this model has experts"),
        ("gpt_oss", full(), "has experts"),
        ("gpt2", full(), "do not have one gated MLP"),
        ("bert", full(), "do not have one gated MLP"),
        ("llama", lora(dropout=0.1), r"the MLP has dropout.* Set training\.tile=0, or adapter\.dropout=0\."),
    ],
)
def test_tiles_are_refused_for_other_mlps(kind: str, adapter: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        training_model_of(kind, adapter, tile=TILE)


def test_tiled_mlp_of_padded_rows_and_frozen_input_gets_gradients() -> None:
    """The first MLP's input needs no gradient if only MLPs are trained."""
    adapter = lora(targets=["up_proj"])
    batch = batch_of(documents_of((24, 9, 17)))
    (loss, expected), (tiled_loss, gradients) = (
        outcome(training_model_of("llama", adapter, recompute=True, tile=tile), batch) for tile in (0, TILE)
    )
    assert tiled_loss == pytest.approx(loss, rel=1e-6)
    assert distance(gradients, expected) <= 1e-5
