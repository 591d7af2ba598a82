"""`from=RUN`: the settings of a run, varied."""

from dataclasses import asdict
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from app.config.commands import check_config
from app.config.load import compose_run
from app.config.overrides import split_arguments
from app.config.schema import RunConfig
from app.errors import AppError
from app.sweeps.sweep import plan_sweep


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder with the run.yaml of a run that was stopped, continued and tracked."""
    words = ["recipe=full", "optimizer.lr=3e-3", "model.suggest.length=100", "seed=7", "resume=auto"]
    words += ["tracker=wandb", "tracker.name=a"]
    folder = tmp_path / "run"
    folder.mkdir()
    data = asdict(compose_run([*words, f"output_dir={folder}", "training.stop_after=5"]))
    (folder / "run.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(data)))
    return folder


def varied(*arguments: str) -> RunConfig:
    return compose_run(split_arguments(arguments)[0])


def refusals(*arguments: str) -> list[str]:
    with pytest.raises(AppError) as refusal:
        varied(*arguments)
    return list(refusal.value.problems)


def test_varied_run_has_settings_of_its_start_and_own_folder(run: Path) -> None:
    config = varied(f"from={run}", "training.epochs=3")
    assert (config.seed, config.adapter.kind, config.optimizer.lr, config.training.epochs) == (7, "none", 3e-3, 3.0)
    assert config.varied_from == str(run)
    assert config.output_dir.startswith("runs/20")
    assert (config.resume, config.training.stop_after, config.tracker.name) == (None, None, None)
    assert varied(f"from={run}", "output_dir=b", "resume=auto").resume == "auto"
    assert check_config([f"from={run}", "batching.accumulation=2"]).run.seed == 7


def test_varied_run_group_replaces_section(run: Path) -> None:
    config = varied(f"from={run}", "dataset=text", "dataset.path=book.txt", "optimizer=sgd")
    assert (config.dataset.path, config.dataset.format, config.dataset.max_length) == ("book.txt", "text", 100)
    of_hub = varied(f"from={run}", "dataset=tatsu-lab/alpaca").dataset
    assert (of_hub.path, of_hub.format) == ("tatsu-lab/alpaca", "auto")
    assert (config.optimizer.kind, config.optimizer.lr) == ("sgd", 3e-3)
    assert varied(f"from={run}", "optimizer=sgd", "optimizer.lr=1").optimizer.lr == 1


def test_varied_run_typed_warm_up_replaces_the_other(run: Path) -> None:
    def warmup(*words: str) -> tuple[int | None, float | None]:
        schedule = varied(f"from={run}", *words).schedule
        return schedule.warmup_steps, schedule.warmup_fraction

    assert warmup() == (None, 0.03)
    assert warmup("schedule=linear", "schedule.warmup_steps=9") == (9, None)
    data = (run / "run.yaml").read_text()
    (run / "run.yaml").write_text(
        data.replace("warmup_fraction: 0.03", "warmup_fraction: null").replace("warmup_steps: null", "warmup_steps: 9")
    )
    assert warmup() == warmup("schedule.final_fraction=0.2") == (9, None)
    assert warmup("schedule.warmup_fraction=0.1") == (None, 0.1)
    assert warmup("schedule=linear") == (None, 0.03)
    assert len(refusals(f"from={run}", "schedule.warmup_fraction=0.1", "schedule.warmup_steps=5")) == 1


def test_varied_run_typed_eval_rows_replace_the_others(run: Path) -> None:
    def held_out(*words: str) -> tuple[str | None, float]:
        dataset = varied(f"from={run}", *words).dataset
        return dataset.eval_path, dataset.eval_fraction

    assert held_out() == ("asset:sample/eval.jsonl", 0.0)
    assert held_out("dataset.eval_fraction=0.1") == (None, 0.1)
    assert held_out("dataset=text", "dataset.path=a.txt", "dataset.eval_path=b.txt") == ("b.txt", 0.0)
    both = ("dataset.eval_fraction=0.1", "dataset.eval_path=b.txt")
    assert "both choose the held-out rows" in refusals(f"from={run}", *both)[0]


def test_varied_run_can_be_swept(run: Path) -> None:
    runs = plan_sweep(["-m", f"from={run}", "optimizer.lr=1e-3,1e-4"], lambda _run: None).runs
    assert [(each.optimizer.lr, each.seed) for each in runs] == [(1e-3, 7), (1e-4, 7)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("recipe=qlora", "recipe=qlora: rates and sizes that follow from it would stay as from="),
        (
            "model=llama",
            "Give the keys that change, or the command of that run (in its manifest.json) with model=llama",
        ),
        ("optimizer.lrr=1", "optimizer.lrr is not a key. Did you mean optimizer.lr?"),
        ("adapter.r=x", "adapter.r=x: expected a whole number."),
        ("adapter.r=8", "adapter.r=8: adapter=none does not read it, so it changes nothing."),
        ("batching.tokens=64", "is more than a bin holds"),
        ("from=~0", "from=~0: there is no user 0. Write the whole path, or ./~0."),
        ("from=null", "from=null: there is no run.yaml in it."),
        ("from=nowhere", "from=nowhere: there is no run.yaml in it. Give the output_dir of a run."),
        ("hydra.mode=RUN", "hydra.mode is not a key."),
    ],
)
def test_varied_run_invalid_refused(run: Path, given: str, message: str) -> None:
    (problem,) = refusals(f"from={run}", given)
    assert message in problem
