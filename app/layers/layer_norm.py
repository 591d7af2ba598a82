"""LayerNorms under autocast in another dtype than the model's own: that of autocast, or float32.

On CUDA autocast computes them in float32; on a CPU in the dtype of their rows.
"""

from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from app.config.schema import ModelConfig
from app.errors import refuse
from app.layers.operations import autocast_dtype


def set_norms(network: nn.Module, config: ModelConfig, compute: torch.dtype | None) -> None:
    """Replace the forward of every LayerNorm by that of `model.norm`; `compute` is the dtype of autocast.

    Refuse a precision without autocast and a model without LayerNorms; `network` may be on meta.
    """
    if config.norm == "own":
        return
    norms: list[Any] = [module for module in network.modules() if type(module).forward is nn.LayerNorm.forward]
    refuse(_problems(config, compute, has_norms=bool(norms)))
    forward = _low if config.norm == "low" else _fp32
    for norm in norms:
        norm.forward = MethodType(forward, norm)  # one function, or torch.compile would compile a graph per norm


def _problems(config: ModelConfig, compute: torch.dtype | None, *, has_norms: bool) -> Iterator[str]:
    if compute is None:
        yield (
            f"model.norm={config.norm} is for bf16 or fp16, but precision=auto means fp32 on this machine. "
            "Set precision=bf16, or model.norm=own."
        )
    if not has_norms:
        yield (
            f"model.norm={config.norm} is for LayerNorms of torch, but this model has none: an RMSNorm sets its "
            "dtype in its own code. Set model.norm=own."
        )


def _low(norm: Any, x: Tensor) -> Tensor:
    return _normed(norm, x, autocast_dtype(x))


def _fp32(norm: Any, x: Tensor) -> Tensor:
    return _normed(norm, x, torch.float32)


def _normed(norm: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
    weight, bias = (None if tensor is None else tensor.to(dtype) for tensor in (norm.weight, norm.bias))
    with torch.autocast(x.device.type, enabled=False):
        return F.layer_norm(x.to(dtype), norm.normalized_shape, weight, bias, norm.eps)
