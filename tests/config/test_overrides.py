"""The words of the command line: what is refused, how, and what reaches the run."""

from typing import Any

import pytest

from app.config.load import checked_arguments, compose_run, compose_runs
from app.config.overrides import check_overrides, is_sweep, split_words
from app.config.schema import RunConfig
from app.errors import ConfigError
from tests.config.small import refusal_of

REFUSED = [
    ("", "'' is not an override. Write key=value or group=choice."),
    ("seed", "'seed' is not an override."),
    ("=3", "'=3' is not an override."),
    ("model.=3", "'model.=3' cannot be read"),
    ("~seed", "~seed: nothing can be taken out of a run."),
    ("~resume", "Set resume=null."),
    ("~adapter", "Set adapter=none."),
    ("model@here=tiny", "model@here=tiny: model has one place in a run. Write model=..."),
    (
        "model=null",
        "model=null: there is no such model. Choose one of bert, folder, llama, llama_70b, mistral, modernbert,",
    ),
    ("model=_hub", "model=_hub: there is no such model."),
    ("model=Llama", "Did you mean llama?"),
    ("recipe=loar", "recipe=loar: there is no such recipe. Did you mean lora?"),
    (
        "modl=llama",
        "modl is neither a key nor a group. Did you mean "
        "model=bert|folder|llama|llama_70b|mistral|modernbert|qwen|tiny?",
    ),
    ("seed=1,2", "seed=1,2: several values are a sweep, which -m starts: python -m app.train -m seed=..."),
    ("recipe=full,lora", "recipe=full,lora: several values are a sweep"),
    ("seed=range(1,3)", "several values are a sweep"),
    ("dataset.path=a,b", "For text with a comma in it write 'dataset.path=\"a,b\"'."),
    ("adapter.targets=a,b", "For a list write adapter.targets=[a,b]."),
    ("hydra.mode=MULTIRUN", "hydra.mode=MULTIRUN: a sweep is started by -m"),
    ("hydra.mode=multirun", "hydra.mode"),
    ("hydra.moode=RUN", "hydra.moode"),
    ("seed=${sed}", "seed: Interpolation key 'sed' not found."),
    ("seed=${oc.env:NO_SUCH_NAME}", "seed: Environment variable 'NO_SUCH_NAME' not found."),
    ("dataset={pth: a}", "dataset.pth is not a key. Did you mean dataset.path?"),
    ("model.suggest=3", "model.suggest=3: model.suggest is a section."),
    ("model.architecture.hidden_size=64", "would not be read: model.weights=pretrained has its numbers"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED, ids=[given for given, _ in REFUSED])
def test_it_is_refused_with_one_message(given: str, message: str) -> None:
    (problem,) = refusal_of(given)
    assert message in problem


TAKEN: list[list[tuple[str, str, Any]]] = [
    [
        ("model.weights=random", "model.weights", "random"),
        ("model.architecture.hidden_size=64", "model.architecture.hidden_size", 64),
        ("model.architecture.rope_scaling={type: linear}", "model.architecture.rope_scaling.type", "linear"),
        ("+model.architecture.another=3", "model.architecture.another", 3),
        ("++seed=5", "seed", 5),
        ("adapter.targets=[q_proj,v_proj]", "adapter.targets", ["q_proj", "v_proj"]),
        ("dataset.columns={messages: talk}", "dataset.columns.messages", "talk"),
        ("dataset={max_rows: 3}", "dataset.max_rows", 3),
        ("eval={every: 7}", "eval.every", 7),
        ("training.max_steps=null", "training.max_steps", None),
        ('dataset.path="a=b,c.jsonl"', "dataset.path", "a=b,c.jsonl"),
        ("output_dir=~/my runs", "output_dir", "~/my runs"),
        ("model.revision=12e4567", "model.revision", "12e4567"),
    ],
    [
        ("dataset.path=a=b.jsonl", "dataset.path", "a=b.jsonl"),
        ("output_dir=a(b)", "output_dir", "a(b)"),
        ("+seed=6", "seed", 6),
        ("model.revision=007", "model.revision", "007"),
        ("tracker.project=1.50", "tracker.project", "1.50"),
        ("+model=llama", "model.architecture.num_hidden_layers", 32),
        ("cache_dir=${seed}", "cache_dir", "6"),
        ("experiment=null", "training.max_steps", None),
        ("debug=null", "record.every", 5),
    ],
    [
        ("++model=qwen", "model.architecture.num_hidden_layers", 36),
        ("+experiment=first_run", "seed", 0),
        ("++debug=fast", "record.every", 1),
    ],
]


def at(run: Any, key: str) -> Any:
    for name in key.split("."):
        run = run[name] if isinstance(run, dict) else getattr(run, name)
    return run


@pytest.mark.parametrize("taken", TAKEN)
def test_it_reaches_the_run(taken: list[tuple[str, str, Any]]) -> None:
    run = compose_run([given for given, _, _ in taken])
    assert [(key, at(run, key)) for _, key, _ in taken] == [(key, value) for _, key, value in taken]


def test_the_last_one_wins() -> None:
    run = compose_run(["seed=1", "model=llama", "debug=fast", "seed=2", "model=qwen", "~debug"])
    assert (run.seed, run.model.path, run.training.max_steps) == (2, "Qwen/Qwen3-8B", None)


def test_what_was_checked_can_be_checked_again() -> None:
    given = ["seed=1", "+model=llama", "output_dir=a=b", "model.revision=1e5"]
    once = check_overrides(given, RunConfig)
    assert check_overrides(once, RunConfig) == once


def test_all_problems_of_a_command_line_come_at_once() -> None:
    problems = refusal_of("sed=1", "model=lllama", "training.max_stps=3", "~seed", "x", "+adapter.rr=2")
    assert len(problems) == 6


def test_switches_and_settings_may_be_mixed() -> None:
    words = ["seed=1", "--cfg", "job", "adapter.r=3"]
    assert split_words(words) == (["seed=1", "adapter.r=3"], ["--cfg", "job"])
    assert checked_arguments(words) == ["--cfg", "job", "++seed=1", "++adapter.r=3"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-m", "seed=1,2"], "-m starts a sweep, and this is one run."),
        (["--multirun"], "-m starts a sweep, and this is one run."),
        (["--output-dir=runs"], "Settings have no dashes in front: output_dir=runs"),
        (["--resume", "auto"], "--resume: there is no such switch"),
        (["--cfg", "jobb"], "--cfg/-c: invalid choice: 'jobb'"),
        (["--config-name=mine"], "--config-name is not in this program"),
        (["--config-dir", "here"], "--config-dir is not in this program"),
        (["--experimental-rerun", "a.pickle"], "--experimental-rerun is not in this program"),
    ],
)
def test_a_switch_that_is_not_there_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        split_words(words)
    assert len(refusal.value.problems) == 1
    assert message in refusal.value.problems[0]


