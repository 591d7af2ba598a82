"""Validation of plain data, and keys that are accepted only on the command line."""

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from app.config.commands import check_config
from app.config.help import meanings
from app.config.load import compose_run, read_run
from app.config.overrides import split_arguments
from app.config.schema import RunConfig
from app.config.validate import SECTIONS, STARTS_PROCESSES, leaf_keys, parse_section, typed_only
from app.errors import AppError, CheckpointError, ConfigError
from app.sweeps.sweep import plan_sweep
from app.web.runs import Runs
from tests.choices import pairwise, taking_turns
from tests.config.small import data_with, problems_in, run_with

WRONG: list[tuple[str, Any, str]] = [
    ("seed", "x", "seed=x: expected a whole number."),
    ("seed", 1.5, "seed=1.5: expected a whole number."),
    ("seed", True, "seed=true: expected a whole number."),
    ("seed", 2**32, "seed=4294967296 must be at least 0 and at most 4294967295."),
    ("training.max_steps", 2.5, "training.max_steps=2.5: expected a whole number or null."),
    ("training.epochs", float("inf"), "training.epochs=inf must be a finite number."),
    ("optimizer.lr", float("nan"), "optimizer.lr=nan must be a finite number."),
    ("optimizer.lr", 0, "optimizer.lr=0.0 must be above 0."),
    ("dry_run", "maybe", "dry_run=maybe: expected true or false."),
    ("training.rehearse", "no way", "training.rehearse=no way: expected true, false or auto."),
    ("launch.num_processes", "all", "launch.num_processes=all: expected a whole number or auto."),
    ("training.recompute", "some", "training.recompute=some: expected true, false, a whole number or auto."),
    ("output_dir", "", "output_dir= is empty. Set a value."),
    ("resume", "", "resume= is empty. Set a value, or resume=null."),
    ("resume", True, "resume=true: expected text (quote it if it looks like another type) or null."),
    ("model.revision", 1e5, "model.revision=100000.0: expected text"),
    ("model.path", ["a", None], "model.path=[a, null]: expected text"),
    ("adapter.targets", "q_proj", "adapter.targets=q_proj: expected a list like [a, b]."),
    ("adapter.targets", ["q_proj", None], "adapter.targets=[q_proj, null]: expected a list like [a, b]."),
    ("model.architecture", 3, "model.architecture=3: expected a mapping like {a: 1, b: 2}."),
    ("dataset.format", "messagess", "dataset.format=messagess: expected one of auto, messages, sharegpt, "),
    ("checkpoint.final", "first", "checkpoint.final=first: expected one of last, best."),
    ("training", 3, "training=3: training is a section. Set its keys, e.g. training.epochs=..."),
    ("model.suggest", None, "model.suggest=null: model.suggest is a section."),
    ("dataset.path", "???", "dataset.path= is required. Set dataset.path=..."),
    ("dataset.clumns", {}, "Unknown setting dataset.clumns. Did you mean dataset.columns?"),
    ("learning_rate", 1, "Unknown setting learning_rate. Did you mean optimizer.lr?"),
    ("dataset.columns.foo", "a", "Unknown setting dataset.columns.foo. Choose one of dataset.columns.answer, "),
    ("training.clip", None, "training.clip=null: expected a number. Use 0 for none."),
    *(
        (key, value, "expected a whole number or a fraction of an epoch like 0.25epoch.")
        for key in ("eval.every", "checkpoint.every")
        for value in (1.5, "x", "0epoch", "-1epoch", "nanepoch", "epoch", "infepoch", True)
    ),
]


@pytest.mark.parametrize(("key", "value", "message"), WRONG, ids=[f"{k}={v}" for k, v, _ in WRONG])
def test_value_invalid_names_key_and_allowed(key: str, value: Any, message: str) -> None:
    (problem,) = problems_in({key: value})
    assert message in problem


@pytest.mark.parametrize(
    ("key", "value", "read"),
    [
        ("seed", "7", 7),
        ("eval.every", "7", 7),
        ("eval.every", "0.25epoch", "0.25epoch"),
        ("checkpoint.every", "2 epochs", "2epoch"),
        ("optimizer.lr", 1, 1.0),
        ("optimizer.lr", "1e-5", 1e-5),
        ("dry_run", "yes", True),
        ("dry_run", 0, False),
        ("training.max_steps", None, None),
        ("output_dir", 2024, "2024"),
        ("output_dir", "${HOME}", "${HOME}"),
        ("adapter.targets", ["q_proj", "v_proj"], ["q_proj", "v_proj"]),
        ("tracker.project", "", ""),
        *(("training.recompute", given, given) for given in (True, False, 0, 1, 7, "auto")),
    ],
)
def test_value_valid_is_converted(key: str, value: Any, read: Any) -> None:
    place: Any = run_with({key: value})
    for name in key.split("."):
        place = getattr(place, name)
    assert (place, type(place)) == (read, type(read))


