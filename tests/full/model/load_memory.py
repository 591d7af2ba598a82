"""Memory of the host that reading a base into 4 bits takes, in a process of its own: by our reader or transformers'."""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import bitsandbytes.nn
import torch
from accelerate import init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

from app.base import base_model
from app.base.base_weights import LoadOptions
from app.config.load import compose_run
from app.config.tasks import TASKS
from app.layers.attention import register
from app.layers.quantization import quantizer_of
from tests.harness.peak import Peak


def _resident() -> int:
    """Mapped files are among it."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def _warm_up(folder: Path) -> None:
    """What is imported late is no part of the model."""
    with init_empty_weights():
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(str(folder)))
    packed = bitsandbytes.nn.Linear4bit(1024, 1024, quant_type="nf4", bias=False)
    packed.load_state_dict(torch.nn.Linear(1024, 1024, bias=False).bfloat16().state_dict())
    packed.to("cpu")


def _digest(lm: Any) -> str:
    found = hashlib.sha256()
    for name, parameter in sorted(lm.named_parameters()):
        found.update(name.encode())
        found.update(parameter.detach().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def main(folder: Path, reader: str) -> None:
    run = compose_run([f"model.path={folder}", "recipe=qlora", "model.tokenizer=asset:tiny"])
    quantizer = quantizer_of(run.quantization, torch.bfloat16)
    _warm_up(folder)
    options = LoadOptions(torch.bfloat16, torch.device("cpu"), register("sdpa"))
    assert quantizer is not None
    packed = BitsAndBytesConfig(**quantizer.bitsandbytes_arguments(["lm_head"]) or {})
    with Peak(_resident) as peak:
        if reader == "transformers":
            lm = AutoModelForCausalLM.from_pretrained(folder, dtype=options.dtype, quantization_config=packed)
        else:
            lm = base_model.load_base(run.model, TASKS["causal"], options, 0, quantizer)
    print(json.dumps({"peak": peak.above, "digest": _digest(lm)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
