"""adapter.start: what of an adapter's settings holds, and adapters of the hub."""

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from app.config.adapters import _from_hub, check_start, implied_settings, start_folder
from app.config.load import compose_run
from app.config.schema import AdapterConfig
from app.errors import ConfigError

FILE = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}


def adapter_in(folder: Path, **other: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({**FILE, **other}))
    (folder / "adapter_model.safetensors").touch()
    return folder


def test_composed_run_has_rank_scale_and_layers_of_its_start(tmp_path: Path) -> None:
    words = ["recipe=lora", f"adapter.start={adapter_in(tmp_path / 'first')}"]
    adapter = compose_run(words).adapter
    assert (adapter.r, adapter.alpha, adapter.targets) == (4, 8, ["q_proj", "v_proj"])
    assert compose_run([*words, "adapter.r=16"]).adapter.r == 16, "what is typed stays, and is refused later"
    with pytest.raises(ConfigError) as refused:
        compose_run(["recipe=full", words[1]])
    assert [text.partition("=")[0] for text in refused.value.problems] == ["adapter.start"]


OFT = {"peft_type": "OFT", "oft_block_size": 16, "module_dropout": 0.1, "coft": False, "block_share": None}


def test_composed_run_has_method_fields_and_layers_of_its_start(tmp_path: Path) -> None:
    """What is typed stays, and is refused by its name; dropout may change."""
    start = f"adapter.start={adapter_in(tmp_path / 'first', **OFT)}"
    words = ["recipe=lora", "adapter=peft", start]
    adapter = compose_run(words).adapter
    assert (adapter.method, adapter.targets, adapter.r) == ("OFT", ["q_proj", "v_proj"], 0)
    assert adapter.fields == {"r": 4, "lora_alpha": 8, "oft_block_size": 16, "coft": False}
    same = ("adapter.method=oft", "adapter.fields={oft_block_size: 16, module_dropout: 0.2}")
    assert not [*check_start(compose_run([*words, *same]))]
    for typed, meant in {
        "adapter.method=IA3": "adapter.method=OFT",
        "adapter.fields={oft_block_size: 8}": "adapter.fields.oft_block_size=16",
        "adapter.fields.coft=true": "adapter.fields.coft=false",
        "adapter.fields.block_share=true": "adapter.fields.block_share=null",
    }.items():
        (problem,) = check_start(compose_run([*words, typed]))
        assert problem.endswith(f"its method and fields cannot change. Set {meant}, or leave it out.")
    (problem,) = check_start(compose_run(["recipe=lora", start]))
    assert problem.endswith("it is an adapter of type OFT, not adapter=lora. Set adapter=peft.")


@pytest.mark.parametrize("odd", [{"r": "4"}, {"target_modules": ".*"}, {"target_modules": ["a b"]}])
def test_settings_of_other_types_are_not_taken(odd: dict[str, Any], tmp_path: Path) -> None:
    kept = implied_settings({"adapter.start": str(adapter_in(tmp_path / "first", **odd))})
    assert len(kept) == 2


def test_resumed_run_that_lost_its_start_keeps_what_it_began_with(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("adapter: {r: 8, alpha: 2.0, targets: [k_proj], start: gone}")
    wanted = {"adapter.r": 8, "adapter.alpha": 2.0, "adapter.targets": ["k_proj"]}
    for resume in ("auto", str(tmp_path), str(tmp_path / "checkpoints" / "step-000003")):
        typed = {"adapter.start": "gone", "resume": resume, "output_dir": str(tmp_path)}
        assert implied_settings(typed) == wanted
    assert implied_settings({"adapter.start": "gone", "output_dir": str(tmp_path)}) == {}


@pytest.mark.parametrize("start", ["a" * 300, "a" * 300 + "/b"])
def test_start_that_no_file_can_be_is_refused(start: str) -> None:
    (problem,) = check_start(compose_run(["recipe=lora", f"adapter.start={start}"]))
    assert "no adapter_config.json" in problem


def test_start_may_be_an_adapter_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    _from_hub.cache_clear()
    repository = tmp_path / "models--org--small"
    adapter_in(repository / "snapshots" / "0123abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123abc")
    found = start_folder(AdapterConfig(kind="lora", start="org/small"))
    assert found is not None
    assert found.name == "0123abc"
    assert implied_settings({"adapter.start": "org/small"})["adapter.r"] == 4
    assert start_folder(AdapterConfig(kind="lora", start="org/other")) == Path("org/other"), "which check_start refuses"
