"""Finished runs: changes that later commands may make, received run.yaml files, and `from=RUN`."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from app.config.commands import GENERATE, check_config
from app.config.conf_files import to_yaml
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
from app.config.load import compose_run, read_run
from app.config.overrides import split_arguments
from app.config.schema import RunConfig
from app.config.validate import field_types
from app.errors import AppError, CheckpointError, ConfigError
from app.files import write_json
from app.sweeps.sweep import plan_sweep
from tests.config.small import data_with, run_with
from tests.harness.composed import composed


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
    assert "dataset.path= is required" in refusals(run, "dataset=messages")[0]


def test_changes_typed_and_validated(run: Path) -> None:
    assert refusals(run, "eval.rows=0", "weights=bse") == [
        "eval.rows=0 must be at least 1.",
        "weights=bse: expected one of tuned, base, both. Did you mean base?",
    ]
    assert "exceeds the bin size" in refusals(run, "batching.tokens=64")[0]
    assert "is not supported for dataset.format=text" in refusals(
        run, "dataset=text", "dataset.train_on=last", "dataset.path=x"
    )[0]  # fmt: skip


WRONG = [
    ("weihgts=both", "Unknown setting weihgts. Did you mean weights?"),
    ("dataset.max_row=3", "Did you mean dataset.max_rows?"),
    ("optimizer.lr=1", "optimizer.lr=1: optimizer.lr does not apply, because it is for training only."),
    ("optimizer=sgd", "optimizer does not apply, because it is for training only."),
    ("adapter=none", "choose weights=tuned, base or both."),
    ("batching.rows=3", "because eval.rows is the eval micro-batch size"),
    ("hydra.mode=MULTIRUN", "Unknown setting hydra.mode."),
    ("--help", "Unrecognized argument '--help'. Settings are key=value."),
    ("eval.rows=1,2", "several values make a sweep"),
]


@pytest.mark.parametrize(("given", "message"), WRONG, ids=[given for given, _ in WRONG])
def test_changes_invalid_reported_before_run_is_read(given: str, message: str) -> None:
    (problem,) = refusals(Path("no/such/run"), given)
    assert message in problem


def test_changes_folder_without_key_suggests_run(tmp_path: Path) -> None:
    (problem,) = refusals(tmp_path, str(tmp_path))
    assert problem.endswith(f". Settings are key=value. Did you mean run={tmp_path}?")


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
    with pytest.raises((ConfigError, CheckpointError), match=r"run= is required|no such folder|no final/|torn"):
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
    assert "the base of this run was randomly initialized" in refusals(drawn, "model.path=org/name")[0]
    whole = made(tmp_path / "whole", model__weights="pretrained", adapter__kind="none")
    assert "which is in final/" in refusals(whole, "model.path=org/name")[0]
    assert evaluation(whole, "model.path=org/name", "weights=both").model.path == "org/name"
    tuned = made(tmp_path / "tuned", model__weights="pretrained")
    assert evaluation(tuned, "model.path=org/name").model.path == "org/name"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("harness=a,b", "dataset.path=new.jsonl"), "dataset.path would have no effect: harness= uses"),
        (("harness=[a]", "batching.packing=false", "launch.num_processes=2"), "Leave them out."),
        (("harness_limit=5",), "need harness=TASK."),
        (("harness=a", "harness_limit=0"), "harness_limit=0 must be at least 1"),
        (("harnes=a",), "Unknown setting harnes. Did you mean harness?"),
    ],
)  # fmt: skip
def test_harness_with_dataset_keys_refused(run: Path, given: tuple[str, ...], message: str) -> None:
    (problem,) = refusals(run, *given)
    assert message in problem


@pytest.mark.parametrize(
    ("adapter", "given", "message"),
    [
        ("lora", "kind=whole", "kind=whole: expected one of adapter, merged, quantized, gguf."),
        ("lora", "dtype=int8", "dtype=int8: expected one of bf16, fp16, fp32."),
        ("lora", "optimizer.lr=1", "optimizer.lr=1: optimizer.lr does not apply, because an export uses"),
        ("none", "kind=adapter", "fine-tuned the whole model and has no adapter. Set kind=merged to export"),
        ("lora", "dtype=fp16", "dtype=fp16 would have no effect: an adapter is exported unchanged."),
        ("lora", "quant=int8", "quant=int8 would have no effect: an adapter is exported unchanged."),
        ("lora", "quant=gptq", "q5_k_m, q6_k. GPTQ and AWQ exports are not supported. They need"),
        ("lora", "model.path=/models", "model.path=/models has no effect: the base of this run was randomly"),
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
    assert "Unknown setting dataset.pth. Did you mean dataset.path?" in refusals(run, "dataset={pth: new.jsonl}")
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
    assert f"run={run}: the run has no eval set. Set dataset.path=FILE" in problem
    assert rows_of(run, "dataset.path=asset:sample/train.jsonl") == {"path": "asset:sample/train.jsonl", "max_rows": 90}


def test_rows_to_score_idle_limit_refused(run: Path) -> None:
    for limit in ("max_rows", "sample"):
        (problem,) = refusals(run, f"dataset.{limit}=5")
        assert "set dataset.eval_max_rows=5" in problem


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


TYPED = "model.trust_remote_code=true"


READERS: dict[str, Any] = {
    "from": lambda run, *more: compose_run([f"varied_from={run}", *more]),
    "evaluate": lambda run, *more: evaluate_config([f"run={run}", *more]),
    "export": lambda run, *more: export_config([f"run={run}", "to=x", "kind=adapter", *more]),
    "reproduce": lambda run, *more: reproduce_config([f"run={run}", *more]),
}


def received(folder: Path, **changes: Any) -> Path:
    (folder / "final").mkdir(parents=True)
    data = data_with({"model.suggest.length": 100, **{key.replace("__", "."): each for key, each in changes.items()}})
    (folder / "run.yaml").write_text(to_yaml(data))
    return folder


MIRROR = {"checkpoint__mirror": "s3://bucket/runs"}


@pytest.mark.parametrize("command", READERS)
def test_received_run_trusts_code_only_where_typed(tmp_path: Path, command: str) -> None:
    run = received(tmp_path / "run", model__trust_remote_code=True, cache_dir=str(tmp_path / "kernels"), **MIRROR)
    assert read_run(run / "run.yaml").model.trust_remote_code  # for the processes of a launch
    config = READERS[command](str(run))
    assert not config.model.trust_remote_code
    assert config.cache_dir == compose_run([]).cache_dir
    assert config.checkpoint.mirror is None
    typed = READERS[command](str(run), TYPED, "cache_dir=mine")
    assert (typed.model.trust_remote_code, typed.cache_dir) == (True, "mine")


@pytest.mark.parametrize("command", READERS)
def test_received_run_starts_processes_only_where_typed(tmp_path: Path, command: str) -> None:
    run = received(tmp_path / "run", launch__num_processes=3)
    if command in ("from", "reproduce"):  # the number decides the tokens of a step
        with pytest.raises(
            ConfigError, match=r"launch.num_processes=3 in run.yaml is not accepted .* Type launch.num_processes=3"
        ):
            READERS[command](str(run))
        assert READERS[command](str(run), "launch.num_processes=2").launch.num_processes == 2
    else:
        assert READERS[command](str(run)).launch.num_processes == 1


def test_received_run_resumed_in_its_folder_keeps_its_processes(tmp_path: Path) -> None:
    run = received(tmp_path / "run", launch__num_processes=3, launch__threads=5, model__trust_remote_code=True)
    resumed = READERS["from"](str(run), f"output_dir={run}", "resume=auto")
    assert (resumed.launch.num_processes, resumed.launch.threads) == (3, 5)
    assert not resumed.model.trust_remote_code
    with pytest.raises(ConfigError, match=r"launch\.num_processes=3"):
        READERS["from"](str(run), "output_dir=elsewhere", "resume=auto")


def test_generate_learns_to_trust_code() -> None:
    assert not GENERATE.parse(["run=r"]).trust_remote_code
    assert GENERATE.parse(["run=r", TYPED]).trust_remote_code


NAMES = ["${seed}", "${oc.env:HOME}", "\\${seed}", "\\\\${seed}", "${", "$${a}", "???", "\\", "a\\${b}c\\"]


@pytest.mark.parametrize("command", READERS)
def test_received_run_has_references_as_text(tmp_path: Path, command: str) -> None:
    run = received(tmp_path / "run", model__licence_page="https://x/${oc.env:HOME}", adapter__targets=NAMES)
    config: RunConfig = READERS[command](str(run))
    assert config.model.licence_page == "https://x/${oc.env:HOME}"
    assert config.adapter.targets == NAMES
    (run / "run.yaml").write_text(to_yaml(asdict(as_run(config))))
    assert read_run(run / "run.yaml").adapter.targets == NAMES


def test_received_run_typed_reference_is_resolved(tmp_path: Path) -> None:
    run = received(tmp_path / "run", adapter__targets=NAMES)
    assert READERS["from"](run, "model.licence_page=https://x/${seed}").model.licence_page == "https://x/0"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("k0: &k0 [x]\n" + "".join(f"k{i}: &k{i} [{', '.join([f'*k{i - 1}'] * 9)}]\n" for i in range(1, 9)), "alias"),
        ("&a [*a]", "alias"),
        ("seed: " + "[" * 5_000, "nested too deep"),
        ("seed: " + "{a: " * 5_000, "nested too deep"),
        ("# " + "x" * (2 << 20), "larger than 1 MB"),
        ("seed: " + "9" * 5_000, "cannot be read"),
        ("seed: !!python/object/apply:os.mkdir [made]", "constructor"),
        ("seed: !!timestamp 9999-99-99", "cannot be read"),
        ("? {a: 1}\n: 2", "unhashable"),
        ("seed: 1\nseed: 2", "duplicate"),
        ("seed: \x00", "special characters"),
        ("1: 2\nseed: {}", "Unknown setting"),
    ],
)  # fmt: skip
def test_hostile_run_yaml_is_told(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(CheckpointError, match=f"cannot be read as the configuration of a run: .*{said}|^.*{said}"):
        read_run(file)


@pytest.fixture
def stopped_run(tmp_path: Path) -> Path:
    """A folder with the run.yaml of a run that was stopped, continued and tracked."""
    words = ["recipe=full", "optimizer.lr=3e-3", "model.suggest.length=100", "seed=7", "resume=auto"]
    words += ["tracker=wandb", "tracker.name=a"]
    folder = tmp_path / "run"
    folder.mkdir()
    data = asdict(composed(*words, "training.stop_after=5")) | {"output_dir": str(folder)}
    (folder / "run.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(data)))
    return folder


def varied(*arguments: str) -> RunConfig:
    return compose_run(split_arguments(arguments)[0])


def varied_refusals(*arguments: str) -> list[str]:
    with pytest.raises(AppError) as refusal:
        varied(*arguments)
    return list(refusal.value.problems)


def test_varied_run_has_settings_of_its_start_and_own_folder(stopped_run: Path) -> None:
    config = varied(f"from={stopped_run}", "training.epochs=3")
    assert (config.seed, config.adapter.kind, config.optimizer.lr, config.training.epochs) == (7, "none", 3e-3, 3.0)
    assert config.varied_from == str(stopped_run)
    assert config.output_dir.startswith("runs/20")
    assert (config.resume, config.training.stop_after, config.tracker.name) == (None, None, None)
    assert varied(f"from={stopped_run}", "output_dir=b", "resume=auto").resume == "auto"
    assert check_config([f"from={stopped_run}", "batching.accumulation=2"]).run.seed == 7


def test_varied_run_group_replaces_section(stopped_run: Path) -> None:
    config = varied(f"from={stopped_run}", "dataset=text", "dataset.path=book.txt", "optimizer=sgd")
    assert (config.dataset.path, config.dataset.format, config.dataset.max_length) == ("book.txt", "text", 100)
    of_hub = varied(f"from={stopped_run}", "dataset=tatsu-lab/alpaca").dataset
    assert (of_hub.path, of_hub.format) == ("tatsu-lab/alpaca", "auto")
    assert (config.optimizer.kind, config.optimizer.lr) == ("sgd", 3e-3)
    assert varied(f"from={stopped_run}", "optimizer=sgd", "optimizer.lr=1").optimizer.lr == 1


def test_varied_run_typed_warm_up_replaces_the_other(stopped_run: Path) -> None:
    def warmup(*words: str) -> tuple[int | None, float | None]:
        schedule = varied(f"from={stopped_run}", *words).schedule
        return schedule.warmup_steps, schedule.warmup_fraction

    assert warmup() == (None, 0.03)
    assert warmup("schedule=linear", "schedule.warmup_steps=9") == (9, None)
    data = (stopped_run / "run.yaml").read_text()
    (stopped_run / "run.yaml").write_text(
        data.replace("warmup_fraction: 0.03", "warmup_fraction: null").replace("warmup_steps: null", "warmup_steps: 9")
    )
    assert warmup() == warmup("schedule.final_fraction=0.2") == (9, None)
    assert warmup("schedule.warmup_fraction=0.1") == (None, 0.1)
    assert warmup("schedule=linear") == (None, 0.03)
    assert len(varied_refusals(f"from={stopped_run}", "schedule.warmup_fraction=0.1", "schedule.warmup_steps=5")) == 1


def test_varied_run_typed_eval_rows_replace_the_others(stopped_run: Path) -> None:
    def held_out(*words: str) -> tuple[str | None, float]:
        dataset = varied(f"from={stopped_run}", *words).dataset
        return dataset.eval_path, dataset.eval_fraction

    assert held_out() == ("asset:sample/eval.jsonl", 0.0)
    assert held_out("dataset.eval_fraction=0.1") == (None, 0.1)
    assert held_out("dataset=text", "dataset.path=a.txt", "dataset.eval_path=b.txt") == ("b.txt", 0.0)
    both = ("dataset.eval_fraction=0.1", "dataset.eval_path=b.txt")
    assert "both set the eval set" in varied_refusals(f"from={stopped_run}", *both)[0]


def test_varied_run_can_be_swept(stopped_run: Path) -> None:
    runs = plan_sweep(["-m", f"from={stopped_run}", "optimizer.lr=1e-3,1e-4"], lambda _run: None).runs
    assert [(each.optimizer.lr, each.seed) for each in runs] == [(1e-3, 7), (1e-4, 7)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("recipe=qlora", "recipe=qlora: dependent rates and sizes would keep the values of from="),
        ("model=llama", "Set the keys to change, or repeat that run's command (in its manifest.json) with model=llama"),
        ("optimizer.lrr=1", "Unknown setting optimizer.lrr. Did you mean optimizer.lr?"),
        ("adapter.r=x", "adapter.r=x: expected a whole number."),
        ("adapter.r=8", "adapter.r=8: adapter=none ignores it."),
        ("batching.tokens=64", "exceeds the bin size"),
        ("from=~0", "from=~0: unknown user 0. Write the full path, or ./~0."),
        ("from=null", "from=null: no run.yaml found."),
        ("from=nowhere", "from=nowhere: no run.yaml found. Give the output_dir of a run."),
        ("hydra.mode=RUN", "Unknown setting hydra.mode."),
    ],
)
def test_varied_run_invalid_refused(stopped_run: Path, given: str, message: str) -> None:
    (problem,) = varied_refusals(f"from={stopped_run}", given)
    assert message in problem
