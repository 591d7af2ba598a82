"""Problems of any trial are reported before the first one, all together and each once."""

from pathlib import Path

import pytest

from app.config.schema import RunConfig
from app.errors import ConfigError, DataError
from app.sweeps.sweep import plan_sweep, sweep
from tests.harness.python import python


def nothing_more(_run: RunConfig) -> None:
    """The command's own check of parts, which has its own tests."""


def refusal_of(*words: str) -> list[str]:
    with pytest.raises(ConfigError) as refusal:
        sweep(["-m", *words], nothing_more)
    return list(refusal.value.problems)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_sweep_misspelt_key_reported_once() -> None:
    assert refusal_of("optimizer.lrr=1e-3,3e-4", "seed=1,2") == [
        "Unknown setting optimizer.lrr. Did you mean optimizer.lr?"
    ]


def test_sweep_over_places_and_choices() -> None:
    runs = plan_sweep(["-m", "model=qwen,org/small"], nothing_more).runs
    assert [each.model.path for each in runs] == ["Qwen/Qwen3-8B", "org/small"]


def test_sweep_problems_of_some_trials_together() -> None:
    problems = refusal_of("recipe=full,lroa", "quantization=nf4,none", "seed=1,x")
    assert problems == [
        "recipe=lroa: unknown recipe. Did you mean lora?",
        "quantization.kind=nf4 needs adapter.kind=lora: a quantized base is frozen. Choose recipe=lora or qlora, or "
        "set quantization=none. (trial 1: recipe=full quantization=nf4 seed=1)",
        "seed=x: expected a whole number. (trial 2 and 1 more: recipe=full quantization=nf4 seed=x)",
    ]


def test_sweep_and_run_problems_together() -> None:
    problems = refusal_of("resume=runs/a", "seed=shuffle(1,2)", "recipe=lroa,lora", "+adapter.rnk=2")
    assert [problem.removeprefix("Unknown setting ").split(" ")[0].rstrip(":.") for problem in problems] == [
        "resume=runs/a",
        "seed=shuffle(1,2)",
        "recipe=lroa",
        "adapter.rnk",
    ]


def test_sweep_with_resume_auto_is_the_same_sweep() -> None:
    plain, resumed = (plan_sweep(["-m", "seed=1,2", *words], lambda _run: None) for words in ([], ["resume=auto"]))
    assert (resumed.place, resumed.identity) == (plain.place, plain.identity)
    assert [each.overrides for each in resumed.proposer.points] == [("seed=1",), ("seed=2",)]


def test_sweep_check_parts_sees_every_trial() -> None:
    seen = []

    def check(run: RunConfig) -> None:
        seen.append((run.training.epochs, run.seed))
        if run.seed == 2:
            raise DataError("no such file")

    with pytest.raises(ConfigError) as refusal:
        sweep(["-m", "training.epochs=1,2", "seed=1,2"], check)
    assert refusal.value.problems == ("no such file (trial 2 and 1 more: training.epochs=1 seed=2)",)
    assert seen == [(1, 1), (1, 2), (2, 1), (2, 2)]


LEFT_OUT = "note    {} is ignored in trials that do not use it; equal trials run once"
AS_READ = [
    (
        "recipe=full,lora adapter.r=8,16",
        ["recipe=full", "recipe=lora adapter.r=8", "recipe=lora adapter.r=16"],
        ["adapter.r"],
    ),
    (
        "optimizer=sgd,adamw optimizer.momentum=0.9 optimizer.beta1=0.8",
        ["optimizer=sgd optimizer.momentum=0.9", "optimizer=adamw optimizer.beta1=0.8"],
        ["optimizer.momentum", "optimizer.beta1"],
    ),
    ("recipe=lora,qlora adapter.r=8", ["recipe=lora adapter.r=8", "recipe=qlora adapter.r=8"], []),
    (
        "sweep=rank recipe=full,lora sweep.space.adapter.r=[4,8]",
        ["recipe=full", "recipe=lora adapter.r=4", "recipe=lora adapter.r=8"],
        ["adapter.r"],
    ),
]


@pytest.mark.parametrize(("line", "trials", "left_out"), AS_READ, ids=[line for line, _, _ in AS_READ])
def test_sweep_trial_without_keys_that_it_does_not_read(line: str, trials: list[str], left_out: list[str]) -> None:
    plan = plan_sweep(["-m", *line.split()], nothing_more)
    assert [" ".join(trial.overrides) for trial in plan.proposer.points] == trials
    assert [note for note in plan.notes if note.startswith("note")] == [LEFT_OUT.format(key) for key in left_out]


def test_sweep_key_that_no_trial_reads_refused() -> None:
    assert len(refusal_of("recipe=full", "adapter.r=8,16")) == 2


def test_sweep_folder_by_swept_key_refused() -> None:
    (problem,) = refusal_of("output_dir=runs/${seed}", "seed=1,2")
    assert problem.startswith("output_dir=runs/${seed}: the folder differs between trials (runs/1, runs/2).")


def test_sweep_refused_before_torch_import(tmp_path: Path, app_env: dict[str, str]) -> None:
    program = (
        "import sys; from app import train\n"
        "sys.argv = ['train', '-m', 'sweep=optuna', 'sweep.space={seed: [1, 2]}', 'dataset=auto', "
        "'dataset.path=no.jsonl']\n"
        "try: train.main()\n"
        "finally: print(sorted({'torch', 'transformers', 'numpy', 'datasets', 'optuna'} & sys.modules.keys()))"
    )
    ended = python("-c", program, cwd=tmp_path, env=app_env)
    assert (ended.returncode, ended.stdout) == (2, "[]\n")
    assert ended.stderr.startswith("error: dataset.path=no.jsonl: no such file or folder")
    assert list(tmp_path.iterdir()) == []
