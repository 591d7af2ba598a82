"""`batching.packing=auto`: packed or padded, by what is proven for the kind of model."""

from dataclasses import replace
from typing import Any

import pytest

from app.base.base_model import BaseModel
from app.config.schema import RunConfig
from app.config.tasks import task_of
from app.errors import ConfigError
from app.training.auto_settings import choose, with_packing
from tests.training.conftest import small_run

SIZES: dict[str, dict[str, Any]] = {
    "nemotron": {"num_key_value_heads": 2},  # mixes documents of a row
    "bloom": {},  # does not call the interface
}


def run_of(kind: str, *overrides: str) -> RunConfig:
    run = small_run("attention=auto", *overrides)
    return replace(run, model=replace(run.model, architecture={"model_type": kind, **SIZES.get(kind, {})}))


def settled(run: RunConfig) -> tuple[RunConfig, list[str]]:
    said: list[str] = []
    return with_packing(run, base_of(run), said.append), said


def base_of(run: RunConfig) -> BaseModel:
    return BaseModel(run.model, task_of(run.task))


def test_packing_auto_is_true_for_a_proven_kind_and_says_nothing() -> None:
    run, said = settled(run_of("llama"))
    assert (run.batching.packing, said) == (True, [])


@pytest.mark.parametrize(("kind", "attention"), [("nemotron", "sdpa"), ("bloom", "own")])
def test_packing_auto_pads_other_kinds_aloud(kind: str, attention: str) -> None:
    run, said = settled(run_of(kind))
    assert run.batching.packing is False
    assert len(said) == 1
    assert said[0].startswith(f"note    batching: padded rows, because documents of kind {kind} cannot be kept apart")
    assert choose(run, base_of(run), {}).attention == attention


def test_packing_auto_goes_with_the_attention_that_is_typed() -> None:
    run, said = settled(run_of("llama", "attention=own"))
    assert (run.batching.packing, len(said)) == (False, 1)


@pytest.mark.parametrize(
    ("kind", "overrides", "message"),
    [
        (
            "nemotron",
            ("batching.packing=true",),
            r"^batching.packing=true: a model of kind nemotron .* batching\.packing=auto\.$",
        ),
        ("bloom", ("attention=sdpa",), r"^attention=sdpa: a model of kind bloom .* Set attention=auto\.$"),
        ("nemotron", ("batching.tokens=auto",), r"padded rows have no bins.* kind nemotron cannot be kept apart"),
    ],
)
def test_packing_of_padded_kinds_is_refused_with_the_key(kind: str, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settled(run_of(kind, *overrides))


def test_packing_typed_as_false_stays() -> None:
    assert settled(run_of("llama", "batching.packing=false"))[0].batching.packing is False
