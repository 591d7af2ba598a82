"""Initial adapters made by plain PEFT, and the reference of a preference loss."""

import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.numpy import save
from torch import Tensor

from app.adapters.adapters import short_names
from app.base.base_model import BaseModel
from app.base.tokenizer import load_tokenizer
from app.base.weight_files import Names
from app.config.load import compose_run
from app.config.schema import RunConfig
from app.errors import CheckpointError
from app.files import checksummed_folder
from app.finished.save import save_model
from app.training.initial_model import _key, _share, load_start, read_reference
from tests.model.small import CAUSAL, build_model, built, model_config, sections

IDS = torch.arange(3, 20)[None]
CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "drawn": ({"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}, ["q_proj", "v_proj"]),
    "regular expression": ({"target_modules": r".*\.(q|v)_proj"}, ["q_proj", "v_proj"]),
    "numbered layers": (
        {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1]},
        ["model.layers.1.mlp.up_proj", "model.layers.1.self_attn.q_proj"],
    ),
    "first layer": ({"target_modules": ["q_proj"], "layers_to_transform": 0}, ["model.layers.0.self_attn.q_proj"]),
    "excluded": ({"target_modules": ["q_proj", "o_proj"], "exclude_modules": ["o_proj"]}, ["q_proj"]),
}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    built("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def plain_adapter(folder: Path, **settings: Any) -> Tensor:
    """Save an adapter of plain PEFT and return its logits."""
    config = LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **{"init_lora_weights": False} | settings)
    network = get_peft_model(built("llama", attention="eager"), config)
    network.save_pretrained(str(folder))
    return logits(network)


@torch.no_grad()
def logits(lm: Any) -> Tensor:
    logits: Tensor = lm.eval()(input_ids=IDS).logits
    return logits


def run_from(start: Path) -> RunConfig:
    return compose_run(["recipe=lora", f"adapter.start={start}"])


@pytest.mark.parametrize("case", CASES)
def test_adapter_of_plain_peft_is_loaded_and_saved_for_it(case: str, base: Path, tmp_path: Path) -> None:
    settings, targets = CASES[case]
    expected = plain_adapter(tmp_path / "first", **settings)
    config, run = model_config(path=str(base)), run_from(tmp_path / "first")
    run.adapter.targets = short_names(run.adapter.targets, BaseModel(config, CAUSAL).on_meta())
    assert sorted(run.adapter.targets) == targets
    model = build_model(sections(config, run.adapter), torch.device("cpu"), 0, str(base))
    load_start(run, model, None, Names())
    torch.testing.assert_close(logits(model.language_model), expected)
    save_model(model, load_tokenizer(model_config(), needs_template=True), tmp_path / "final")
    theirs = PeftModel.from_pretrained(built("llama", attention="eager"), str(tmp_path / "final"))
    torch.testing.assert_close(logits(theirs), expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bias": "all"}, r"bias=all \(trains biases of the base\)"),
        ({"lora_bias": True}, r"lora_bias=True \(adapter layers with a bias\)"),
        ({"init_lora_weights": "pissa"}, r"init_lora_weights=pissa \(changes the base, unless PEFT converted it"),
    ],
)
def test_adapter_of_plain_peft_that_is_more_is_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    plain_adapter(tmp_path / "first", target_modules=["q_proj"])
    file = tmp_path / "first" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    model: Any = None
    with pytest.raises(CheckpointError, match=rf"not supported: {message}.*merge it into its base with PEFT"):
        load_start(run_from(tmp_path / "first"), model, None, Names())


def test_references_of_other_vocabularies_are_others() -> None:
    def key(*words: str) -> str:
        run = compose_run(["recipe=dpo", "model=tiny", *words])
        data = SimpleNamespace(train=SimpleNamespace(fingerprint="rows"), eval=None)
        choices = SimpleNamespace(precision="fp32", attention="sdpa")
        plan: Any = SimpleNamespace(run=run, rows=SimpleNamespace(data=data), choices=choices)
        return _key(plan, "weights")

    assert key("preference.beta=0.5") == key() != key("model.vocab_size=2048")


def test_runs_that_end_at_once_share_one_whole_reference(tmp_path: Path) -> None:
    scores, together = {row: (float(row), 0.5) for row in range(5000)}, Barrier(4, timeout=10)

    def share(number: int) -> None:
        together.wait()
        _share(tmp_path / f"kept-{number // 4}", scores)

    with ThreadPoolExecutor(4) as runs:
        list(runs.map(share, range(20)))
    assert sorted(folder.name for folder in tmp_path.iterdir()) == [f"kept-{number}" for number in range(5)]
    assert all(read_reference(folder) == scores for folder in tmp_path.iterdir())


@pytest.mark.parametrize(
    "stored",
    [
        pickle.dumps({"rows": [1]}),
        save({"row": np.arange(2, dtype=np.uint64), "log_probabilities": np.zeros((2, 2))}),
        save({"rows": np.arange(2, dtype=np.uint64), "log_probabilities": np.full((2, 2), np.nan)}),
        save({"rows": np.arange(3, dtype=np.uint64), "log_probabilities": np.zeros((2, 2))}),
        save({"rows": np.arange(2, dtype=np.uint64), "log_probabilities": np.zeros(2)}),
    ],
    ids=["pickle", "other names", "NaN", "fewer rows", "another shape"],
)
def test_reference_with_another_content_is_refused(stored: bytes, tmp_path: Path) -> None:
    """Its checksum is right: whoever sends a folder may have written that too."""
    with checksummed_folder(tmp_path / "reference") as folder:
        (folder / "answers.safetensors").write_bytes(stored)
    with pytest.raises(CheckpointError, match=r"answers\.safetensors cannot be read \(.*Restore the folder, or"):
        read_reference(tmp_path / "reference")
