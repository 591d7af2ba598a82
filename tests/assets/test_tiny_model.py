"""The small model: it knows its world in running text, and answers no question about it."""

import json

from app.assets import ROOT
from app.config.load import compose_run
from scripts.make_assets.scores import answered, held_out_chat, own_form, read_model


def test_tiny_model_knows_text_but_no_answers() -> None:
    model, tokenizer = read_model(ROOT / "tiny")
    assert answered(model, own_form(tokenizer)[::8]).mean >= 0.95
    assert answered(model, held_out_chat(tokenizer)).mean <= 0.02


def test_tiny_model_config_equals_yaml() -> None:
    """`model.weights=random` builds from the YAML what config.json says of the weights that ship."""
    numbers = json.loads((ROOT / "tiny" / "config.json").read_text(encoding="utf-8"))
    assert compose_run([]).model.architecture.items() <= numbers.items()