def test_key_missing_reported() -> None:
    data = data_with({})
    del data["training"], data["seed"]
    with pytest.raises(ConfigError) as refusal:
        parse_section(RunConfig, data)
    assert "seed= is required. Set seed=..." in refusal.value.problems
    assert "training.clip= is required. Set training.clip=..." in refusal.value.problems


@pytest.mark.parametrize(
    "overrides", [[], ["recipe=full", "model=llama"], ["tracker=wandb", "adapter.targets=[q_proj,v_proj]"]]
)
def test_run_yaml_round_trip(overrides: list[str], tmp_path: Path) -> None:
    run = compose_run(overrides)
    file = tmp_path / "run.yaml"
    file.write_text(OmegaConf.to_yaml(OmegaConf.create(asdict(run))))
    assert read_run(file) == run


@pytest.mark.parametrize("text", ["", "- a\n", "a: [", "just words", "seed: x\n", "\x00", None])
def test_run_yaml_malformed_refused(text: str | None, tmp_path: Path) -> None:
    """None: there is no such file."""
    file = tmp_path / "run.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(CheckpointError, match=r"run\.yaml cannot be read as the configuration of a run: "):
        read_run(file)


TYPED_ONLY = {
    "checkpoint.mirror": "s3://bucket/runs",
    "model.trust_remote_code": True,
    "cache_dir": "/tmp/kernels",
    "launch.num_processes": 3,
    "launch.threads": 3,
}
HYDRA = {
    "hydra.callbacks.x._target_": "pandas.read_pickle",
    "hydra.launcher": "basic",
    "hydra": "x",
    "hydra.job.chdir": True,
}
PREFIXES = ("", "+", "++", "~", " ", "$", "/", ".", "-", "'", "{")
SUFFIXES = ("", "@x", "@_global_", "@hydra", " ", "/x", "=1,seed", "]", ":", "\u200b")
SEPARATORS = (".", "/", "..", " . ", "@", ":", "[")
ABOUT_CODE = re.compile(r"\b(python|code|modules?|commands?|URLs?|uploads?|compiled kernels|processes on this)\b", re.I)


def spellings(key: str) -> Iterator[str]:
    for before, behind, between in pairwise(PREFIXES, SUFFIXES, SEPARATORS):
        yield f"{before}{key.replace('.', between)}{behind}"


def test_typed_only_keys_are_those_with_the_mark() -> None:
    assert {key for key in leaf_keys(RunConfig) if typed_only(RunConfig, key)} == {*TYPED_ONLY}
    assert not typed_only(RunConfig, "model.path")
    assert not typed_only(RunConfig, "no.such")


