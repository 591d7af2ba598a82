"""Saved models in plain transformers and PEFT, and torchao's log at import."""

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from app.base.source import base_path
from app.base.tokenizer import load_tokenizer
from app.finished.save import add_transformers_4_keys, save_model
from tests import transformers4
from tests.harness.python import printed_by, python
from tests.harness.runs import SMALL
from tests.model.small import built, config_of, distance, full, lora, model_config
from tests.model.test_save import FLAT, IDS, LLAMA3, logits, trained

# nothing of this program is imported
ELSEWHERE = """
import json, sys, warnings
from functools import partial
warnings.simplefilter("ignore", FutureWarning)
import torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
ids = torch.tensor(json.loads(sys.argv[1]))
tokens = []
load = partial(AutoModelForCausalLM.from_pretrained, attn_implementation="eager")  # sdpa of 4 caps no logits
for out, folder in zip(sys.argv[2::2], sys.argv[3::2]):
    try:
        base = json.load(open(folder + "/adapter_config.json"))["base_model_name_or_path"]
        from peft import PeftModel
        model = PeftModel.from_pretrained(load(base, dtype="float32"), folder)
    except FileNotFoundError:
        model = load(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi <|user|> there"}], tokenize=False)
    tokens.append(tokenizer(text, add_special_tokens=False).input_ids)
    with torch.no_grad():
        torch.save(model.eval()(ids).logits, out)
assert not [name for name in sys.modules if name.split(".")[0] == "app"]
print(json.dumps({"version": transformers.__version__, "tokens": tokens}))
"""
YARN = {"rope_type": "yarn", "rope_theta": 5e2, "factor": 4.0, "original_max_position_embeddings": 16}
PHI3_LONG = {"rope_type": "longrope", "rope_theta": 5e2, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
CASES: list[tuple[str, Any, dict[str, Any]]] = [
    ("llama", lora(), {}),
    ("gemma2", lora(), {}),
    ("gpt2", lora(), {}),
    ("mixtral", lora(), {}),
    ("llama", full(), {"rope_parameters": FLAT}),
    ("llama", full(), {"rope_parameters": LLAMA3 | {"rope_theta": 5e2}}),
    ("qwen3", full(), {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e2, "factor": 4.0}}),
    ("qwen3", full(), {"rope_parameters": YARN}),
    ("gemma2", full(), {}),
    ("mixtral", full(), {}),
    ("gpt_oss", full(), {"rope_parameters": FLAT}),
    ("gpt_neox", full(), {"rope_parameters": FLAT | {"partial_rotary_factor": 0.5}}),
    ("phi3", full(), {"rope_parameters": FLAT | {"partial_rotary_factor": 0.5}}),
    ("phi3", full(), {"rope_parameters": PHI3_LONG, "original_max_position_embeddings": 16}),
    ("qwen3_moe", full(), {}),
]


def test_saved_models_same_logits_elsewhere(tmp_path: Path, app_env: dict[str, str]) -> None:
    """In a fresh process, one for all kinds: starting it is what takes the time."""
    tokenizer = load_tokenizer(model_config(), needs_template=True)
    expected, arguments = [], []
    for i, (kind, adapter, changes) in enumerate(CASES):
        base = tmp_path / f"base{i}"
        built(kind, "eager", **changes).save_pretrained(str(base))
        add_transformers_4_keys(base, type(config_of(kind)))
        before = {f.name: sha256(f.read_bytes()).hexdigest() for f in base.iterdir()}
        config = model_config(path=str(base))
        training_model = trained(config, adapter, base=base_path(config, tmp_path))
        final = tmp_path / f"final{i}"
        save_model(training_model, tokenizer, final)
        expected.append(logits(training_model.language_model))
        assert distance(expected[-1], logits(built(kind, **changes))) > 1e-2, "training changed nothing"
        assert {f.name: sha256(f.read_bytes()).hexdigest() for f in base.iterdir()} == before
        arguments += [str(tmp_path / f"logits{i}.pt"), str(final)]
    said = []
    plain = {k: v for k, v in app_env.items() if k != "PYTHONPATH"}
    for version, env in (("5.", plain), ("4.", transformers4.environment(plain))):
        printed = printed_by("-c", ELSEWHERE, json.dumps(IDS.tolist()), *arguments, env=env, cwd=tmp_path)
        said.append(json.loads(printed.splitlines()[-1]))
        assert said[-1]["version"].startswith(version)
        for i, (case, ours) in enumerate(zip(CASES, expected, strict=True)):
            theirs = torch.load(tmp_path / f"logits{i}.pt", weights_only=True)
            assert distance(theirs, ours) <= 1e-6, (version, case)
    assert said[0]["tokens"] == said[1]["tokens"]


def test_screen_has_no_lines_of_torchao(tmp_path: Path, app_env: dict[str, str]) -> None:
    """In a process of its own: those of other tests have imported it before."""
    words = (*SMALL, "recipe=full", "quantization=qat", "dry_run=true", f"output_dir={tmp_path / 'run'}")
    ended = python("-m", "app.train", *words, cwd=tmp_path, env=app_env)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "torchao" not in ended.stdout
