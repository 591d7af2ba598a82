"""LoRA initialization from layer inputs (EVA, CorDA) or from the quantization error of the base (LoftQ).

It is computed once the base is filled and the adapter is attached with B = 0, so that the model still computes the
same as its base.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from app.base.weight_files import in_peft
from app.batch import Batch
from app.layers.quantization import is_conv1d, weight_of

OF_INPUTS = ("eva", "corda")
LATE = (*OF_INPUTS, "loftq")
Rows = Callable[[], Iterable[Batch]]  # micro-batches of training rows, from the first
Lost = Callable[[], Iterable[tuple[str, Tensor]]]  # by base layer: quantization error of the weights

TOKENS_PER_INPUT = 8  # tokens to read, as a multiple of the input size of the widest layer
MAX_MOMENT_BYTES = 2 << 30  # of moments in memory at once; rows are read again for each further group of layers
_DAMPING = 0.01  # added to the moments in all directions, as a fraction of their mean: PEFT's number
_ITERATIONS = 16  # 99.7% of the best rank-32 update for 2,048 x 2,048 noise, which is the hardest case


@torch.no_grad()
def begin(init: str, model: Any, rows: Rows, lost: Lost) -> str:
    """Initialize A and B of `model`, a TrainingModel with a new adapter, and return a note on the method."""
    if init == "loftq":
        return _loftq(_adapted_layers(model.network), lost())
    layers = list(_adapted_layers(model.network).values())
    batches = _enough(rows(), TOKENS_PER_INPUT * max(layer.in_features for layer in layers))
    moments = input_moments(model, layers, batches)
    if init == "eva":
        for layer, moment in moments:
            layer.lora_A["default"].weight.copy_(_leading(moment, layer.r["default"])[2].T)
    else:
        halves = [(layer, *corda_halves(layer, moment)) for layer, moment in moments]
        for layer, a, b in halves:  # changes no layer before all inputs are read
            _set_halves(layer, a, b)
            base = layer.get_base_layer()
            update = layer.scaling["default"] * b @ a
            base.weight.copy_(base.weight.float() - (update.T if is_conv1d(base) else update))
    mode = "corda (instruction-previewed)" if init == "corda" else init
    return (
        f"adapter.init={mode}: computed from layer inputs for {sum(batch.num_tokens for batch in batches):,} training "
        "tokens"
    )


def moment_bytes(init: str, network: nn.Module) -> tuple[int, int, int]:
    """Return the bytes of all moments, of the rest of a group during the next one, and of a decomposition."""
    layers = list(_adapted_layers(network).values())
    sizes = [4 * layer.in_features**2 for layer in layers]
    if init == "eva":
        return sum(sizes), max(sizes), 0
    halves = sum(4 * layer.r["default"] * (layer.in_features + layer.out_features) for layer in layers)
    copies = max(4 * (2 * layer.out_features + layer.in_features) * layer.in_features for layer in layers)
    return sum(sizes), max(sizes) + halves, copies + halves


def _adapted_layers(network: nn.Module) -> dict[str, Any]:
    return {name: layer for name, layer in network.named_modules() if "default" in getattr(layer, "lora_A", ())}


def _enough(rows: Iterable[Batch], tokens: int) -> list[Batch]:
    """Return the first micro-batches with at least `tokens` tokens, or all."""
    batches: list[Batch] = []
    for batch in rows:
        batches.append(batch)
        tokens -= batch.num_tokens
        if tokens <= 0:
            break
    return batches


def input_moments(model: Any, layers: Sequence[Any], batches: Iterable[Batch]) -> Iterator[tuple[Any, Tensor]]:
    """Yield each layer with the sum of x x^T over its inputs x at non-padding tokens, in float32.

    Layers with other rows than the tokens of the batch (experts, recurrent mixers) count all of them.
    """
    device, training = next(model.network.parameters()).device, model.training
    model.eval()
    for group in _groups(layers):
        sums = [torch.zeros(layer.in_features, layer.in_features, device=device) for layer in group]
        is_real: list[Tensor] = []
        handles = [
            layer.register_forward_pre_hook(partial(_add, total, is_real))
            for layer, total in zip(group, sums, strict=True)
        ]
        for batch in batches:
            is_real[:] = [_real_tokens(batch).to(device)]
            model.scores(batch.to(device))
        for handle in handles:
            handle.remove()
        yield from zip(group, sums, strict=True)
        sums.clear()  # before the next group allocates its sums
    model.train(training)


def _groups(layers: Iterable[Any]) -> Iterator[list[Any]]:
    """Yield groups of consecutive layers with moments of at most MAX_MOMENT_BYTES, or one layer."""
    group: list[Any] = []
    size = 0
    for layer in layers:
        needed = 4 * layer.in_features**2
        if group and size + needed > MAX_MOMENT_BYTES:
            yield group
            group, size = [], 0
        group.append(layer)
        size += needed
    yield group


def _add(total: Tensor, is_real: Sequence[Tensor], _layer: nn.Module, arguments: tuple[Tensor, ...]) -> None:
    inputs = arguments[0].flatten(0, -2)
    inputs = (inputs[is_real[0]] if len(inputs) == len(is_real[0]) else inputs).float()
    with torch.autocast(inputs.device.type, enabled=False):
        total.addmm_(inputs.T, inputs)


def _real_tokens(batch: Batch) -> Tensor:
    """Return a mask of the non-padding positions of a batch, row by row."""
    mask = torch.zeros(batch.ids.numel(), dtype=torch.bool)
    for start, length in zip(batch.starts, batch.lengths, strict=True):
        mask[start : start + length] = True
    return mask


def _leading(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the largest singular values of a matrix and their vectors, by subspace iteration on twice as many."""
    u, s, v = torch.svd_lowrank(matrix, q=min(2 * rank, *matrix.shape), niter=_ITERATIONS)
    return u[:, :rank], s[:rank], v[:, :rank]


def corda_halves(layer: Any, moment: Tensor) -> tuple[Tensor, Tensor]:
    """Return A and B with the scaled product U U^T W. U: the leading left singular vectors of W C.

    C are the moments of the inputs, with mean 1 on the diagonal. For isotropic inputs it equals PiSSA.
    """
    weight = weight_of(layer.get_base_layer()).float()
    inputs = moment / moment.diagonal().mean().clamp(min=torch.finfo(torch.float32).tiny)
    inputs.diagonal().add_(_DAMPING)
    u, s, _ = _leading(weight @ inputs, layer.r["default"])
    tiny = torch.finfo(torch.float32).tiny
    root = (s.clamp(min=1e-6 * float(s[0]) + tiny) / layer.scaling["default"]).sqrt()  # above 0 at a lower rank too
    return (u.T @ weight) / (layer.scaling["default"] * root[:, None]), u * root


def _loftq(layers: dict[str, Any], lost: Iterable[tuple[str, Tensor]]) -> str:
    """Initialize each layer with the best update of its rank for the quantization error (one iteration of LoftQ)."""
    explained = total = 0.0
    for name, error in lost:
        layer = layers.get(in_peft(name))
        if layer is not None:
            u, s, v = _leading(error, layer.r["default"])
            root = (s / layer.scaling["default"]).sqrt()
            _set_halves(layer, root[:, None] * v.T, u * root)
            explained += float(s.square().sum())
            total += float(error.square().sum())
    return (
        f"adapter.init=loftq: corrects {explained / total:.1%} of the squared 4-bit quantization error of the adapted "
        "layers"
    )


def _set_halves(layer: Any, a: Tensor, b: Tensor) -> None:
    layer.lora_A["default"].weight.copy_(a)
    layer.lora_B["default"].weight.copy_(b)
