"""`from=FILE.yaml`: groups and keys of a file."""

import json
from pathlib import Path

import pytest

from app.config.commands import check_config
from app.config.conf_files import choices_by_group
from app.config.load import compose_run
from app.config.overrides import RATE, settings_notes, split_arguments
from app.config.schema import RunConfig
from app.config.validate import leaf_keys, typed_only
from app.errors import AppError
from app.sweeps.sweep import plan_sweep

OTHERS = {"model": "model=tiny", "dataset": "dataset=sample"}  # sections without a kind

SETTINGS = r"""
recipe: lora
optimizer: {lr: 1e-4}
optimizer.weight_decay: 0.1
schedule.warmup_steps: 10
adapter:
  r: 8
  targets: [q_proj, v_proj]
training: {max_steps: 3, epochs: 2}
tracker: mlflow
tracker.name: "say \"it\" for ${HOME} \\ 'x'\nagain"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "my.yaml"
    file.write_text(SETTINGS)
    return file


def run_of(*arguments: str) -> RunConfig:
    return compose_run(split_arguments(arguments)[0])


def refusal(*arguments: str) -> str:
    with pytest.raises(AppError) as refused:
        run_of(*arguments)
    return str(refused.value)


def test_settings_file_equals_its_settings_typed(file: Path) -> None:
    config = run_of(f"from={file}", "tracker.name=x")
    typed = (
        "recipe=lora",
        "optimizer.lr=1e-4",
        "optimizer.weight_decay=0.1",
        "schedule.warmup_steps=10",
        "adapter.r=8",
    )
    more = ("adapter.targets=[q_proj,v_proj]", "training.max_steps=3", "tracker=mlflow", "tracker.name=x")
    wanted = run_of(*typed, *more, "training.epochs=2")
    config.output_dir = wanted.output_dir  # has the time
    assert config == wanted
    assert run_of(f"from={file}").tracker.name == "say \"it\" for ${HOME} \\ 'x'\nagain"


def test_settings_file_typed_words_win(file: Path) -> None:
    config = run_of(f"from={file}", "optimizer=sgd", "optimizer.lr=1", "schedule.warmup_fraction=0.1")
    assert (config.optimizer.kind, config.optimizer.lr, config.optimizer.weight_decay) == ("sgd", 1.0, 0.0)
    assert (config.schedule.warmup_steps, config.schedule.warmup_fraction) == (None, 0.1)
    file.write_text("model: org/name\ndataset: data/a.jsonl\nmodel.suggest.length: 100")
    assert (run_of(f"from={file}").model.path, run_of(f"from={file}").dataset.path) == ("org/name", "data/a.jsonl")
    assert run_of(f"from={file}", "dataset=data/b.jsonl").dataset.path == "data/b.jsonl"
    file.write_text("optimizer: sgd\noptimizer.weight_decay: 0.1\noptimizer.momentum: 0.5")
    optimizer = run_of(f"from={file}", "optimizer={weight_decay: 0.2}").optimizer
    assert (optimizer.kind, optimizer.weight_decay, optimizer.momentum) == ("sgd", 0.2, 0.5), "a mapping is its keys"


@pytest.mark.parametrize("group", [each for each in choices_by_group() if each in RunConfig.__dataclass_fields__])
def test_settings_file_typed_group_replaces_its_section(file: Path, group: str) -> None:
    keys = [key for key in leaf_keys(RunConfig) if key.startswith(f"{group}.") and key != RATE]
    keys = [key for key in keys if not typed_only(RunConfig, key)]
    file.write_text(json.dumps({group: "nosuch", **{key: ["nosuch"] for key in keys}}))
    word = f"{group}={getattr(run_of(), group).kind}" if hasattr(getattr(run_of(), group), "kind") else OTHERS[group]
    assert getattr(run_of(f"from={file}", word), group) == getattr(run_of(word), group)
    assert settings_notes([f"from={file}", word]) == [f"note    from={file}: {word} replaces {', '.join(keys)}"]
    assert "nosuch" in refusal(f"from={file}")
    assert not settings_notes([f"from={file}", "seed=1"])


def test_settings_file_typed_place_replaces_the_file_model(file: Path) -> None:
    file.write_text("model.path: org/base\nmodel.revision: old\nmodel.suggest.length: 100\noptimizer.lr: 3e-4")
    assert run_of(f"from={file}", "model=llama3_2_1b").model == run_of("model=llama3_2_1b").model
    given = [f"from={file}", "model=Qwen/Qwen3-1.7B", "optimizer=sgd"]
    config = run_of(*given)
    assert (config.model.path, config.model.revision) == ("Qwen/Qwen3-1.7B", None)
    assert config.optimizer.lr == 3e-4, "the rate is not the optimizer's"
    (note,) = settings_notes(given)
    assert note.endswith(": model=Qwen/Qwen3-1.7B replaces model.revision, model.suggest.length")
    assert plan_sweep(["-m", *given, "seed=1,2"], lambda _run: None).notes[0] == note


@pytest.mark.parametrize(
    ("settings", "typed", "held_out"),
    [
        ("dataset: text", "dataset.eval_path=b.txt", ("b.txt", 0.0)),
        ("dataset.eval_fraction: 0.1", "dataset.eval_path=b.txt", ("b.txt", 0.0)),
        ("dataset.eval_path: b.txt", "dataset.eval_fraction=0.1", (None, 0.1)),
        ("dataset.eval_path: b.txt", "dataset.eval_fraction=0", ("b.txt", 0.0)),
        ("dataset: text", "dataset.eval_fraction=0.3", (None, 0.3)),
    ],
)
def test_settings_file_typed_eval_rows_replace_the_others(
    file: Path, settings: str, typed: str, held_out: tuple[str | None, float]
) -> None:
    file.write_text(f"dataset: text\ndataset.path: a.txt\n{settings.removeprefix('dataset: text')}")
    dataset = run_of(f"from={file}", typed).dataset
    assert (dataset.eval_path, dataset.eval_fraction) == held_out


def test_settings_file_serves_sweeps_and_checks(file: Path) -> None:
    runs = plan_sweep(["-m", f"from={file}", "optimizer.lr=1e-3,1e-5"], lambda _run: None).runs
    assert [(run.optimizer.lr, run.adapter.r) for run in runs] == [(1e-3, 8), (1e-5, 8)]
    assert check_config(["memory", f"from={file}"]).run.adapter.r == 8


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("optimizer: {lrr: 1}", "optimizer.lrr is not a key. Did you mean optimizer.lr?"),
        ("recipe: full\nadapter.r: 4", "adapter.r=4: recipe=full trains no adapter"),
        ("model.trust_remote_code: true", "model.trust_remote_code in"),
        ("hydra: {callbacks: {a: {_target_: os.system}}}", "hydra.callbacks.a._target_ is not a key."),
        (
            "cache_dir: /tmp/x",
            "is not accepted, because it decides which code runs. If you trust the source, type cache_dir=/tmp/x",
        ),
        ("launch: {num_processes: 500}", "type launch.num_processes=500 on the command line."),
        ("launch.threads: 9", "launch.threads in"),
        ("+seed: 1", "my.yaml: not the name of a setting. Write section.key or group, without + ~ @ or /."),
        ("varied_from: other.yaml", "there is no run.yaml in it"),
        ("recipe: [", "it cannot be read as settings"),
        ("- recipe", "it has no settings"),
        ("a: &a [1]\nb: *a", "it has an alias"),
        ("training.max_steps: three", "training.max_steps=three"),
    ],
)
def test_settings_file_that_is_wrong_is_refused(file: Path, settings: str, message: str) -> None:
    file.write_text(settings)
    assert message in refusal(f"from={file}")


def test_settings_file_that_is_none_is_refused(tmp_path: Path) -> None:
    assert "there is no such file" in refusal(f"from={tmp_path / 'no.yaml'}")
    (tmp_path / "manifest.json").write_text("{}")
    (tmp_path / "run.yaml").write_text("seed: 1")
    assert f"Give its folder: from={tmp_path}" in refusal(f"from={tmp_path / 'run.yaml'}")