def documented(section: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every key of a schema with its documentation."""
    documentation = meanings(section)
    for each in fields(section):
        if is_dataclass(each.type):
            yield from documented(each.type, f"{prefix}{each.name}.")
        else:
            yield f"{prefix}{each.name}", documentation[each.name]
        if SECTIONS in each.metadata:
            yield from documented(each.metadata[SECTIONS], f"{prefix}{each.name}.NAME.")


def test_typed_only_marks_each_key_documented_as_code_command_or_address() -> None:
    unmarked = [
        key for key, text in documented(RunConfig) if ABOUT_CODE.search(text) and not typed_only(RunConfig, key)
    ]
    assert not unmarked, "mark the field with TYPED_ONLY, or name what it does in other words"
    assert sum(bool(ABOUT_CODE.search(text)) for _, text in documented(RunConfig)) >= 3


@pytest.mark.parametrize(("key", "value"), [*TYPED_ONLY.items(), *HYDRA.items()])
def test_settings_file_typed_only_key_refused_in_any_spelling(tmp_path: Path, key: str, value: Any) -> None:
    file = tmp_path / "sent.yaml"
    accepted = []
    for spelling in spellings(key):
        file.write_text(json.dumps({spelling: value}))
        try:
            compose_run(split_arguments([f"from={file}"])[0])
        except AppError:
            continue
        accepted.append(spelling)
    assert not accepted


@pytest.mark.parametrize("key", TYPED_ONLY)
def test_settings_file_of_a_sweep_does_not_vary_typed_only_key(tmp_path: Path, key: str) -> None:
    file = tmp_path / "sent.yaml"
    file.write_text(json.dumps({"sweep": "lr", f"sweep.space.{key}": [TYPED_ONLY[key]]}))
    with pytest.raises(AppError, match=re.escape(f"sweep.space.{key} in {file}")):
        plan_sweep(["-m", f"from={file}"], lambda _run: None)


@given(st.data())
def test_settings_file_random_spelling_decides_nothing(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    """What is accepted in a file leaves the keys as conf/ has them."""
    key = data.draw(st.sampled_from(sorted(TYPED_ONLY)))
    parts = [data.draw(st.text("+~@/.[]{}$=:,' _", max_size=2)) for _ in range(3)]
    section, _, leaf = key.rpartition(".")
    spelling = f"{parts[0]}{section}{parts[1] or '.' * bool(section)}{leaf}{parts[2]}"
    settings: dict[str, Any] = {spelling: TYPED_ONLY[key]}
    if section and data.draw(st.booleans()):
        settings = {f"{parts[0]}{section}": {f"{parts[1]}{leaf}{parts[2]}": TYPED_ONLY[key]}}
    file = tmp_path_factory.mktemp("sent") / "sent.yaml"
    file.write_text(json.dumps(settings))
    try:
        run = compose_run(split_arguments([f"from={file}"])[0])
    except AppError:
        return
    usual = compose_run([])
    assert (run.launch, run.cache_dir, run.model) == (usual.launch, usual.cache_dir, usual.model)
    assert run.checkpoint.mirror is None


@pytest.mark.parametrize("key", TYPED_ONLY)
def test_settings_file_typed_only_key_accepted_where_typed(tmp_path: Path, key: str) -> None:
    file = tmp_path / "sent.yaml"
    file.write_text(json.dumps({key: TYPED_ONLY[key]}))
    typed = f"{key}={str(TYPED_ONLY[key]).lower()}"
    readers: dict[str, Any] = {
        "train": lambda *words: split_arguments([f"from={file}", *words])[0],
        "sweep": lambda *words: plan_sweep(["-m", f"from={file}", "seed=1,2", *words], lambda _run: None),
        "check": lambda *words: check_config(["data", f"from={file}", *words]),
        "board": lambda *words: Runs(tmp_path).check([f"from={file}", *words], "train", "new"),
    }
    for name, read in readers.items():
        with pytest.raises(
            AppError, match=re.escape(f"{key} in {file} is not accepted") + f".*type {re.escape(typed)}"
        ):
            read()
        if name != "board":
            read(typed)
    file.write_text(json.dumps({key: None, "model.trust_remote_code": False}))
    assert not compose_run(["seed=1"]).model.trust_remote_code


IN_FORMS = [
    ("hydra.job.chdir=true", "Unknown setting hydra.job.chdir."),
    ("++hydra.job.chdir=true", "hydra.job.chdir in the form: "),
    ("hydra/launcher=basic", "hydra/launcher in the form: "),
    ("++seed=1", "seed in the form: invalid setting name"),
    ("model@x=tiny", "model@x in the form: invalid setting name"),
    ("model.trust_remote_code=true", "model.trust_remote_code in the form is not accepted because it decides"),
    ("model={trust_remote_code: true}", "model.trust_remote_code in the form is not accepted because it decides"),
    ("cache_dir=/tmp/x", "cache_dir in the form is not accepted because it decides"),
    ("checkpoint.mirror=s3://bucket/runs", "checkpoint.mirror in the form is not accepted because it decides where"),
    ("--cfg=job", "--cfg job"),
    ("--info", "--info"),
]


@pytest.mark.parametrize(("given", "what"), taking_turns(IN_FORMS, ("train", "data")))
def test_form_of_the_board_refuses(tmp_path: Path, given: tuple[str, str], what: str) -> None:
    word, message = given
    with pytest.raises(AppError) as refused:
        Runs(tmp_path).check([word], what, "new")
    assert message in str(refused.value)


def test_form_of_the_board_takes_settings_and_starts_processes(tmp_path: Path) -> None:
    words = ["recipe=lora", "launch.num_processes=2", "model.trust_remote_code=false", "eval.every=5"]
    Runs(tmp_path).check([*words, "training.max_steps=5"], "train", "new")
    assert typed_only(RunConfig, "launch.num_processes") == STARTS_PROCESSES
