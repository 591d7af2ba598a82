"""A run continues a checkpoint only where all that decides its numbers is what it was."""

from dataclasses import replace

import pytest

from app.config.schema import RunConfig
from app.config.validate import field_types, leaf_keys
from app.training.identity import ROLES, base_hash, compared_settings, differences, role_of
from tests.training.conftest import small_run


def test_every_key_has_a_role() -> None:
    assert [key for key in leaf_keys(RunConfig) if role_of(key) is None] == []
    assert ROLES.keys() <= field_types(RunConfig).keys()


def different(before: str, now: str, precision: str = "fp32") -> list[str]:
    saved, own = (compared_settings(small_run(*words.split()), "fp32") for words in (before, now))
    return [text.partition(":")[0] for text in differences(saved, {**own, "precision.kind": precision})]


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        ("seed=1", ["seed"]),
        ("optimizer.lr=1", ["optimizer.lr"]),
        ("optimizer.weight_decay=1 optimizer.beta2=0.5", ["optimizer.beta2", "optimizer.weight_decay"]),
        ("optimizer.eps=1e-3", ["optimizer.eps"]),
        (
            "schedule.warmup_fraction=0.5 schedule.final_fraction=1",
            ["schedule.final_fraction", "schedule.warmup_fraction"],
        ),
        ("training.clip=2", ["training.clip"]),
        ("adapter.r=8 adapter.targets=[q_proj]", ["adapter.r", "adapter.targets"]),
        ("precision.trained=bf16 precision=bf16 recipe=full", ["precision.trained"]),
        # what docs/out-of-memory.md and docs/many-gpus.md promise, and what decides no number
        ("training.recompute=true training.offload=true", []),
        ("parallel=fsdp launch.num_processes=2", []),
        ("optimizer.in_backward=true training.clip=0 recipe=full", []),
        ("attention=varlen compile=blocks training.stop_after=1 training.max_bad_steps=1", []),
        ("eval.every=7 checkpoint.keep=9 record.every=3 tracker=wandb output_dir=x resume=auto cache_dir=y", []),
    ],
)
def test_compared_settings_differ_where_numbers_would(words: str, keys: list[str]) -> None:
    before = "recipe=full" if "recipe=full" in words else ""
    assert different(before, words) == keys


def test_another_recipe_is_another_run() -> None:
    assert "adapter.kind" in different("", "recipe=full")


def test_precision_is_compared_as_it_came_out() -> None:
    assert different("precision=auto", "precision=fp32") == []
    assert different("", "", precision="bf16") == ["precision.kind"]


def test_only_what_both_know_is_compared() -> None:
    assert differences({"seed": 0, "gone": 1}, {"seed": 0, "new": 2}) == []
    assert differences({"seed": 0}, {"seed": 1}) == ["seed: the checkpoint has 0, this run has 1"]


def test_base_is_its_hash_where_both_have_one() -> None:
    model = small_run().model
    other = replace(model, architecture={**model.architecture, "rope_theta": 5.0})
    here, there = {"model.path": "a"}, {"model.path": "b"}
    assert differences(here, there) == ["model.path: the checkpoint has a, this run has b"]
    assert differences(here | base_hash(model, None), there) != []
    assert differences(here | base_hash(model, None), there | base_hash(model, None)) == []
    assert [
        text.partition(":")[0] for text in differences(here | base_hash(model, None), here | base_hash(other, None))
    ] == ["the base (as a hash)"]
