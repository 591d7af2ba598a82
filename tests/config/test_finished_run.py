"""Changes that later commands may make to a finished run, and the rows of an evaluation."""

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from app.config.dataset import has_held_out_rows
from app.config.finished_run import (
    EVALUATE,
    EXPORT,
    REPRODUCE,
    EvaluateConfig,
    as_run,
    evaluate_config,
    export_config,
    reproduce_config,
    with_recorded_choices,
)
from app.config.load import read_run
from app.config.schema import RunConfig
from app.config.validate import field_types
from app.errors import AppError, CheckpointError, ConfigError
from app.files import write_json
from tests.config.small import data_with, run_with


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return made(tmp_path / "run")


def made(folder: Path, **changes: Any) -> Path:
    """As much of a finished run as its configuration needs."""
    (folder / "final").mkdir(parents=True)
    given = {"output_dir": str(folder), "model.suggest.length": 100, "dataset.max_rows": 90, "resume": "auto"}
    data = data_with(given | {key.replace("__", "."): value for key, value in changes.items()})
    (folder / "run.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(data)))
    return folder


def evaluation(run: Path, *arguments: str, choices: dict[str, Any] | None = None) -> EvaluateConfig:
    if choices:
        write_json(run / "manifest.json", {"choices": choices})
    return evaluate_config([f"run={run}", *arguments])


def refusals(run: Path, *arguments: str) -> list[str]:
    with pytest.raises(AppError) as refusal:
        evaluation(run, *arguments)
    return list(refusal.value.problems)


def rows_of(run: Path, *arguments: str) -> dict[str, Any]:
    names = ("path", "max_rows", "eval_path", "eval_split", "eval_fraction", "eval_max_rows")
    dataset = evaluation(run, *arguments).dataset
    return {name: getattr(dataset, name) for name in names if getattr(dataset, name)}


def test_evaluate_unchanged_is_the_run(run: Path) -> None:
    config = evaluation(run)
    assert (config.run, config.weights, config.output_dir) == (str(run), "tuned", str(run))
    assert config.model.tokenizer == str(run / "final")
    assert config.resume is None
    assert config.seed == 0
    assert type(as_run(config)) is RunConfig


def test_changes_group_uses_model_of_run(run: Path) -> None:
    dataset = evaluation(run, "dataset=text", "dataset.path=book.txt").dataset
    assert (dataset.format, dataset.path, dataset.max_length) == ("text", "book.txt", 100)
    assert evaluation(run, "precision=bf16", "attention=sdpa").precision.kind == "bf16"
    columns = evaluation(run, "dataset.columns={text: body}").dataset.columns
    assert (columns.text, columns.messages) == ("body", "messages")
    assert "dataset.path has no value" in refusals(run, "dataset=messages")[0]


def test_changes_typed_and_validated(run: Path) -> None:
    assert refusals(run, "eval.rows=0", "weights=bse") == [
        "eval.rows=0 must be at least 1.",
        "weights=bse is none of tuned, base, both. Did you mean base?",
    ]
    assert "is more than a bin holds" in refusals(run, "batching.tokens=64")[0]
    assert "means nothing for dataset.format=text" in refusals(
        run, "dataset=text", "dataset.train_on=last", "dataset.path=x"
    )[0]  # fmt: skip


WRONG = [
    ("weihgts=both", "weihgts is not a key. Did you mean weights?"),
    ("dataset.max_row=3", "Did you mean dataset.max_rows?"),
    ("optimizer.lr=1", "optimizer.lr=1: optimizer.lr does not apply, because an evaluation trains nothing."),
    ("optimizer=sgd", "optimizer does not apply, because an evaluation trains nothing."),
    ("adapter=none", "weights=tuned, base or both chooses between them."),
    ("batching.rows=3", "eval.rows is the number of rows"),
    ("hydra.mode=MULTIRUN", "hydra.mode is not a key."),
    ("--help", "'--help' is not an override. Write key=value or group=choice."),
    ("eval.rows=1,2", "several values are a sweep"),
]


@pytest.mark.parametrize(("given", "message"), WRONG, ids=[given for given, _ in WRONG])
def test_changes_invalid_reported_before_run_is_read(given: str, message: str) -> None:
    (problem,) = refusals(Path("no/such/run"), given)
    assert message in problem


def test_changes_folder_without_key_suggests_run(tmp_path: Path) -> None:
    (problem,) = refusals(tmp_path, str(tmp_path))
    assert problem.endswith(f"is not an override. Write key=value or group=choice. Did you mean run={tmp_path}?")


def test_changes_all_problems_together() -> None:
    assert len(refusals(Path("none"), "seed=3", "weihgts=both", "dataset=massages")) == 3


def test_allowed_keys_exist() -> None:
    for command in (EVALUATE, EXPORT, REPRODUCE):
        assert set(command.allowed) <= field_types(RunConfig).keys()
    words = ["dataset.columns.text=a", "run=a,b [c]", "harness=x,y", "checkpoint=3", "harness_limit=null"]
    typed = EVALUATE.read(words)
    assert typed.settings == {"dataset.columns.text": "a"}
    assert typed.options == {"run": "a,b [c]", "harness": ["x", "y"], "kept_checkpoint": "3", "harness_limit": None}


@pytest.mark.parametrize("given", [[], ["run=nowhere"], ["run=unfinished"], ["run=torn"]])
def test_finished_folder_missing_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "unfinished").mkdir()
    made(tmp_path / "torn")
    (tmp_path / "torn" / "run.yaml").write_text("seed: [")
    with pytest.raises((ConfigError, CheckpointError), match=r"run has no value|no such folder|no final/|torn"):
        evaluate_config(given)


