"""`dataset.mix` on the command line: sources by name, each key of each source an override like any other."""

from dataclasses import asdict

import pytest

from app.config.dataset import sources_of
from app.config.load import checked, compose_run
from app.config.schema import RunConfig
from app.errors import ConfigError

TWO = ("dataset=mix", "dataset.mix.chat.path=a.jsonl", "dataset.mix.code.path=b.jsonl")


def problems(*overrides: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as error:
        compose_run(overrides)
    return error.value.problems


def test_a_source_has_what_it_was_given_and_the_rest_of_the_dataset() -> None:
    more = ("dataset.mix.code.weight=2", "dataset.mix.code.format=text", "dataset.mix.code.columns.text=body")
    run = compose_run(
        [*TWO, *more, "dataset.max_rows=7", "dataset.mix.code.revision=v1", "dataset.split=dev"]
    )
    assert run.dataset.mix["code"].weight == 2.0
    chat, code = sources_of(run.dataset).values()
    assert (chat.path, chat.format, chat.max_rows, chat.revision) == ("a.jsonl", "messages", 7, None)
    assert (code.path, code.format, code.max_rows, code.revision) == ("b.jsonl", "text", 7, "v1")
    assert (code.columns.text, chat.columns.text, code.split) == ("body", "text", "dev")
    assert checked(asdict(run), RunConfig) == run, "as it stands in a run.yaml"


def test_sources_as_one_mapping() -> None:
    given = "dataset.mix={chat: {path: a.jsonl}, code: {path: b.jsonl, weight: 0.5}}"
    assert compose_run(["dataset=mix", given]).dataset.mix["code"].weight == 0.5


def test_a_source_without_weight_is_none() -> None:
    assert list(sources_of(compose_run([*TWO, "dataset.mix.chat.weight=0"]).dataset)) == ["code"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            "dataset.mix.code.weigth=2",
            "dataset.mix.code.weigth is not a key. Did you mean dataset.mix.code.weight?",
        ),
        ("dataset.mix.code.weight=much", "dataset.mix.code.weight=much: expected a number."),
        ("dataset.mix.code.weight=-1", "dataset.mix.code.weight=-1.0 must be at least 0"),
        ("dataset.mix.more.weight=1", "dataset.mix.more.path has no value. Give dataset.mix.more.path=..."),
        ("dataset.mix.code.max_rows=0", "dataset.mix.code.max_rows=0 must be at least 1."),
        (
            "dataset.mix.code=3",
            "dataset.mix.code=3: dataset.mix.code is a section. Give its keys, such as dataset.mix",
        ),
        ("dataset.mix=a.jsonl", "dataset.mix=a.jsonl: expected a mapping like {a: 1, b: 2}."),
        ("dataset.mix.code.format=messagess", "dataset.mix.code.format=messagess is none of messages, "),
        (
            "dataset.mix.code.columns.txt=x",
            "dataset.mix.code.columns.txt is not a key. Did you mean dataset.mix.code.columns.text?",
        ),
        (
            "dataset.mix.code.columns.text=[x]",
            "dataset.mix.code.columns.text=['x']: expected the name of a column.",
        ),
        ("dataset.path=c.jsonl", "dataset.path=c.jsonl and dataset.mix both name the rows."),
        ("dataset.eval_split=test", "dataset.eval_split=test says not of which source of dataset.mix."),
        (
            "dataset.on_overflow=split",
            "dataset.on_overflow=split would tear a row of dataset.mix.chat.format=messages",
        ),
        (
            "dataset.mix.code.columns={input: 'a.*.x', output: 'b.*.y'}",
            "dataset.mix.code.columns.input=a.*.x dataset.mix.code.columns.output=b.*.y: the elements of one list",
        ),
        ("dataset.columns.output=a.*.b.*.c", "dataset.columns.output=a.*.b.*.c: a * stands for each element"),
        ("dataset.train_on=completion", "means nothing for dataset.mix.code.format=messages."),
    ],
)
def test_what_is_wrong_with_a_mix(given: str, message: str) -> None:
    assert any(problem.startswith(message) or message in problem for problem in problems(*TWO, given))


@pytest.mark.parametrize("key", ["dataset.format", "dataset.mix.code.format"])
def test_formats_of_a_mix_may_be_recognised(key: str) -> None:
    assert compose_run([*TWO, f"{key}=auto"]).dataset.mix


def test_all_problems_at_once() -> None:
    found = problems(
        *TWO, "dataset.mix.code.weigth=2", "dataset.mix.chat.weight=x", "dataset.mix.more.weight=1"
    )
    assert len(found) == 3


def test_no_rows_at_all() -> None:
    [problem] = problems("dataset=mix")
    assert problem.startswith(
        "dataset.path=null names no rows. Give dataset.path=FILE, or dataset.mix.NAME.path="
    )
    off = [f"dataset.mix.{name}.weight=0" for name in ("chat", "code")]
    assert problems(*TWO, *off) == (
        "dataset.mix: every weight is 0, so nothing is trained on. Set dataset.mix.NAME.weight=1.",
    )
