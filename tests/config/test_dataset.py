"""`dataset.mix` on the command line: sources by name, each key of each source an override like any other."""

from dataclasses import asdict

import pytest

from app.config.dataset import sources_of
from app.config.load import compose_run
from app.config.schema import RunConfig
from app.config.validate import parse_section
from tests.config.small import refusal_of

TWO = ("dataset=mix", "dataset.mix.chat.path=a.jsonl", "dataset.mix.code.path=b.jsonl")
CODE = "dataset.mix.code"
WRONG = [  # what is refused together
    {
        f"{CODE}.weigth=2": f"Unknown setting {CODE}.weigth. Did you mean {CODE}.weight?",
        f"{CODE}.weight=much": f"{CODE}.weight=much: expected a number.",
        "dataset.mix.chat.weight=-1": "dataset.mix.chat.weight=-1.0 must be at least 0",
        "dataset.mix.more.weight=1": "dataset.mix.more.path= is required. Set dataset.mix.more.path=...",
        f"{CODE}.max_rows=0": f"{CODE}.max_rows=0 must be at least 1.",
    },
    {
        f"{CODE}.format=messagess": f"{CODE}.format=messagess: expected one of messages, ",
        f"{CODE}.columns.txt=x": f"Unknown setting {CODE}.columns.txt. Did you mean {CODE}.columns.text?",
    },
    {f"{CODE}.columns.text=[x]": f"{CODE}.columns.text=['x']: expected a column name."},
    {f"{CODE}=3": f"{CODE}=3: {CODE} is a section. Set its keys, e.g. {CODE}.path=..."},
    {"dataset.mix=a.jsonl": "dataset.mix=a.jsonl: expected a mapping like {a: 1, b: 2}."},
    {
        "dataset.path=c.jsonl": "dataset.path=c.jsonl and dataset.mix both set the dataset.",
        "dataset.eval_split=test": "dataset.eval_split=test is not supported with dataset.mix.",
        "dataset.on_overflow=split": "=split is not supported for dataset.mix.chat.format=messages",
        f"{CODE}.columns={{input: 'a.*.x', output: 'b.*.y'}}": (
            f"{CODE}.columns.input=a.*.x {CODE}.columns.output=b.*.y: rows come from the elements of one list"
        ),
        f"{CODE}.sample=9": f"{CODE}.sample=9 and dataset.max_rows=8 both limit the rows. Keep one",
        "dataset.max_rows=8": "both limit the rows",
        "dataset.train_on=completion": f"is not supported for {CODE}.format=messages.",
    },
]


def test_mix_source_inherits_dataset_keys() -> None:
    more = (f"{CODE}.weight=2", f"{CODE}.format=text", f"{CODE}.columns.text=body", f"{CODE}.revision=v1")
    run = compose_run([*TWO, *more, "dataset.max_rows=7", "dataset.split=dev"])
    assert run.dataset.mix["code"].weight == 2.0
    chat, code = sources_of(run.dataset).values()
    assert (chat.path, chat.format, chat.max_rows, chat.revision) == ("a.jsonl", "messages", 7, None)
    assert (code.path, code.format, code.max_rows, code.revision) == ("b.jsonl", "text", 7, "v1")
    assert (code.columns.text, chat.columns.text, code.split) == ("body", "text", "dev")
    assert parse_section(RunConfig, asdict(run)) == run, "as it stands in a run.yaml"


def test_mix_as_one_mapping() -> None:
    given = "dataset.mix={chat: {path: a.jsonl}, code: {path: b.jsonl, weight: 0.5}}"
    assert compose_run(["dataset=mix", given]).dataset.mix["code"].weight == 0.5


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: next(iter(wrong)))
def test_mix_invalid_refused_with_all_problems(wrong: dict[str, str]) -> None:
    problems = refusal_of(*TWO, *wrong)
    assert [message for message in wrong.values() if not any(message in problem for problem in problems)] == []


@pytest.mark.parametrize("key", ["dataset.format", f"{CODE}.format"])
def test_mix_format_auto_allowed(key: str) -> None:
    assert compose_run([*TWO, f"{key}=auto"]).dataset.mix


def test_dataset_without_rows_refused() -> None:
    (problem,) = refusal_of("dataset=mix")
    assert problem.startswith("dataset.path=null: no dataset. Set dataset.path=FILE, or dataset.mix.NAME.path=")
    chat_off = "dataset.mix.chat.weight=0"
    assert list(sources_of(compose_run([*TWO, chat_off]).dataset)) == ["code"]
    assert refusal_of(*TWO, chat_off, f"{CODE}.weight=0") == [
        "dataset.mix: all weights are 0, so there is nothing to train on. Set dataset.mix.NAME.weight=1."
    ]


@pytest.mark.parametrize(
    ("given", "group"),
    [((), "auto"), (("dataset.format=question_answer",), "question_answer"), (("dataset.format=auto",), "auto")],
)
def test_own_rows_never_scored_on_the_sample(given: tuple[str, ...], group: str) -> None:
    (problem,) = refusal_of("dataset.path=m.jsonl", *given)
    assert problem.startswith(
        "dataset.path=m.jsonl would be evaluated on the included sample (dataset.eval_path=asset:"
    )
    assert f"Add dataset={group} to hold out" in problem
    assert compose_run(["dataset.path=m.jsonl", *given, f"dataset={group}"]).dataset.eval_path is None
    assert compose_run(["dataset.path=m.jsonl", *given, "dataset.eval_path=h.jsonl"]).dataset.path == "m.jsonl"


def test_sample_part_scored_on_the_sample() -> None:
    assert compose_run(["dataset.path=asset:sample/eval.jsonl"]).dataset.eval_path == "asset:sample/eval.jsonl"


@pytest.mark.parametrize(
    ("words", "length"),
    [
        (("recipe=dpo", "dataset=auto", "dataset.path=a"), 128),
        (("recipe=simpo", "dataset=preference", "dataset.path=a", "batching.tokens=300"), 150),
        (("recipe=orpo", "dataset=auto", "dataset.path=a", "batching.tokens=600"), 256),
        (("recipe=dpo", "dataset=auto", "dataset.path=a", "batching.packing=false"), 256),
        (("recipe=dpo", "dataset=auto", "dataset.path=a", "dataset.max_length=100"), 100),
        (("recipe=kto", "dataset=auto", "dataset.path=a"), 256),
        (("recipe=dpo", "model=llama"), 128),
    ],
)
def test_max_length_of_pairs_default_fits_bins(words: tuple[str, ...], length: int) -> None:
    assert compose_run(words).dataset.max_length == length


def test_max_length_of_pairs_typed_above_bins_refused() -> None:
    problem = refusal_of("recipe=dpo", "dataset=auto", "dataset.path=a", "dataset.max_length=256")
    assert "Set batching.tokens=512 or more, or dataset.max_length=128 or less." in str(problem)
    assert "model.suggest.length=abc" in str(refusal_of("recipe=dpo", "dataset=auto", "model.suggest.length=abc"))
