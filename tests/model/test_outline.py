"""What is said of many layers after one was built is what all of them built would say."""

import pytest

from app.config.load import compose_run
from app.engine.ground import sections_of
from app.model.outline import Outline, base_of
from app.plan.planner import planned_choices

MASKED = ("model=bert", "task=masked", "dataset=text", "dataset.path=none.txt")


def outline(*words: str) -> Outline:
    run = compose_run(["model.weights=random", "attention=sdpa", *words])
    sections = sections_of(run, planned_choices(run.precision, "cpu"))
    return Outline(sections, base_of(sections, "sdpa"))


@pytest.mark.parametrize(
    "words",
    [
        ("recipe=full",),
        ("recipe=lora",),
        ("recipe=qlora", "adapter.targets=[q_proj,down_proj]"),
        ("recipe=full", "model.architecture.tie_word_embeddings=true"),
        ("recipe=lora", *MASKED),
        ("recipe=full", *MASKED),
        ("recipe=lora", "adapter.targets=[layers.2.mlp.up_proj,q_proj]"),
        ("recipe=lora", "adapter.targets=[layers.2.mlp.up_proj]"),
    ],
    ids=" ".join,
)
def test_what_is_trained_is_known_from_one_layer(words: tuple[str, ...]) -> None:
    made = outline(*words)
    whole = {name: p for name, p in made.network(made.depth).named_parameters() if p.requires_grad}
    known = made.trained(made.depth)
    assert list(known) == list(whole)
    assert [(p.shape, p.dtype, p.device) for p in known.values()] == [
        (p.shape, p.dtype, p.device) for p in whole.values()
    ]
    assert len({id(p) for p in known.values()}) == len(known)


def test_layers_differ_where_a_target_is_in_one_of_them() -> None:
    assert outline("recipe=lora").alike
    assert outline("recipe=full", "adapter.targets=[layers.2.mlp.up_proj]").alike, "nothing is adapted"
    assert not outline("recipe=lora", "adapter.targets=[layers.2.mlp.up_proj]").alike


def test_outlines_of_one_base_leave_it_as_it_is() -> None:
    run = compose_run(["model.weights=random", "attention=sdpa", "recipe=qlora"])
    sections = sections_of(run, planned_choices(run.precision, "cpu"))
    base = base_of(sections, "sdpa")

    def told() -> list[tuple[str, str]]:
        return [(name, type(module).__name__) for name, module in base.named_modules()]

    before, depth = told(), base.config.num_hidden_layers
    Outline(sections, base).network(2)
    Outline(sections, base).trained(depth)
    assert (told(), base.config.num_hidden_layers) == (before, depth)
