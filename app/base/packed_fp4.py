"""MXFP4 and NVFP4 weights in the files of a model, by OpenAI (gpt-oss), compressed-tensors and ModelOpt.

Only weights are read. Programs that serve these models may also round the inputs of layers.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from app.layers.packed_linear import GROUPS, MXFP4, NVFP4, PackedWeight, global_scales

_ALGORITHMS = ("NVFP4", "W4A16_NVFP4")  # of ModelOpt; others with NVFP4 in their names also change layer inputs


def _packed(numbers: str, codes: Tensor, scale: Tensor, factor: Tensor | None = None) -> PackedWeight:
    """Return a weight with bytes [out, in / 2], scales of one byte, and a factor of all scales."""
    outputs, inputs = len(codes), 2 * codes.shape[1]
    shape = tuple(scale.shape)
    if shape != (outputs, inputs // GROUPS[numbers]) or scale.dtype.itemsize != 1:
        raise ValueError(f"scales {shape} in {scale.dtype} do not fit a weight {(outputs, inputs)} in {numbers}")
    if factor is not None and factor.numel() != 1:
        raise ValueError(f"{factor.numel()} scales of a whole weight in {numbers}, expected one")
    bytes_ = scale.contiguous().view(codes.dtype)
    return PackedWeight(numbers, codes, bytes_, global_scale=None if factor is None else global_scales(factor, outputs))


# ---- gpt-oss


def gpt_oss(_section: Mapping[str, Any], parts: Mapping[str, Tensor]) -> PackedWeight:
    """Return a stack as one weight with the outputs of all experts, from blocks [experts, out, groups, 16]."""
    return _packed(MXFP4, parts["blocks"].flatten(0, 1).flatten(1), parts["scales"].flatten(0, 1))


# ---- compressed-tensors


def compressed_unsupported(section: Mapping[str, Any]) -> str | None:
    """Return why weights of compressed-tensors in `nvfp4-pack-quantized` or `mxfp4-pack-quantized` are not read."""
    if section.get("transform_config"):
        return "with transformed layer inputs"
    weights = [group.get("weights") or {} for group in section.get("config_groups", {}).values()]
    other = [w for w in weights if (w.get("num_bits"), w.get("type")) != (4, "float") or w.get("symmetric") is False]
    return f"{other[0].get('num_bits')} bits, type {other[0].get('type')}" if other else None


def compressed_mxfp4(_section: Mapping[str, Any], parts: Mapping[str, Tensor]) -> PackedWeight:
    """Return a weight of `mxfp4-pack-quantized`."""
    return _packed(MXFP4, parts["weight_packed"], parts["weight_scale"])


def compressed_nvfp4(_section: Mapping[str, Any], parts: Mapping[str, Tensor]) -> PackedWeight:
    """Return a weight of `nvfp4-pack-quantized`, whose scales are divided by the global one."""
    factor = 1 / parts["weight_global_scale"].double()
    return _packed(NVFP4, parts["weight_packed"], parts["weight_scale"], factor)


# ---- ModelOpt


def modelopt_unsupported(section: Mapping[str, Any]) -> str | None:
    """Return why weights of ModelOpt are not read."""
    algorithm = section.get("quant_algo")
    groups = [group.get("weights") or {} for group in section.get("config_groups", {}).values()]
    sizes = {weights.get("group_size", GROUPS[NVFP4]) for weights in (section, *groups)}
    if algorithm not in _ALGORITHMS:
        return f"quant_algo {algorithm}"
    return None if sizes == {GROUPS[NVFP4]} else f"groups of {max(sizes)} weights"


def modelopt(_section: Mapping[str, Any], parts: Mapping[str, Tensor]) -> PackedWeight:
    """Return a weight of ModelOpt, whose scales are multiplied by that of the weight."""
    return _packed(NVFP4, parts["weight"], parts["weight_scale"], parts["weight_scale_2"].double())
