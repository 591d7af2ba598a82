"""Inits of LoRA from the inputs of layers (EVA, CorDA), or from what packing the base lost (LoftQ).

They are computed once the base is filled and the adapter attached with B = 0, so that the model still computes what
its base does.
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
Rows = Callable[[], Iterable[Batch]]  # micro-batches of a run's rows, from the first one on
Lost = Callable[[], Iterable[tuple[str, Tensor]]]  # by layers of the base: weights less what is packed of them

TOKENS_PER_INPUT = 8  # tokens that are read, as a multiple of the inputs of the widest layer
MAX_MOMENT_BYTES = 2 << 30  # of the moments kept at once; the rows are read again for each further group of layers
_DAMPING = 0.01  # added to the moments in all directions, as a part of their mean: PEFT's number
_ITERATIONS = 16  # 99.7 % of the best update of rank 32 for noise of 2,048 x 2,048, which is the hardest case


@torch.no_grad()
def begin(init: str, model: Any, rows: Rows, lost: Lost) -> str:
    """Compute the halves of `model`, a TrainingModel with a new adapter, and say from what."""
    if init == "loftq":
        return _loftq(_adapted_layers(model.network), lost())
    layers = list(_adapted_layers(model.network).values())
    batches = _enough(rows(), TOKENS_PER_INPUT * max(layer.in_features for layer in layers))
    moments = input_moments(model, layers, batches)
    if init == "eva":
        for layer, moment in moments:
            layer.lora_A["default"].weight.copy_(_leading(moment, layer.r["default"])[2].T)
    else:
        found = [(layer, *corda_halves(layer, moment)) for layer, moment in moments]
        for layer, a, b in found:  # none is changed before all inputs are known
            _set_halves(layer, a, b)
            base = layer.get_base_layer()
            update = layer.scaling["default"] * b @ a
            base.weight.copy_(base.weight.float() - (update.T if is_conv1d(base) else update))
    mode = "corda (instruction-previewed)" if init == "corda" else init
    return (
        f"adapter.init={mode}: computed from layer inputs for {sum(each.num_tokens for each in batches):,} training "
        "tokens"
    )


def moment_bytes(init: str, network: nn.Module) -> tuple[int, int, int]:
    """Bytes of the moments of all layers, of what is left of a group beside the next one, and of what a decomposition
    takes.
    """
    layers = list(_adapted_layers(network).values())
    sizes = [4 * layer.in_features**2 for layer in layers]
    if init == "eva":
        return sum(sizes), max(sizes), 0
    halves = sum(4 * each.r["default"] * (each.in_features + each.out_features) for each in layers)
    copies = max(4 * (2 * each.out_features + each.in_features) * each.in_features for each in layers)
    return sum(sizes), max(sizes) + halves, copies + halves


def _adapted_layers(network: nn.Module) -> dict[str, Any]:
    return {name: layer for name, layer in network.named_modules() if "default" in getattr(layer, "lora_A", ())}


def _enough(rows: Iterable[Batch], tokens: int) -> list[Batch]:
    """The first micro-batches that have so many tokens together, or all."""
    found: list[Batch] = []
    for batch in rows:
        found.append(batch)
        tokens -= batch.num_tokens
        if tokens <= 0:
            break
    return found


def input_moments(model: Any, layers: Sequence[Any], batches: Iterable[Batch]) -> Iterator[tuple[Any, Tensor]]:
    """Each layer with the sum of x x^T over its inputs x at real tokens, in float32.

    A layer that is given other rows than the tokens of the batch (experts, recurrent mixers) counts all of them.
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
        sums.clear()  # before those of the next group are made
    model.train(training)


def _groups(layers: Iterable[Any]) -> Iterator[list[Any]]:
    """Layers in their order, as many at a time as have moments of MAX_MOMENT_BYTES, or one."""
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
    """Which places of a batch, line after line, are no padding."""
    found = torch.zeros(batch.ids.numel(), dtype=torch.bool)
    for start, length in zip(batch.starts, batch.lengths, strict=True):
        found[start : start + length] = True
    return found


def _leading(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """The largest singular values of a matrix, and their vectors, by subspace iteration on twice as many."""
    u, s, v = torch.svd_lowrank(matrix, q=min(2 * rank, *matrix.shape), niter=_ITERATIONS)
    return u[:, :rank], s[:rank], v[:, :rank]


def corda_halves(layer: Any, moment: Tensor) -> tuple[Tensor, Tensor]:
    """A and B with the scaled product U U^T W. U: the leading left singular vectors of W C.

    C are the moments of the inputs, of mean 1 on the diagonal: of inputs that are alike in all directions it is PiSSA.
    """
    weight = weight_of(layer.get_base_layer()).float()
    inputs = moment / moment.diagonal().mean().clamp(min=torch.finfo(torch.float32).tiny)
    inputs.diagonal().add_(_DAMPING)
    u, s, _ = _leading(weight @ inputs, layer.r["default"])
    tiny = torch.finfo(torch.float32).tiny
    root = (s.clamp(min=1e-6 * float(s[0]) + tiny) / layer.scaling["default"]).sqrt()  # above 0 at a lower rank too
    return (u.T @ weight) / (layer.scaling["default"] * root[:, None]), u * root


def _loftq(layers: dict[str, Any], lost: Iterable[tuple[str, Tensor]]) -> str:
    """Begin each layer with the best update of its rank for what was lost (one iteration of LoftQ)."""
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
