"""What a run loads before its first step: packages that it has no use for would cost seconds of every start."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

UNUSED = (
    "bitsandbytes",  # brings torch's compiler
    "datasets",  # brings pandas and pyarrow; for hub ids and Arrow folders
    "matplotlib",
    "networkx",
    "pandas",
    "pyarrow",
    "scipy",
    "sklearn",
    "tensorboard",
    "torch._inductor.compile_fx",
    "torch.utils.tensorboard",
    "torchvision",
    "transformers.trainer",
    "wandb",
)
PROBE = """
import gc, json, sys
from app import train
from app.engine import loop

def first_step(self, step=loop.Loop._step):
    found = {"loaded": sorted(sys.modules), "threshold": gc.get_threshold(), "frozen": gc.get_freeze_count()}
    open("found.json", "w").write(json.dumps(found))
    return step(self)

usual = gc.get_threshold()
loop.Loop._step = first_step
try: train.main()
finally: print("usual threshold", list(usual))
"""


def first_step_of(folder: Path, env: dict[str, str], *given: str) -> tuple[dict[str, Any], str]:
    """What a real run has loaded when its first step begins."""
    run = ("training.max_steps=1", "eval.every=0", "eval.samples=0", "output_dir=run", *given)
    program = f"import sys; sys.argv = {['train', *run]!r}\n{PROBE}"
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=env, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads((folder / "found.json").read_text()), ended.stdout


def test_a_lora_run_loads_nothing_that_it_does_not_use(app_env: dict[str, str], tmp_path: Path) -> None:
    found, out = first_step_of(tmp_path, app_env, "recipe=lora", "model.weights=random")
    loaded = set(found["loaded"])
    assert {"torch", "transformers", "peft"} <= loaded
    assert sorted(loaded.intersection(UNUSED)) == []
    assert out.endswith(f"usual threshold {found['threshold']}\n"), "garbage is looked for as usual by then"
    assert found["frozen"] > 100_000, "and not among what was loaded"


MODELS_OF_ONE_PROCESS = """
import sys
import torch
from app.config.schema import QuantizationConfig
from app.model.build import build_trainee, plan_model
from tests.model.small import lora, model_config, sections, wide_numbers

model = model_config(architecture=wide_numbers("llama"))
for kind in ("none", "nf4", "none"):
    parts = sections(model, lora(), quantization=QuantizationConfig(kind=kind))
    plan_model(parts)
    network = build_trainee(parts, torch.device("cpu"), 0, "base").network
    print(*{type(layer) for layer in network.modules() if hasattr(layer, "lora_A")}, "bitsandbytes" in sys.modules)
"""


def test_a_model_after_one_without_bitsandbytes_is_quantised_as_ever(app_env: dict[str, str]) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", MODELS_OF_ONE_PROCESS], env=app_env, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == [
        "<class 'peft.tuners.lora.layer.Linear'> False",
        "<class 'peft.tuners.lora.bnb.Linear4bit'> True",
        "<class 'peft.tuners.lora.layer.Linear'> True",
    ]