def test_recorded_precision_kept_attention_not(run: Path) -> None:
    chosen = {"precision": "fp32", "attention": "flash", "device": "cpu", "threads": 3}
    config = evaluation(run, choices=chosen)
    assert (config.precision.kind, config.attention.kind, config.launch.threads) == ("fp32", "auto", None)
    assert evaluation(run, "precision=auto", choices=chosen).precision.kind == "auto"
    again = with_recorded_choices(run_with({}), chosen)
    assert (again.precision.kind, again.attention.kind, again.launch.threads) == ("fp32", "flash", 3)
    asked = run_with({"precision.kind": "bf16", "attention.kind": "sdpa", "launch.threads": 1})
    assert with_recorded_choices(asked, chosen) == asked
    on_gpu = with_recorded_choices(run_with({}), {**chosen, "device": "cuda"})
    assert on_gpu.launch.threads is None


def test_model_path_unused_refused(tmp_path: Path) -> None:
    drawn = made(tmp_path / "drawn", model__weights="random")
    assert "the base of this run had random weights" in refusals(drawn, "model.path=org/name")[0]
    whole = made(tmp_path / "whole", model__weights="pretrained", adapter__kind="none")
    assert "that is in final/" in refusals(whole, "model.path=org/name")[0]
    assert evaluation(whole, "model.path=org/name", "weights=both").model.path == "org/name"
    tuned = made(tmp_path / "tuned", model__weights="pretrained")
    assert evaluation(tuned, "model.path=org/name").model.path == "org/name"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("harness=a,b", "dataset.path=new.jsonl"), "dataset.path would change nothing: the tasks of harness="),
        (("harness=[a]", "batching.packing=false", "launch.num_processes=2"), "Leave them out."),
        (("harness_limit=5",), "there are none. Give harness=TASK."),
        (("harness=a", "harness_limit=0"), "harness_limit=0 must be at least 1"),
        (("harnes=a",), "harnes is not a key. Did you mean harness?"),
    ],
)  # fmt: skip
def test_harness_with_dataset_keys_refused(run: Path, given: tuple[str, ...], message: str) -> None:
    (problem,) = refusals(run, *given)
    assert message in problem


@pytest.mark.parametrize(
    ("adapter", "given", "message"),
    [
        ("lora", "kind=whole", "kind=whole is none of adapter, merged, quantized, gguf."),
        ("lora", "dtype=int8", "dtype=int8 is none of bf16, fp16, fp32."),
        ("lora", "optimizer.lr=1", "optimizer.lr=1: optimizer.lr does not apply, because an export writes down"),
        ("none", "kind=adapter", "tuned a whole model and has no adapter. Give kind=merged: its weights in dtype=bf16"),
        ("lora", "dtype=fp16", "dtype=fp16 would change nothing: an adapter is exported as it is."),
        ("lora", "quant=int8", "quant=int8 would change nothing: an adapter is exported as it is."),
        ("lora", "quant=gptq", "q5_k_m, q6_k. Exports in GPTQ and AWQ need gptqmodel, a GPU"),
        ("lora", "model.path=/models", "model.path=/models would not be read: the base of this run had random weights"),
    ],
)  # fmt: skip
def test_export_impossible_refused(tmp_path: Path, adapter: str, given: str, message: str) -> None:
    run = made(tmp_path / "run", adapter__kind=adapter, model__weights="random")
    words = {word.partition("=")[0]: word for word in (f"run={run}", "kind=adapter", "to=out", given)}
    with pytest.raises(ConfigError) as refusal:
        export_config(list(words.values()))
    assert message in str(refusal.value)


# ---- which rows are scored

EVAL = "asset:sample/eval.jsonl"


