"""`from=FILE.yaml`: groups and keys of a file."""

from pathlib import Path

import pytest

from app.config.commands import check_config
from app.config.load import compose_run
from app.config.overrides import split_arguments
from app.config.schema import RunConfig
from app.errors import AppError
from app.sweeps.sweep import plan_sweep

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
    assert (config.optimizer.kind, config.optimizer.lr, config.optimizer.weight_decay) == ("sgd", 1.0, 0.1)
    assert (config.schedule.warmup_steps, config.schedule.warmup_fraction) == (None, 0.1)
    file.write_text("model: org/name\ndataset: data/a.jsonl\nmodel.suggest.length: 100")
    assert (run_of(f"from={file}").model.path, run_of(f"from={file}").dataset.path) == ("org/name", "data/a.jsonl")
    assert run_of(f"from={file}", "dataset=data/b.jsonl").dataset.path == "data/b.jsonl"


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
        ("hydra: {callbacks: {a: {_target_: os.system}}}", "hydra.callbacks.a._target_ in"),
        ("cache_dir: /tmp/x", "cache_dir in"),
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
