"""`model.rope`: the RoPE of transformers, in models, files and limits; what it is refused for."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from app.base.base_model import BaseModel
from app.base.tokenizer import load_tokenizer
from app.config.load import compose_run
from app.errors import ConfigError
from app.finished.save import save_model, with_rope
from tests.model.small import CAUSAL, built, config_of, full, model_config, numbers, sections
from tests.model.small import build_model as training_model_of

CPU = torch.device("cpu")
THETA = {"rope_theta": 1e4}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **THETA}
LLAMA3 |= {"original_max_position_embeddings": 16}
BY_LAYER = {
    "full_attention": {"rope_type": "linear", "factor": 2.0, **THETA},
    "sliding_attention": {"rope_type": "default", **THETA},
}


def scaled(kind: str, rope: str = "yarn", factor: float = 4.0, original: int | None = None, **changes: Any) -> Any:
    """The configuration of a run with this RoPE."""
    config = model_config(kind, architecture=numbers(kind, **changes))
    config = replace(config, rope=rope, rope_factor=factor, rope_original=original)
    return BaseModel(config, CAUSAL)


@pytest.mark.parametrize(
    ("kind", "rope", "original", "changes"),
    [
        ("llama", "yarn", None, {}),
        ("qwen3", "yarn", 32, {}),
        ("llama", "linear", None, {}),
        (
            "gpt_neox",
            "yarn",
            None,
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5, **THETA}},
        ),
    ],
)
def test_scaled_rope_equals_that_of_transformers(
    kind: str, rope: str, original: int | None, changes: dict[str, Any]
) -> None:
    """By hand, as in the README of Qwen3: rope_type, factor, original positions."""
    by_hand = {**changes.get("rope_parameters", THETA), "rope_type": rope, "factor": 4.0}
    by_hand |= {"original_max_position_embeddings": original or 64} if rope == "yarn" else {}
    positions = 4 * (original or 64)
    expected = config_of(kind, **changes | {"rope_parameters": by_hand, "max_position_embeddings": positions})
    base = scaled(kind, rope, original=original, **changes)
    assert base.numbers.rope_parameters == expected.rope_parameters
    assert base.numbers.max_position_embeddings == base.longest_row(10**6) == positions
    frequencies = [ROPE_INIT_FUNCTIONS[rope](config, "cpu") for config in (base.numbers, expected)]
    assert torch.equal(frequencies[0][0], frequencies[1][0])
    assert frequencies[0][1] == frequencies[1][1]
    theirs = built(kind, "eager", rope_parameters=by_hand, max_position_embeddings=positions)
    ours = transformers.AutoModelForCausalLM.from_config(base.numbers, attn_implementation="eager").eval()
    ours.load_state_dict(theirs.state_dict())
    ids = torch.arange(positions)[None] % 60 + 3
    with torch.no_grad():
        unscaled = built(kind, "eager", **changes | {"max_position_embeddings": positions})
        assert torch.equal(ours(ids).logits, theirs(ids).logits)
        assert not torch.allclose(ours(ids).logits, unscaled(ids).logits, atol=1e-3)


def test_full_attention_alone_is_scaled_where_layers_differ() -> None:
    config = scaled("gemma3_text", original=32, rope_parameters=BY_LAYER).numbers
    wanted = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, **THETA}
    assert config.rope_parameters == {**BY_LAYER, "full_attention": wanted}
    assert config.max_position_embeddings == 128


@pytest.mark.parametrize(
    ("kind", "factor", "changes", "message"),
    [
        (
            "llama",
            4.0,
            {"rope_parameters": LLAMA3},
            "rope_type=llama3, factor=4. To replace it, set model.rope_original",
        ),
        ("llama", 4.0, {"rope_parameters": LLAMA3}, "model.rope_original=16. To keep it, leave model.rope out."),
        (
            "gemma3_text",
            4.0,
            {"rope_parameters": BY_LAYER},
            "of its layers with full attention .the others keep theirs",
        ),
        ("gpt2", 4.0, {}, "gpt2 models have no RoPE. Leave model.rope out."),
    ],
)
def test_rope_that_cannot_be_scaled_is_refused(kind: str, factor: float, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _ = scaled(kind, factor=factor, **changes).numbers


def test_typed_original_replaces_another_scaling() -> None:
    base = scaled("llama", factor=8.0, original=16, rope_parameters=LLAMA3)
    wanted = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, **THETA}
    assert base.numbers.rope_parameters == wanted
    with pytest.raises(ConfigError, match=r"2 times 16 positions is 32, but the base has 64. Set model.rope_factor=5"):
        _ = scaled("llama", factor=2.0, original=16, rope_parameters=LLAMA3).numbers


@pytest.mark.parametrize("rope", ["yarn", "linear"])
def test_saved_model_has_the_rope_once(tmp_path: Path, rope: str) -> None:
    """A full model and a random base are read again with the settings of the run, also by transformers 4."""
    base = scaled("llama", rope)
    save_model(
        training_model_of(sections(base.config, full()), CPU, 0, ""),
        load_tokenizer(model_config(), needs_template=False),
        tmp_path,
    )
    again = BaseModel(replace(base.config, path=str(tmp_path), weights="pretrained"), CAUSAL)
    assert again.numbers.rope_parameters == base.numbers.rope_parameters
    assert again.numbers.max_position_embeddings == 256
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["rope_scaling"] == {k: v for k, v in base.numbers.rope_parameters.items() if k != "rope_theta"}


def test_config_of_composite_has_rope_in_its_text_part() -> None:
    rope = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, **THETA}, "max_position_embeddings": 128}
    text = {"model_type": "llama", "rope_theta": 1.0, "rope_scaling": {"type": "linear"}, "hidden_size": 8}
    merged = with_rope({"model_type": "llava", "text_config": text}, rope)
    expected = {**rope, **THETA, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    assert merged == {"model_type": "llava", "text_config": {"model_type": "llama", "hidden_size": 8, **expected}}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("model.rope_factor=4", "model.rope_factor=4 has no effect with model.rope=own"),
        ("model.rope_original=64", "model.rope_original=64 has no effect with model.rope=own"),
        ("model.rope=yarn model.rope_factor=1", "model.rope_factor=1.0 must be above 1"),
        ("model.rope=dynamic model.rope_factor=4", "longest position so far, so packed documents"),
        ("model.rope_scaling=yarn", "model.rope=yarn model.rope_factor=4"),
        ("model.weights=random model.rope=linear model.rope_factor=2 dataset.max_length=1025", "1024 positions"),
    ],
)
def test_wrong_rope_settings_are_refused(words: str, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        compose_run(words.split())
    assert message in str(refusal.value)


def test_preset_has_the_original_positions() -> None:
    model = compose_run(["model=qwen", "model.rope=yarn", "model.rope_factor=4"]).model
    assert model.scaled_positions(40_960) == 131_072
