"""Finished runs and exports give the same logits and tokens in transformers 4 and PEFT as in transformers 5."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import transformers4
from tests.harness.python import printed_by
from tests.harness.runs import FinishedRuns, Zygote

READ = """
import json, sys, warnings
warnings.simplefilter("ignore", FutureWarning)
import torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, base = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(base or folder, dtype=torch.float32)
if base:
    from peft import PeftModel
    model = PeftModel.from_pretrained(model, folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
ids = tokenizer.apply_chat_template([{"role": "user", "content": "What is two and three?"}], tokenize=False)
ids = tokenizer(ids, add_special_tokens=False).input_ids
with torch.no_grad():
    logits = model.eval()(torch.tensor([ids])).logits
said = {"version": transformers.__version__, "ids": ids, "end": tokenizer.eos_token_id, "logits": logits.tolist()}
print(json.dumps(said))
"""


def read(env: dict[str, str], folder: Path, base: Path | str) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(printed_by("-c", READ, str(folder), str(base), env=env).splitlines()[-1])
    return said


@pytest.mark.parametrize("what", ["adapter", "merged"])
def test_final_and_export_transformers_4_reads_same_model(
    what: str, quick_zygote: Zygote, finished: FinishedRuns, tmp_path: Path, app_env: dict[str, str]
) -> None:
    run = finished("lora")
    folder, base = run / "final", run / "base" if what == "adapter" else ""
    if what == "merged":
        quick_zygote.run(tmp_path, f"run={run}", "to=out", "kind=merged", "dtype=fp32", module="app.export", code=0)
        folder = tmp_path / "out"
    plain = {name: value for name, value in app_env.items() if name != "PYTHONPATH"}
    now, before = read(plain, folder, base), read(transformers4.environment(plain), folder, base)
    assert (now["version"][:2], before["version"][:3]) == ("5.", "4.5")
    assert (now["ids"], now["end"]) == (before["ids"], before["end"])
    ours, theirs = (torch.tensor(each["logits"]) for each in (now, before))
    assert float((ours - theirs).norm() / ours.norm()) <= 1e-6