def test_rows_to_score_of_run_or_given_dataset(run: Path) -> None:
    own = "asset:sample/train.jsonl"
    assert rows_of(run) == {"path": own, "max_rows": 90, "eval_path": EVAL}
    assert rows_of(run, f"dataset.path={own}") == rows_of(run)
    assert rows_of(run, "dataset.eval_max_rows=5") == {**rows_of(run), "eval_max_rows": 5}
    assert rows_of(run, "dataset.path=new.jsonl") == {"path": "new.jsonl"}
    assert rows_of(run, "dataset={path: new.jsonl}") == {"path": "new.jsonl"}
    assert "dataset.pth is not a key. Did you mean dataset.path?" in refusals(run, "dataset={pth: new.jsonl}")
    assert rows_of(run, "dataset.path=new.jsonl", "dataset.max_rows=7") == {"path": "new.jsonl", "max_rows": 7}
    assert rows_of(run, "dataset=messages", "dataset.path=new.jsonl") == {"path": "new.jsonl"}
    assert rows_of(run, "dataset.eval_path=new.jsonl") == {"path": own, "eval_path": "new.jsonl"}
    assert rows_of(run, "dataset.eval_fraction=0.5") == {"path": own, "eval_fraction": 0.5}


def test_rows_to_score_named_by_dataset(run: Path) -> None:
    assert rows_of(run, "dataset=ultrachat")["eval_split"] == "test_sft"
    assert rows_of(run, "dataset=ultrachat")["eval_max_rows"] == 1000
    assert "eval_fraction" not in rows_of(run, "dataset=alpaca")
    assert rows_of(run, "dataset=alpaca", "dataset.eval_fraction=0.1")["eval_fraction"] == 0.1


def test_rows_to_score_keep_held_out_part(tmp_path: Path) -> None:
    run = made(tmp_path / "run", dataset__eval_path=None, dataset__eval_fraction=0.3)
    own = rows_of(run)["path"]
    assert rows_of(run)["eval_fraction"] == 0.3
    assert rows_of(run, "dataset=messages", f"dataset.path={own}")["eval_fraction"] == 0.02
    assert rows_of(run, "dataset=messages", "dataset.path=other.jsonl") == {"path": "other.jsonl"}
    assert has_held_out_rows(evaluation(run).dataset)


def test_rows_to_score_without_held_out_refused(tmp_path: Path) -> None:
    run = made(tmp_path / "run", dataset__eval_path=None)
    (problem,) = refusals(run)
    assert f"run={run}: it held no rows out. Give dataset.path=FILE" in problem
    assert rows_of(run, "dataset.path=asset:sample/train.jsonl") == {"path": "asset:sample/train.jsonl", "max_rows": 90}


def test_rows_to_score_idle_limit_refused(run: Path) -> None:
    (problem,) = refusals(run, "dataset.max_rows=5")
    assert "dataset.eval_max_rows=5 takes the first" in problem


def again(run: Path, *arguments: str, **choices: Any) -> Any:
    write_json(run / "manifest.json", {"choices": choices})
    return reproduce_config([f"run={run}", *arguments])


def test_reproduce_same_settings_new_folder(tmp_path: Path) -> None:
    run = made(tmp_path / "run", tracker__kind="tensorboard", dry_run=True)
    config = again(run, "steps=3", precision="fp32", attention="sdpa", device="cpu", threads=2)
    assert config.output_dir == f"{run}-reproduced"
    assert (config.resume, config.dry_run, config.tracker.kind) == (None, False, "none")
    assert (config.precision.kind, config.attention.kind, config.launch.threads) == ("fp32", "sdpa", 2)
    assert (config.steps, config.tolerance, config.anyway) == (3, 0.0, False)
    assert again(run, "dataset.path=moved.jsonl").dataset.path == "moved.jsonl"
    with pytest.raises(ConfigError, match=r"optimizer\.lr=1: optimizer\.lr does not apply, because a run is repro"):
        again(run, "optimizer.lr=1")
    with pytest.raises(ConfigError, match="Did you mean tolerance"):
        again(run, "tolrance=1")


def test_reproduce_begins_where_run_began(tmp_path: Path) -> None:
    own = tmp_path / "run" / "checkpoints" / "step-000002"
    other = tmp_path / "other" / "checkpoints" / "step-000002"
    own.mkdir(parents=True)
    other.mkdir(parents=True)
    run = made(tmp_path / "run", resume=str(own))
    assert again(run).resume is None
    assert again(made(tmp_path / "second", resume=str(other))).resume == str(other)


def test_read_run_of_an_earlier_version() -> None:
    """A key that its run.yaml lacks needs a default in the schema that means what the program did then."""
    run = read_run(Path(__file__).with_name("earlier_run.yaml"))
    assert run.dataset.columns.chat_template_kwargs is None
    assert (run.model.template_options, run.dataset.leave_out, run.varied_from) == ({}, [], None)
    assert run.eval.at_start is False
