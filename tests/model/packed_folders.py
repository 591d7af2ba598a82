"""Folders of a small Llama in 4-bit formats, packed number by number as their definitions say."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.model.small import built, wide_numbers

GROUP = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # outputs in an int32, from its lowest bits


class Drawn(NamedTuple):
    """A random quantized weight: codes [out][in], zero points and scales [out][group], the group of each input."""

    codes: list[list[int]]
    zeros: list[list[int]]
    scales: Tensor
    groups: list[int]

    def weight(self) -> Tensor:
        """Return the weight by its definition, in float64 and rounded once."""
        rows = [
            [(code - zeros[group]) * scales[group] for code, group in zip(codes, self.groups, strict=True)]
            for codes, zeros, scales in zip(self.codes, self.zeros, self.scales.tolist(), strict=True)
        ]
        return torch.tensor(rows, dtype=torch.float64).float()


def drawn(outputs: int, inputs: int, *, zeros: bool, order: bool, dtype: torch.dtype = torch.float16) -> Drawn:
    numbers = random.Random(outputs * inputs)
    groups = [at // GROUP for at in range(inputs)]
    if order:
        numbers.shuffle(groups)
    count = inputs // GROUP
    return Drawn(
        [[numbers.randrange(16) for _ in range(inputs)] for _ in range(outputs)],
        [[numbers.randrange(1, 16) if zeros else 8 for _ in range(count)] for _ in range(outputs)],
        torch.tensor([[numbers.uniform(0.005, 0.03) for _ in range(count)] for _ in range(outputs)], dtype=dtype),
        groups,
    )


def words(rows: list[list[int]]) -> Tensor:
    """Return int32 [n, m / 8] of 4-bit numbers [n][m], the first in the lowest bits."""
    packed = [[sum(n << 4 * at for at, n in enumerate(row[i : i + 8])) for i in range(0, len(row), 8)] for row in rows]
    return torch.tensor(packed, dtype=torch.int64).to(torch.int32)


def columns(rows: list[list[int]]) -> list[list[int]]:
    return [list(column) for column in zip(*rows, strict=True)]


def gptq(weight: Drawn, minus: int = 1) -> dict[str, Tensor]:
    zeros = [[zero - minus for zero in row] for row in columns(weight.zeros)]
    return {
        "qweight": words(weight.codes).T.contiguous(),
        "qzeros": words(zeros),
        "scales": weight.scales.T.contiguous(),
        "g_idx": torch.tensor(weight.groups, dtype=torch.int32),
    }


def awq(weight: Drawn) -> dict[str, Tensor]:
    def ordered(rows: list[list[int]]) -> list[list[int]]:
        return [[row[i + place] for i in range(0, len(row), 8) for place in AWQ_ORDER] for row in rows]

    return {
        "qweight": words(ordered(columns(weight.codes))),
        "qzeros": words(ordered(columns(weight.zeros))),
        "scales": weight.scales.T.contiguous(),
    }


def compressed(weight: Drawn) -> dict[str, Tensor]:
    return {
        "weight_packed": words(weight.codes),
        "weight_scale": weight.scales,
        "weight_zero_point": words(columns(weight.zeros)).T.contiguous(),
        "weight_g_idx": torch.tensor(weight.groups, dtype=torch.int32),
        "weight_shape": torch.tensor([len(weight.codes), len(weight.groups)]),
    }


class Case(NamedTuple):
    """A format: its section of config.json, how it is packed, and what its weights have."""

    section: dict[str, Any]
    pack: Callable[[Drawn], dict[str, Tensor]]
    zeros: bool = True
    order: bool = False


def _group(**changes: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": GROUP} | changes
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": groups,
    }


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}
CASES = {
    "gptq": Case(_GPTQ, gptq, zeros=False),
    "gptq_order": Case({**_GPTQ, "desc_act": True}, gptq, order=True),
    "gptq_v2": Case({**_GPTQ, "checkpoint_format": "gptq_v2"}, lambda weight: gptq(weight, 0)),
    "awq": Case({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, awq),
    "compressed": Case(_group(), compressed),
    "compressed_order": Case(_group(actorder="group"), compressed, order=True),
}


def packed_folder(name: str, folder: Path, plain: Path | None = None, **section: Any) -> Path:
    """Write a small Llama in a format; `plain`: a folder for the same weights, dequantized by definition."""
    case = CASES[name]
    built("llama", "eager", torch.bfloat16, **wide_numbers("llama")).save_pretrained(str(folder))
    file = folder / "model.safetensors"
    tensors, dequantized = load_file(file), load_file(file)
    for key in [key for key in tensors if key.endswith("_proj.weight")]:
        weight = drawn(*tensors.pop(key).shape, zeros=case.zeros, order=case.order)
        tensors |= {key.removesuffix("weight") + part: tensor for part, tensor in case.pack(weight).items()}
        dequantized[key] = weight.weight()
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    if plain is not None:
        plain.mkdir()
        save_file(dequantized, plain / "model.safetensors", metadata={"format": "pt"})
        (plain / "config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {**case.section, **section}}))
    return folder
