"""Names of a weight: translated in app/base/weight_files.py alone, and back to the same one."""

import re
from pathlib import Path

import app
from app.base.weight_files import Names, in_peft

PARTS = Names((("model", "model.language_model"), ("lm_head", "lm_head")))
ROOT = Path(app.__file__).parent
TRANSLATES = ("base/weight_files.py", "config/adapters.py")  # the last has no torch


def test_names_of_text_part_translated_both_ways() -> None:
    for name in ("model.layers.0.mlp.up_proj.weight", "lm_head.weight"):
        assert PARTS.of_trained(PARTS.of_folder(name)) == name
    assert PARTS.of_folder("model.norm.weight") == "model.language_model.norm.weight"
    assert PARTS.of_trained("model.vision_tower.norm.weight") is None
    assert PARTS.of_folder("modeled.weight") == "modeled.weight", "part of a word"
    assert PARTS.of_adapter(in_peft("model.norm.weight")) == in_peft("model.language_model.norm.weight")
    assert PARTS.of_adapter("base_model.vera_A") == "base_model.vera_A", "shared by all layers"


def test_names_of_plain_model_unchanged() -> None:
    plain = Names()
    assert not plain.is_part
    assert plain.of_folder("a.weight") == plain.of_trained("a.weight") == "a.weight"
    assert plain.of_adapter(in_peft("a.weight")) == in_peft("a.weight")


def test_names_in_files_by_rename_and_conversion() -> None:
    names = PARTS.with_files(
        {"model.language_model.norm.weight": "language_model.norm.weight", "model.vision.norm.weight": "vision.weight"},
        ["model.language_model.layers.0.mlp.experts.0.up_proj.weight"],
    )
    assert names.files == {
        "model.norm.weight": "language_model.norm.weight",
        "model.layers.0.mlp.experts.0.up_proj.weight": "model.language_model.layers.0.mlp.experts.0.up_proj.weight",
    }
    assert names.of_file("language_model.norm.weight") == "model.norm.weight"
    assert names.of_file("vision.weight") is None


def test_names_translated_in_one_module() -> None:
    by_hand = re.compile(r"base_model\.model\.|PEFT_PREFIX|names\.places|removeprefix\(.*(network|base_model)")
    found = {
        str(file.relative_to(ROOT)) for file in ROOT.rglob("*.py") if by_hand.search(file.read_text(encoding="utf-8"))
    }
    assert found == set(TRANSLATES)