@pytest.mark.parametrize("words", [["-m", "seed=1,2"], ["seed=1,2", "--multirun"], ["seed=1", "-m"], ["-m"]])
def test_a_sweep_is_known_by_its_switch(words: list[str]) -> None:
    assert is_sweep(words)
    assert split_words(words, sweep=True)[0] == [word for word in words if not word.startswith("-")]


@pytest.mark.parametrize("words", [[], ["seed=1,2"], ["--cfg", "job"], ["dataset.path=-m"]])
def test_what_is_no_sweep(words: list[str]) -> None:
    assert not is_sweep(words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cfg", "job", "-m"], "--cfg job does not go with -m, because it is about one run."),
        (["-m", "--help", "seed=1,2"], "--help does not go with -m"),
        (["-m", "--resume", "auto"], "--resume: there is no such switch"),
        (["-m", "--config-name=mine"], "--config-name is not in this program"),
    ],
)
def test_a_sweep_goes_with_no_other_switch(words: list[str], message: str) -> None:
    assert is_sweep(words)
    with pytest.raises(ConfigError) as refusal:
        split_words(words, sweep=True)
    assert len(refusal.value.problems) == 1
    assert message in refusal.value.problems[0]


def test_the_program_runs_what_was_checked() -> None:
    """The words that Hydra gets give the same run as the words that were typed."""
    words = ["experiment=null", "output_dir=a=b", "model.architecture.new=1", "model.weights=random"]
    assert compose_run(checked_arguments(words)) == compose_run(words)


def test_a_word_that_means_nothing_hides_no_wrong_value() -> None:
    with pytest.raises(ConfigError) as refusal:
        compose_run(["optimizer.lrr=3", "optimizer.lr=-1", "adapter.r=x", "training.clip=1"])
    assert list(refusal.value.problems) == [
        "optimizer.lrr is not a key. Did you mean optimizer.lr?",
        "adapter.r=x: expected a whole number.",
        "optimizer.lr=-1.0 must be above 0.",
    ]


def test_what_may_follow_from_a_misspelt_word_is_not_told() -> None:
    with pytest.raises(ConfigError) as refusal:
        compose_run(["dataset=messages", "dataset.pth=rows.jsonl", "batching.tokns=64"])
    assert [problem.partition(" ")[0] for problem in refusal.value.problems] == [
        "dataset.pth",
        "batching.tokns",
    ]


@pytest.mark.parametrize(
    "words",
    [
        ["model.architecture.some=[1]", "model.architecture.some.deeper=3"],
        ["model.architecture.some.deeper=3", "model.architecture.some=[1]"],
        ["model=llama", "model.architecture.eos_token_id.x=3"],
    ],
)
def test_a_key_inside_a_list_is_refused_by_name(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"model\.architecture\.(some|eos_token_id)"):
        compose_run(["model.weights=random", *words])
    (found,) = compose_runs([["model.weights=random", *words]])
    assert isinstance(found, ConfigError)
