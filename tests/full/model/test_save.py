"""Saved models and adapters used by transformers and PEFT alone."""

import json
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import torch

from app.model.build import base_path
from app.model.save import save_model
from app.model.tokenizer import load_tokenizer
from tests.model.small import built, distance, full, lora, model_config
from tests.model.test_save import IDS, folder_of, logits, trained

# nothing of this program is imported
ELSEWHERE = """
import json, sys, warnings
warnings.simplefilter("ignore", FutureWarning)
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
ids = torch.tensor(json.loads(sys.argv[1]))
for out, folder in zip(sys.argv[2::2], sys.argv[3::2]):
    try:
        base = json.load(open(folder + "/adapter_config.json"))["base_model_name_or_path"]
        from peft import PeftModel
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype="float32"), folder)
    except FileNotFoundError:
        model = AutoModelForCausalLM.from_pretrained(folder)
    assert AutoTokenizer.from_pretrained(folder).chat_template
    with torch.no_grad():
        torch.save(model.eval()(ids).logits, out)
assert not [name for name in sys.modules if name.split(".")[0] == "app"]
"""


def test_saved_models_same_logits_elsewhere(tmp_path: Path, app_env: dict[str, str]) -> None:
    """In a fresh process, one for all kinds: starting it is what takes the time."""
    cases = [
        ("llama", lora()),
        ("gemma2", lora()),
        ("gpt2", lora()),
        ("mixtral", lora()),
        ("llama", full()),
        ("gemma2", full()),
        ("mixtral", full()),
    ]
    tokenizer = load_tokenizer(model_config(), needs_template=True)
    expected, arguments = [], []
    for i, (kind, adapter) in enumerate(cases):
        base = folder_of(kind, tmp_path / f"base{i}")
        before = {f.name: sha256(f.read_bytes()).hexdigest() for f in base.iterdir()}
        config = model_config(path=str(base))
        training_model = trained(config, adapter, base=base_path(config, tmp_path))
        final = tmp_path / f"final{i}"
        save_model(training_model, tokenizer, final)
        expected.append(logits(training_model.language_model))
        assert distance(expected[-1], logits(built(kind))) > 1e-2, "training changed nothing"
        assert {f.name: sha256(f.read_bytes()).hexdigest() for f in base.iterdir()} == before
        arguments += [str(tmp_path / f"logits{i}.pt"), str(final)]
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, json.dumps(IDS.tolist()), *arguments],
        env={k: v for k, v in app_env.items() if k != "PYTHONPATH"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    for i, (case, ours) in enumerate(zip(cases, expected, strict=True)):
        theirs = torch.load(tmp_path / f"logits{i}.pt", weights_only=True)
        assert distance(theirs, ours) <= 1e-6, case
