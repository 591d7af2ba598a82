import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, VeraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor

from app.adapters.adapters import read_adapter_config
from app.assets import ROOT
from app.base.base_model import model_class
from app.base.source import base_path
from app.base.tokenizer import load_tokenizer
from app.config.schema import AdapterConfig
from app.config.tasks import TASKS
from app.errors import CheckpointError, EnvironmentProblem
from app.finished import save
from app.finished.inference import load_tuned, load_tuned_tokenizer
from app.finished.save import needs_transformers_5, save_base, save_model, saved_tensors
from app.model.losses import TOKEN_LOSS
from app.model.training_model import TrainingModel
from tests.model.small import (
    CAUSAL,
    build_model,
    built,
    distance,
    documents_of,
    full,
    lora,
    model_config,
    numbers,
    sections,
    task_of,
    three_steps,
    training_model_of,
)

CPU = torch.device("cpu")
IDS = documents_of((10,))[0][None]


def folder_of(kind: str, place: Path) -> Path:
    built(kind, "eager").save_pretrained(str(place))
    return place


def trained(config: Any, adapter: AdapterConfig, precision: str = "fp32", base: str = "base") -> TrainingModel:
    return three_steps(build_model(sections(config, adapter, precision), CPU, 0, base))


def logits(lm: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = lm.eval()(IDS).logits
    return found


def test_an_adapter_folder_has_an_adapter_and_nothing_of_the_base(tmp_path: Path) -> None:
    from safetensors import safe_open

    config = model_config(path=str(folder_of("llama", tmp_path / "base")))
    training_model = trained(config, lora(r=4, alpha=8.0), "bf16", base=base_path(config, tmp_path))
    final = tmp_path / "final"
    save_model(training_model, load_tokenizer(model_config(), needs_template=True), final)
    written = json.loads((final / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(tmp_path / "base")
    assert (written["r"], written["lora_alpha"], written["task_type"]) == (4, 8.0, "CAUSAL_LM")
    assert set(written["target_modules"]) == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    with safe_open(str(final / "adapter_model.safetensors"), "pt") as file:
        names = list(file.keys())
        assert {file.get_tensor(name).dtype for name in names} == {torch.float32}
    assert all(".lora_A.weight" in name or ".lora_B.weight" in name for name in names)
    assert {f.name for f in final.iterdir()} >= {"tokenizer.json", "chat_template.jinja"}
    assert not list(final.glob("*.bin"))


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2", "mixtral"])
def test_a_random_base_is_kept_as_it_was_before_the_adapter(kind: str, tmp_path: Path) -> None:
    config = model_config(kind)
    place = tmp_path / "base"
    training_model = trained(config, lora(), base=base_path(config, place))
    tokenizer = load_tokenizer(config, needs_template=True)
    save_base(training_model, tokenizer, place)
    save_model(training_model, tokenizer, tmp_path / "final")
    base = build_model(sections(config, full()), CPU, 0, "").language_model
    assert distance(logits(load_tuned(tmp_path, config, CAUSAL, adapter=False)), logits(base)) <= 1e-6
    tuned = logits(load_tuned(tmp_path, config, CAUSAL, adapter=True))
    assert distance(tuned, logits(training_model.language_model)) <= 1e-6
    assert distance(tuned, logits(base)) > 1e-2


@pytest.mark.parametrize("limit", [None, 20_000])
@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2", "bert", "mixtral"])
def test_sharded_model_saved_tensor_by_tensor_equals_a_whole_one(
    kind: str, limit: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training_model = training_model_of(kind, full())
    tokenizer = load_tokenizer(model_config(), needs_template=True)
    if limit is not None:
        monkeypatch.setattr(save, "MAX_FILE_BYTES", limit)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    save_model(training_model, tokenizer, whole)
    save_model(training_model, tokenizer, parts, iter(saved_tensors(training_model).items()))
    for name in ("config.json", "generation_config.json"):
        files = [folder / name for folder in (whole, parts)]
        assert len({file.read_text() if file.exists() else "" for file in files}) == 1, name
    written = list(parts.glob("*.safetensors"))
    assert (len(written) > 1) == (limit is not None and kind != "mixtral"), "its tensors are joined in memory"
    left, right = load_file(whole / "model.safetensors"), dict[str, Tensor]()
    for file in written:
        right |= load_file(file)
    assert left.keys() == right.keys()
    assert all(left[name].equal(right[name]) for name in left)
    lm = model_class(task_of(kind)).from_pretrained(str(parts))
    expected = training_model.language_model.state_dict()
    assert all(each.equal(expected[name]) for name, each in lm.state_dict().items())


@pytest.mark.parametrize("method", [LoraConfig(use_dora=True), VeraConfig(r=4)], ids=["dora", "vera"])
def test_saved_tensors_have_all_of_an_adapter(method: Any, tmp_path: Path) -> None:
    """Magnitudes, which are trained beside the halves, and projections, which are buffers."""
    method.target_modules = {"q_proj", "o_proj"}
    network: Any = get_peft_model(built("llama"), method)
    training_model = TrainingModel(network, None, TASKS["causal"], TOKEN_LOSS)
    network.save_pretrained(str(tmp_path / "whole"))
    network.save_pretrained(str(tmp_path / "parts"), state_dict=saved_tensors(training_model))
    whole, parts = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    assert all(whole[name].equal(parts[name]) for name in whole)
    assert len(whole) == len(saved_tensors(training_model))


def test_a_tuned_model_answers_from_its_folder(tmp_path: Path) -> None:
    config = model_config(path=str(folder_of("llama", tmp_path / "model")))
    training_model = trained(config, full())
    tokenizer = load_tokenizer(model_config(), needs_template=True)
    save_model(training_model, tokenizer, tmp_path / "run" / "final")
    lm = load_tuned(tmp_path / "run", config, CAUSAL, adapter=True)
    assert not lm.training
    assert distance(logits(lm), logits(training_model.language_model)) <= 1e-6
    assert load_tuned_tokenizer(tmp_path / "run" / "final").chat_template == tokenizer.chat_template
    with pytest.raises(CheckpointError, match=r"adapter=false: .* is a whole model"):
        load_tuned(tmp_path / "run", config, CAUSAL, adapter=False)


def test_damaged_runs_are_told(tmp_path: Path) -> None:
    config = model_config()
    training_model = trained(config, lora(), base=base_path(config, tmp_path / "base"))
    tokenizer = load_tokenizer(config, needs_template=True)
    save_model(training_model, tokenizer, tmp_path / "final")
    with pytest.raises(CheckpointError, match=r"its randomly initialized base is missing \(it was .*base\)"):
        load_tuned(tmp_path, config, CAUSAL, adapter=True)
    save_base(training_model, tokenizer, tmp_path / "base")
    for file, error in (
        ("final/adapter_model.safetensors", CheckpointError),
        ("base/model.safetensors", EnvironmentProblem),
    ):
        content = (tmp_path / file).read_bytes()
        (tmp_path / file).write_bytes(content[: len(content) // 2])
        with pytest.raises(error, match="cannot be loaded"):
            load_tuned(tmp_path, config, CAUSAL, adapter=True)
        (tmp_path / file).write_bytes(content)
    load_tuned(tmp_path, config, CAUSAL, adapter=True)


def adapter_with(place: Path, **model: Any) -> Path:
    """An adapter saved with the tokenizer of a config."""
    training_model = build_model(sections(model_config(), lora()), CPU, 0, "org/name")
    save_model(training_model, load_tokenizer(model_config(**model), needs_template=False), place)
    return place


def test_save_tokenizer_unchanged_copies_files(tmp_path: Path) -> None:
    final = adapter_with(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (final / name).read_bytes() == (ROOT / "tiny" / name).read_bytes(), name


@pytest.mark.parametrize("in_config", [False, True])
def test_save_tokenizer_with_another_template_changes_only_it(in_config: bool, tmp_path: Path) -> None:
    source = Path(shutil.copytree(ROOT / "tiny", tmp_path / "source"))
    if in_config:
        template = (source / "chat_template.jinja").read_text()
        (source / "chat_template.jinja").unlink()
        config = json.loads((source / "tokenizer_config.json").read_text()) | {"chat_template": template}
        (source / "tokenizer_config.json").write_text(json.dumps(config))
        same = adapter_with(tmp_path / "same", tokenizer=str(source))
        assert (same / "tokenizer_config.json").read_bytes() == (source / "tokenizer_config.json").read_bytes()
        assert not (same / "chat_template.jinja").exists()
    final = adapter_with(tmp_path / "final", tokenizer=str(source), chat_template="chatml")
    written = load_tuned_tokenizer(final)
    expected = load_tokenizer(model_config(chat_template="chatml"), needs_template=True)
    assert written.chat_template == expected.chat_template
    config = json.loads((final / "tokenizer_config.json").read_text())
    assert config.pop("chat_template") == expected.chat_template
    before = json.loads((source / "tokenizer_config.json").read_text())
    before.pop("chat_template", None)
    assert config == before
    assert (final / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_save_tokenizer_without_class_names_it_for_an_adapter(tmp_path: Path) -> None:
    """As that of GPT-2 on the hub, whose class follows from a config.json that an adapter has not."""
    source = Path(shutil.copytree(ROOT / "tiny", tmp_path / "source"))
    (source / "tokenizer_config.json").write_text('{"model_max_length": 512}')
    (source / "config.json").write_text(json.dumps(numbers("llama")))
    final = adapter_with(tmp_path / "final", tokenizer=str(source))
    assert load_tuned_tokenizer(final)("Hi there").input_ids == load_tuned_tokenizer(source)("Hi there").input_ids


FLAT = {"rope_type": "default", "rope_theta": 5e5}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16}
ROPES = [
    ("llama", FLAT, {"rope_theta": 5e5, "rope_scaling": None}),
    ("llama", LLAMA3 | {"rope_theta": 5e5}, {"rope_theta": 5e5, "rope_scaling": LLAMA3}),
    ("phi3", FLAT | {"partial_rotary_factor": 0.5}, {"rope_theta": 5e5, "partial_rotary_factor": 0.5}),
    ("gpt_neox", FLAT | {"partial_rotary_factor": 0.5}, {"rotary_emb_base": 5e5, "rotary_pct": 0.5}),
    ("gemma3_text", None, None),
]


@pytest.mark.parametrize(("kind", "rope", "expected"), ROPES)
def test_save_model_writes_rope_for_transformers_4(
    kind: str, rope: dict[str, Any] | None, expected: dict[str, Any] | None, tmp_path: Path
) -> None:
    changes = {} if rope is None else {"rope_parameters": rope}
    config = model_config(kind, architecture=numbers(kind, **changes))
    training_model = build_model(sections(config, full()), CPU, 0, "")
    save_model(training_model, load_tokenizer(model_config(), needs_template=False), tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert needs_transformers_5(tmp_path) == (expected is None)
    assert {key: written[key] for key in expected or {}} == (expected or {})
    again = type(training_model.language_model.config).from_pretrained(str(tmp_path))
    assert again.rope_parameters == training_model.language_model.config.rope_parameters


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an adapter of a random base."""
    run, config = tmp_path_factory.mktemp("tuned"), model_config()
    training_model = trained(config, lora(), base=base_path(config, run / "base"))
    tokenizer = load_tokenizer(model_config(), needs_template=True)
    save_model(training_model, tokenizer, run / "final")
    return run


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"target_modules": "(a+)+$"}, "target_modules="),
        ({"target_modules": ["q_proj", "(a+)+$"]}, "target_modules="),
        ({"target_modules": []}, "target_modules="),
        ({"modules_to_save": ["(a+)+b"]}, "modules_to_save="),
        ({"exclude_modules": "(a+)+$"}, "exclude_modules="),
        ({"rank_pattern": {"(a+)+": 4}}, "rank_pattern="),
        ({"layers_pattern": "(a+)+", "layers_to_transform": [0]}, "layers_pattern="),
        ({"megatron_config": {"a": 1}, "megatron_core": "antigravity"}, "megatron_config="),
        ({"init_lora_weights": "pissa"}, "init_lora_weights=pissa"),
        ({"peft_type": "PROMPT_TUNING", "tokenizer_kwargs": {"trust_remote_code": True}}, "peft_type=PROMPT_TUNING"),
        ({"r": True}, "r=True"),
        ({"lora_alpha": None}, "lora_alpha=None"),
        (None, "cannot be read"),
        ([], "is not an adapter"),
        ("weights", "adapter_model.safetensors is missing"),
    ],
)
def test_adapter_that_no_run_wrote_is_refused(tuned: Path, tmp_path: Path, changes: Any, said: str) -> None:
    final = Path(shutil.copytree(tuned / "final", tmp_path / "final"))
    file = final / "adapter_config.json"
    assert read_adapter_config(final)["peft_type"] == "LORA"
    if isinstance(changes, dict):
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    elif changes == "weights":
        (final / "adapter_model.safetensors").rename(final / "adapter_model.bin")
    else:
        file.write_text("{" if changes is None else json.dumps(changes))
    with pytest.raises(CheckpointError, match=said):
        read_adapter_config(final)
