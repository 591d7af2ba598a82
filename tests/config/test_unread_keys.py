"""Keys that are typed and that nothing in the run reads."""

import pytest

from app.config.load import compose_run
from tests.config.small import refusal_of

UNREAD = [
    (
        "recipe=full adapter.r=8",
        ["adapter.r=8: recipe=full trains no adapter, so it changes nothing. Leave it out, or choose recipe=lora."],
    ),
    (
        "adapter=none adapter={r: 8}",
        ["adapter.r=8: adapter=none does not read it, so it changes nothing. Leave it out, or choose adapter=lora."],
    ),
    ("optimizer=sgd optimizer.beta1=0.8 optimizer.eps=1e-6", ["optimizer.beta1=0.8: opt", "optimizer.eps=1e-06: opt"]),
    ("optimizer=lion_8bit optimizer.momentum=0.5", ["choose optimizer=muon or sgd."]),
    ("schedule.decay_fraction=0.1", ["schedule.decay_fraction=0.1: schedule=cosine does not read it"]),
    ("schedule=constant schedule.final_fraction=0.1", ["choose schedule=cosine or linear or wsd."]),
    ("task.mask_share=0.1", ["task.mask_share=0.1: task=causal does not read it"]),
    ("quantization.double_quant=true", ["Leave it out, or choose quantization=fp4 or nf4."]),
    ("quantization=fp8 quantization.double_quant=true", ["quantization=fp8 does not read it"]),
    (
        "compile.graphs=false tracker.project=a",
        ["compile.graphs=false: compile=auto", "tracker.project=a: tracker=none"],
    ),
    ("task.labels=[a,b]", ["task.labels=[a, b] means nothing for task=causal."]),  # of a rule, once
    ("optimizer.momentum=0.5 batching.tokens=9", ["dataset.max_length=256 is more", "optimizer.momentum=0.5: opt"]),
]
READ = (
    "recipe=qlora adapter.r=8 quantization.double_quant=false optimizer.eps=1e-6",
    "optimizer=muon optimizer.momentum=0.8 optimizer.beta2=0.95 optimizer.in_backward=false",
    "schedule=wsd schedule.decay_fraction=0.1 schedule.final_fraction=0.1",
    "experiment=llama_70b_small recipe=full quantization=none optimizer=adamw dataset=text dataset.path=a",  # its r=16
)


def words_of(line: str) -> list[str]:
    return line.replace("{r: 8}", "{r:8}").split()


@pytest.mark.parametrize(("line", "parts"), UNREAD, ids=[line for line, _ in UNREAD])
def test_typed_key_that_nothing_reads_refused(line: str, parts: list[str]) -> None:
    problems = refusal_of(*words_of(line))
    assert len(problems) == len(parts)
    for problem, part in zip(problems, parts, strict=True):
        assert part in problem


@pytest.mark.parametrize("line", READ)
def test_typed_key_that_is_read_and_key_of_yaml_taken(line: str) -> None:
    assert compose_run(words_of(line))
