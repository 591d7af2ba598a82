"""4-bit weights in the files of a model: integers of GPTQ, AWQ and compressed-tensors, and MXFP4 and NVFP4.

Several tensors of a file store one weight. They are shown as one tensor, which is read as a plain weight, or used
unchanged by a quantizer of the same number format.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from app.base import packed_fp4
from app.base.weight_files import StoredTensor
from app.layers.packed_linear import GROUPS, INT4, MXFP4, NVFP4, PackedWeight, codes_in, paired

_USUAL_GROUP = 128
_ZERO = 8  # the code of 0 without a zero point
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # place of each of eight outputs in an int32: it has 0, 2, 4, 6, 1, 3, 5, 7

Section = Mapping[str, Any]  # `quantization_config` of a config.json
Parts = Mapping[str, Tensor]  # tensors of a weight, by the last part of their names


class PackedFormat(NamedTuple):
    """A format of 4-bit weights. The first of `parts` marks a weight; those in `optional` may be absent."""

    parts: tuple[str, ...]
    optional: tuple[str, ...]
    numbers: str  # the kind of the quantizer that uses its weights unchanged
    unsupported: Callable[[Section], str | None]
    group_size: Callable[[Section], int]  # weights that share a scale; -1: a row
    unpack: Callable[[Section, Parts], PackedWeight]
    joint: str = "."  # between the names of a layer and a part; "_": between those of a stack and a part
    by_transformers: bool = False  # whether transformers reads it without other packages


@dataclass(frozen=True, slots=True)
class PackedTensor(StoredTensor):
    """A weight that several tensors of a file store, seen as a plain one: [out, in], or a stack [experts, in, out]."""

    numbers: str
    parts: Mapping[str, StoredTensor]
    unpack: Callable[[Parts], PackedWeight]

    def packed(self) -> PackedWeight:
        return self.unpack({part: place.read() for part, place in self.parts.items()})

    def read(self) -> Tensor:
        weight = self.packed().unpacked(self.dtype)
        if len(self.shape) == 2:
            return weight
        experts, inputs, outputs = self.shape
        return weight.view(experts, outputs, inputs).mT.contiguous()


def with_plain_weights(stored: Mapping[str, StoredTensor], section: Section | None) -> dict[str, StoredTensor]:
    """Return the tensors of a folder with one plain weight in place of the parts of each packed one."""
    form = None if section is None else packed_format(section)
    if section is None or form is None:
        return dict(stored)
    named, marker = (*form.parts, *form.optional), form.parts[0]
    plain: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        layer, joint, part = name.rpartition(form.joint)
        if part not in named or f"{layer}{joint}{marker}" not in stored:
            plain[name] = tensor
        elif part == marker:
            packed = _packed_tensor(f"{layer}{joint}", stored, section, form)
            plain[packed.name] = packed
    return plain


def _packed_tensor(
    start: str, stored: Mapping[str, StoredTensor], section: Section, form: PackedFormat
) -> PackedTensor:
    """Return the weight whose parts have names that begin with `start`."""
    missing = [part for part in form.parts if f"{start}{part}" not in stored]
    if missing:
        raise ValueError(f"{start}{form.parts[0]} has no {start}{missing[0]}")
    parts = {p: stored[f"{start}{p}"] for p in (*form.parts, *form.optional) if f"{start}{p}" in stored}
    unpack = partial(form.unpack, section)
    empty = {part: torch.empty(place.shape, dtype=place.dtype, device="meta") for part, place in parts.items()}
    outputs, half = unpack(empty).codes.shape
    first, shape = parts[form.parts[0]], torch.Size((outputs, 2 * half))
    name = f"{start}weight"
    if form.joint == "_":
        experts = first.shape[0]
        name, shape = start.removesuffix("_"), torch.Size((experts, 2 * half, outputs // experts))
    dtype = torch.bfloat16 if form.numbers == MXFP4 else torch.float32  # which has its numbers exactly
    return PackedTensor(first.file, name, shape, dtype, form.numbers, parts, unpack)


def _int4(codes: Tensor, scale: Tensor, zero: Tensor | None, group: Tensor | None) -> PackedWeight:
    """Return a weight with codes in bytes [out, in / 2], the codes of 0 [out, groups] and the group of each input."""
    outputs, inputs = len(codes), 2 * codes.shape[1]
    if len(scale) != outputs or inputs % scale.shape[1] or (zero is not None and zero.shape != scale.shape):
        raise ValueError(f"scales {tuple(scale.shape)} do not fit a weight {(outputs, inputs)}")
    shift = torch.zeros_like(scale, dtype=torch.int8) if zero is None else zero.to(torch.int8) - _ZERO
    return PackedWeight(INT4, codes, scale.contiguous(), shift.contiguous(), _irregular(group, scale.shape[1]))


def _irregular(group: Tensor | None, groups: int) -> Tensor | None:
    """Return the groups of inputs unless they are consecutive, as without activation order."""
    if group is None or group.is_meta:
        return None
    consecutive = torch.arange(len(group)) // (len(group) // groups)
    return None if group.equal(consecutive.to(group.dtype)) else group.int()


def _group_size(section: Section) -> int:
    return int(section.get("group_size", section.get("q_group_size", _USUAL_GROUP)))


# ---- GPTQ


def _gptq_unsupported(section: Section) -> str | None:
    layout = section.get("checkpoint_format", "gptq")
    if section.get("bits") != 4:
        return f"{section.get('bits')} bits"
    return None if layout in ("gptq", "gptq_v2") else f"checkpoint_format {layout}"


def _gptq(section: Section, parts: Parts) -> PackedWeight:
    """Unpack codes int32 [in / 8, out] and zero points int32 [groups, out / 8], which version 1 stores minus 1."""
    codes = parts["qweight"].T.contiguous().view(torch.uint8)
    zero = codes_in(parts["qzeros"]) + (section.get("checkpoint_format") != "gptq_v2")
    return _int4(codes, parts["scales"].T, zero.T, parts.get("g_idx"))


# ---- AWQ


def _awq_bits(section: Section) -> Any:
    return section.get("bits", section.get("w_bit"))


def _awq_unsupported(section: Section) -> str | None:
    layout = str(section.get("version", section.get("format", "gemm"))).lower()
    if _awq_bits(section) != 4:
        return f"{_awq_bits(section)} bits"
    return None if layout == "gemm" else f"version {layout}"


def _awq(_section: Section, parts: Parts) -> PackedWeight:
    """Unpack codes int32 [in, out / 8] and zero points int32 [groups, out / 8], eight outputs in the order of AWQ."""
    codes, zero = (
        codes_in(parts[name]).unflatten(-1, (-1, 8))[..., _AWQ_ORDER].flatten(-2).T for name in ("qweight", "qzeros")
    )
    return _int4(paired(codes), parts["scales"].T, zero, None)


# ---- compressed-tensors


def _weights_of(section: Section) -> Iterator[Mapping[str, Any]]:
    return (group.get("weights") or {} for group in section.get("config_groups", {}).values())


def _compressed_unsupported(section: Section) -> str | None:
    if section.get("format") != "pack-quantized":
        return f"format {section.get('format')}"
    if section.get("transform_config"):
        return "with transformed layer inputs"
    other = [w for w in _weights_of(section) if (w.get("num_bits"), w.get("type")) != (4, "int")]
    if other:
        return f"{other[0].get('num_bits')} bits, type {other[0].get('type')}"
    sizes = {weights.get("group_size") for weights in _weights_of(section)}
    return None if len(sizes) == 1 else f"groups of {len(sizes)} sizes"


def _compressed_group_size(section: Section) -> int:
    return next(_weights_of(section)).get("group_size") or -1


def _compressed(_section: Section, parts: Parts) -> PackedWeight:
    """Unpack codes int32 [out, in / 8] and zero points int32 [out / 8, groups]."""
    codes, scale, zero = parts["weight_packed"].view(torch.uint8), parts["weight_scale"], parts.get("weight_zero_point")
    if zero is not None:
        zero = codes_in(zero.T).T[: len(scale)]
    return _int4(codes, scale, zero, parts.get("weight_g_idx"))


# ---- table


def packed_format(section: Section) -> PackedFormat | None:
    """Return the format of a folder, None if its weights are not in 4 bits."""
    method = section["quant_method"]
    if method == "compressed-tensors":
        return _COMPRESSED_FP4.get(str(section.get("format")), PACKED_FORMATS[method])
    return PACKED_FORMATS.get(method)


PACKED_FORMATS = {
    "gptq": PackedFormat(("qweight", "qzeros", "scales"), ("g_idx",), INT4, _gptq_unsupported, _group_size, _gptq),
    "awq": PackedFormat(("qweight", "qzeros", "scales"), (), INT4, _awq_unsupported, _group_size, _awq),
    "compressed-tensors": PackedFormat(
        ("weight_packed", "weight_scale"),
        ("weight_zero_point", "weight_g_idx", "weight_shape"),
        INT4,
        _compressed_unsupported,
        _compressed_group_size,
        _compressed,
    ),
    "mxfp4": PackedFormat(
        ("blocks", "scales"),
        (),
        MXFP4,
        lambda _section: None,
        lambda _section: GROUPS[MXFP4],
        packed_fp4.gpt_oss,
        joint="_",
        by_transformers=True,
    ),
    "modelopt": PackedFormat(
        ("weight_scale_2", "weight_scale", "weight"),  # plain layers have a weight too
        ("input_scale",),
        NVFP4,
        packed_fp4.modelopt_unsupported,
        lambda _section: GROUPS[NVFP4],
        packed_fp4.modelopt,
    ),
}
_COMPRESSED_FP4 = {
    "mxfp4-pack-quantized": PackedFormat(
        ("weight_packed", "weight_scale"),
        ("input_global_scale",),
        MXFP4,
        packed_fp4.compressed_unsupported,
        lambda _section: GROUPS[MXFP4],
        packed_fp4.compressed_mxfp4,
    ),
    "nvfp4-pack-quantized": PackedFormat(
        ("weight_packed", "weight_scale", "weight_global_scale"),
        ("input_global_scale",),
        NVFP4,
        packed_fp4.compressed_unsupported,
        lambda _section: GROUPS[NVFP4],
        packed_fp4.compressed_nvfp4,
    ),
}
