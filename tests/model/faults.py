"""Faults planted in compiled layers, by what a compiler or a kernel could get wrong."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from app.batch import PackedSequences

Plant = Callable[[pytest.MonkeyPatch, Any, dict[str, Any]], Any]  # patch, layer, its keyword arguments


class _Gradient(torch.autograd.Function):
    """Its argument, with a gradient times a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        return upstream[0] * ctx.factor, None


def _output(name: str, change: Callable[[Tensor], Tensor]) -> Plant:
    def plant(patch: pytest.MonkeyPatch, layer: nn.Module, _kwargs: Any) -> None:
        part = _part(layer, name)
        own = part.forward
        patch.setattr(part, "forward", lambda *given: change(own(*given)))

    return plant


def _part(layer: nn.Module, name: str) -> Any:
    return next(part for full, part in layer.named_modules() if full.endswith(name))


def _gradient(name: str, factor: float) -> Plant:
    return _output(name, lambda out: _Gradient.apply(out, factor))  # type: ignore[no-untyped-call]


def _zero_rows(start: int, end: int | None) -> Callable[[Tensor], Tensor]:
    def change(out: Tensor) -> Tensor:
        kept = out.new_ones(out.shape[-2], 1)
        kept[start:end] = 0
        return out * kept

    return change


def weights_of(first: nn.Module) -> Plant:
    """Frozen weights of another layer: one graph for all layers must read those of each."""

    def plant(patch: pytest.MonkeyPatch, layer: nn.Module, _kwargs: Any) -> None:
        for name, part in layer.named_modules():
            other = first.get_submodule(name)
            for key, weight in part._parameters.items():
                if weight is not None and not weight.requires_grad:
                    patch.setitem(part._parameters, key, other._parameters[key])
            for key in part._buffers:
                patch.setitem(part._buffers, key, other._buffers[key])

    return plant


def _scale(factor: float) -> Plant:
    return lambda patch, layer, _: patch.setitem(_part(layer, "q_proj").scaling, "default", 2.0 * factor)


def _no_adapter(patch: pytest.MonkeyPatch, layer: nn.Module, _kwargs: Any) -> None:
    part = _part(layer, "v_proj")
    patch.setattr(part, "forward", part.base_layer.forward)


def _lost_gradient(patch: pytest.MonkeyPatch, layer: nn.Module, _kwargs: Any) -> None:
    part = _part(layer, "k_proj").lora_A["default"]
    patch.setattr(part, "forward", lambda x: F.linear(x, part.weight.detach().to(x.dtype)))


def _documents(join: Callable[[list[int]], list[int]]) -> Plant:
    def plant(_patch: pytest.MonkeyPatch, _layer: Any, kwargs: dict[str, Any]) -> None:
        documents = kwargs["documents"]
        joined = PackedSequences.from_lengths(join(list(documents.lengths)))
        kwargs["documents"] = joined.to(documents.cu_seqlens.device)

    return plant


def _attribute(name: str, attribute: str, change: Callable[[Any], Any]) -> Plant:
    def plant(patch: pytest.MonkeyPatch, layer: nn.Module, _kwargs: Any) -> None:
        part = _part(layer, name)
        patch.setattr(part, attribute, change(getattr(part, attribute)))

    return plant


def _shifted_positions(_patch: pytest.MonkeyPatch, _layer: Any, kwargs: dict[str, Any]) -> None:
    kwargs["position_embeddings"] = tuple(each.roll(1, 1) for each in kwargs["position_embeddings"])


def _no_norm_weight(patch: pytest.MonkeyPatch, layer: nn.Module, _kwargs: Any) -> None:
    part = _part(layer, "input_layernorm")
    patch.setitem(part._parameters, "weight", torch.ones_like(part.weight))


def _gelu(patch: pytest.MonkeyPatch, layer: nn.Module, _kwargs: Any) -> None:
    patch.setitem(_part(layer, "mlp")._modules, "act_fn", nn.GELU())


# found on every base
FAULTS: dict[str, Plant] = {
    "adapter scale x 1.1": _scale(1.1),
    "adapter scale x 2": _scale(2),
    "adapter dropped": _no_adapter,
    "documents see each other": _documents(lambda lengths: [sum(lengths)]),
    "documents joined in pairs": _documents(lambda n: [sum(n[at : at + 2]) for at in range(0, len(n), 2)]),
    "not causal": _attribute("self_attn", "is_causal", lambda _: False),
    "attention scale x 1.1": _attribute("self_attn", "scaling", lambda scale: scale * 1.1),
    "positions off by one": _shifted_positions,
    "norm without its weight": _no_norm_weight,
    "norm epsilon x 100": _attribute("input_layernorm", "variance_epsilon", lambda epsilon: epsilon * 100),
    "gelu for silu": _gelu,
    "product of down x 1.05": _output("down_proj", lambda out: out * 1.05),
    "last 8 rows of up are zero": _output("up_proj", _zero_rows(-8, None)),
    "8 rows of up in the middle are zero": _output("up_proj", _zero_rows(150, 158)),  # of a compared document
    "gradient of gate x 1.2": _gradient("gate_proj", 1.2),
    "gradient of A of k lost": _lost_gradient,
    "NaN in the gradient of o": _gradient("o_proj", float("nan")),
}
# as large as the rounding of an fp8 base
FINE_FAULTS: dict[str, Plant] = {
    "adapter scale x 1.03": _scale(1.03),
    "gradient of gate x 1.03": _gradient("gate_proj", 1.03),
}
