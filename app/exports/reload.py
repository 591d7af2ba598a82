"""Program that loads an export as its users would, in a process that imports nothing of this package.

python reload.py PLAN.json      write the logits of the rows in the plan as safetensors
"""

import hashlib
import json
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def load(plan: dict[str, Any]) -> Any:
    """Load the model with transformers and PEFT."""
    import transformers

    options: dict[str, Any] = {
        "dtype": plan["dtype"],
        "device_map": {"": plan["device"]},
        "attn_implementation": plan["attention"],
        "trust_remote_code": plan["trust_remote_code"],
        "local_files_only": True,
    }
    if plan["config"] is not None or plan["rope"] is not None:
        options["config"] = transformers.AutoConfig.from_pretrained(
            plan["config"] or plan["base"], trust_remote_code=plan["trust_remote_code"], local_files_only=True
        )
    for name, value in (plan["rope"] or {}).items():  # an adapter does not store it
        setattr(options["config"].get_text_config(decoder=True), name, value)
    if plan["bitsandbytes"] is not None:
        options["quantization_config"] = transformers.BitsAndBytesConfig(**plan["bitsandbytes"])
    if plan["unpacked"] is not None:
        from transformers.quantizers.auto import AutoQuantizationConfig

        options["quantization_config"] = AutoQuantizationConfig.from_dict({**plan["unpacked"], "dequantize": True})
    lm = getattr(transformers, plan["auto_class"]).from_pretrained(plan["base"] or plan["folder"], **options)
    if plan["stacks"]:
        round_stacks(lm, plan["stacks"], plan["bitsandbytes"])
    if plan["vocab_size"] is not None:
        lm.resize_token_embeddings(plan["vocab_size"])
    if plan["base"] is not None:
        from peft import PeftModel

        lm = PeftModel.from_pretrained(lm, plan["folder"])
    return lm.eval()


@torch.no_grad()
def round_stacks(lm: torch.nn.Module, names: list[str], config: dict[str, Any]) -> None:
    """Round stacked experts in place as bitsandbytes would: transformers does not quantize them."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    for name in names:
        stack = lm.get_parameter(name)
        packed = quantize_4bit(
            stack.flatten(0, 1),
            blocksize=64,
            compress_statistics=config["bnb_4bit_use_double_quant"],
            quant_type=config["bnb_4bit_quant_type"],
        )
        stack.copy_(dequantize_4bit(*packed).view_as(stack))


def digest(lm: torch.nn.Module) -> str:
    """Return the hash of all tensors, without unpacking quantized ones."""
    sha256 = hashlib.sha256()
    for name, tensor in sorted(lm.state_dict().items()):
        sha256.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        sha256.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return sha256.hexdigest()


def round_rows(lm: torch.nn.Module, kind: str | None) -> None:
    """Round the inputs of quantized layers for each token, to e4m3 (`float`) or int8 (`int`), as vLLM does.

    This replaces the rounding of compressed-tensors, whose int8 has another scale.
    """
    for layer in lm.modules():
        if hasattr(layer, "quantization_scheme"):
            layer.quantization_enabled = False  # type: ignore[assignment]
            if kind is not None:
                layer.register_forward_pre_hook(partial(_with_rounded_rows, kind))


def _with_rounded_rows(kind: str, _layer: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
    rows = inputs[0]
    largest = torch.finfo(torch.float8_e4m3fn).max if kind == "float" else torch.iinfo(torch.int8).max
    scale = (rows.abs().amax(-1, keepdim=True) / largest).clamp_min(torch.finfo(torch.float32).tiny)
    numbers = rows / scale
    rounded = numbers.to(torch.float8_e4m3fn).to(rows.dtype) if kind == "float" else numbers.round()
    return (rounded * scale,)


def in_fp32(network: torch.nn.Module) -> None:
    """Switch arithmetic to fp32 in place, to compare weights without its rounding; quantized weights stay packed."""
    torch.nn.Module.float(network)  # `float` of transformers raises for a quantized model
    for layer in network.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            packed: Any = layer
            packed.compute_dtype = torch.float32
            packed.support_avx512bf16_for_cpu = False  # CPUs with it would evaluate in bf16


@torch.no_grad()
def logits(lm: Any, rows: dict[str, torch.Tensor], device: str) -> dict[str, torch.Tensor]:
    """Return the logits of each row `ids.N` at the positions `at.N`, or its single output if it has no positions.

    `sides.N`: segment ids of a pair of texts.
    """
    logits_by_row = {}
    for name in sorted(key for key in rows if key.startswith("ids.")):
        number = name.removeprefix("ids.")
        sides = rows.get(f"sides.{number}")
        more = {} if sides is None else {"token_type_ids": sides.long().to(device)[None]}
        answers = lm(input_ids=rows[name].long().to(device)[None], use_cache=False, **more).logits
        at = rows.get(f"at.{number}")
        chosen = answers if at is None else answers[0, at.long().to(device)]
        logits_by_row[number] = chosen.float().cpu().contiguous()
    return logits_by_row


def main() -> None:
    """Read the plan of the only argument and write the logits."""
    warnings.simplefilter("ignore", FutureWarning)
    plan = json.loads(Path(sys.argv[1]).read_text())
    if plan["threads"]:
        torch.set_num_threads(plan["threads"])
    lm = load(plan)
    tensors = {"digest": digest(lm)} if plan["digest"] else None
    in_fp32(lm)
    round_rows(lm, plan["rounded_rows"])
    save_file(logits(lm, load_file(plan["rows"]), plan["device"]), plan["out"], tensors)
    ours = [name for name in sys.modules if name.split(".")[0] == "app"]
    assert not ours, f"not a fresh process: {ours}"


if __name__ == "__main__":
    main()
