"""The scores of a finished run: those of its own evaluation, whatever way they are computed."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.assets import ROOT
from tests.command.test_resume import SMALL
from tests.command.test_wrong_inputs import content_of, refused
from tests.conftest import RunApp
from tests.runs import Ended, Zygote, metrics

FEW = (*(text for text in SMALL if not text.startswith("eval.")), "eval.samples=0", "training.max_steps=4")
RATES = {"lora": "optimizer.lr=2e-2", "qlora": "optimizer.lr=2e-2", "full": "optimizer.lr=1e-2"}
FIGURES = ["eval_loss", "perplexity", "token_accuracy", "exact_match"]
# turns of the assistant in the held-out rows that SMALL takes
ANSWERS = sum(
    turn["role"] == "assistant"
    for line in (ROOT / "sample" / "eval.jsonl").read_text().splitlines()[:12]
    for turn in json.loads(line)["messages"]
)
KEYS = [*FIGURES, *(f"{key}_interval" for key in FIGURES)]


@pytest.fixture(scope="module")
def made(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The run of a recipe, trained once; the tests leave it as it is but for evaluate.json."""
    folder = tmp_path_factory.mktemp("runs")

    def make(recipe: str) -> Path:
        run = folder / recipe
        if not run.exists():
            ended = zygote.run(folder, *FEW, f"recipe={recipe}", RATES[recipe], f"output_dir={run}")
            assert ended.code == 0, ended.stderr
        return run

    return make


def score(zygote: Zygote, folder: Path, run: Path, *given: str) -> tuple[dict[str, Any], Ended]:
    ended = zygote.run(folder, f"run={run}", "output_dir=scores", *given, module="app.evaluate")
    assert (ended.code, ended.stderr) == (0, "")
    scores: dict[str, Any] = json.loads((folder / "scores" / "evaluate.json").read_text())
    return scores, ended


def last_evaluation(run: Path) -> dict[str, float]:
    return [line for line in metrics(run) if "eval_loss" in line][-1]


def eval_loss(run: Path) -> float:
    return last_evaluation(run)["eval_loss"]


@pytest.mark.parametrize("recipe", ["lora", "qlora", "full"])
def test_it_is_the_last_evaluation_of_the_run_and_the_base_beside_it(
    zygote: Zygote, made: Callable[[str], Path], tmp_path: Path, recipe: str
) -> None:
    run = made(recipe)
    before = content_of(run)
    ended = zygote.run(run.parent, f"run={run}", "weights=both", module="app.evaluate")
    assert (ended.code, ended.stderr) == (0, "")
    after = content_of(run)
    scores = json.loads(after.pop("evaluate.json"))
    assert after == before
    (run / "evaluate.json").unlink()

    assert scores["eval_loss"] == scores["tuned_eval_loss"] == pytest.approx(eval_loss(run), rel=1e-6)
    assert scores["exact_match"] == scores["tuned_exact_match"] == last_evaluation(run)["exact_match"]
    assert list(scores)[: 4 * len(KEYS)] == [
        f"{side}{key}" for side in ("", "tuned_", "base_", "difference_") for key in KEYS
    ]
    for key in FIGURES:
        assert scores[f"difference_{key}"] == scores[f"tuned_{key}"] - scores[f"base_{key}"]
        for side in ("tuned", "base", "difference"):
            low, high = scores[f"{side}_{key}_interval"]
            assert low <= scores[f"{side}_{key}"] <= high
            assert low < high
    # one seed draws one base: kept beside an adapter, drawn again for a whole model; in four bits it is only near
    base, _ = score(zygote, tmp_path, made("lora" if recipe == "full" else "full"), "weights=base")
    assert scores["base_eval_loss"] == pytest.approx(
        base["eval_loss"], rel=5e-2 if recipe == "qlora" else 1e-6
    )
    assert scores["tuned_token_accuracy"] > scores["base_token_accuracy"]
    assert (scores["rows"], scores["trained_tokens"], scores["answers"]) == (12, 45, ANSWERS)
    assert scores["rows_are"] == "held_out"
    assert "these are the rows that the run held out" in ended.stdout
    assert f"tuned   loss {scores['eval_loss']:.4f} | perplexity " in ended.stdout
    heading, loss, *_ = ended.stdout.splitlines()[-7:]
    assert heading.split() == ["base", "tuned", "difference"]
    assert loss.startswith(f"loss             {scores['base_eval_loss']:.4f} [")
    assert f"written {run / 'evaluate.json'}" in ended.stdout


def test_batch_size_packing_order_and_processes_change_nothing(
    zygote: Zygote, made: Callable[[str], Path], tmp_path: Path
) -> None:
    run = made("lora")
    plain, _ = score(zygote, tmp_path, run)
    assert set(KEYS) < plain.keys()
    assert not [key for key in plain if key.startswith(("tuned_", "base_"))]
    rows = (ROOT / "sample" / "eval.jsonl").read_text().splitlines(keepends=True)[:12]
    random.Random(0).shuffle(rows)
    (tmp_path / "shuffled.jsonl").write_text("".join(rows))
    ways = [
        ("batching.packing=false", "eval.rows=1"),
        ("batching.packing=false", "eval.rows=7"),
        ("batching.tokens=200",),
        ("dataset.path=shuffled.jsonl", "launch.threads=2"),
    ]
    for way in ways:
        scores, _ = score(zygote, tmp_path, run, *way)
        same_numbers(scores, plain)
    same_numbers(by_two_processes(zygote, tmp_path, run), plain)


def same_numbers(scores: dict[str, Any], expected: dict[str, Any]) -> None:
    assert scores["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-6)
    assert scores["token_accuracy"] == expected["token_accuracy"] > 0
    assert scores["exact_match"] == expected["exact_match"]
    for key in KEYS:
        assert scores[key] == pytest.approx(expected[key], rel=1e-5)
    assert (scores["rows"], scores["answers"]) == (expected["rows"], expected["answers"])


def by_two_processes(zygote: Zygote, folder: Path, run: Path) -> dict[str, Any]:
    """The first one speaks and writes."""
    first, second = zygote.run_together(
        folder, 2, f"run={run}", "output_dir=scores", "batching.tokens=64", module="app.evaluate"
    )
    assert (first.code, first.stderr, second.code, second.stderr) == (0, "", 0, "")
    assert "[95% intervals: 2,000 draws of 12 rows]" in first.stdout
    assert second.stdout == ""
    scores: dict[str, Any] = json.loads((folder / "scores" / "evaluate.json").read_text())
    return scores


def test_another_dataset_is_scored_whole_and_this_is_said(
    zygote: Zygote, made: Callable[[str], Path], tmp_path: Path
) -> None:
    rows = [{"prompt": f"Say {n}.", "completion": f" {n}"} for n in range(20)]
    (tmp_path / "new.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ("dataset=prompt_completion", "dataset.path=new.jsonl", "dataset.max_length=64")
    scores, ended = score(zygote, tmp_path, made("lora"), *given, "weights=base", "precision=bf16")
    assert "these are all rows of new.jsonl: nothing is held out of them" in ended.stdout
    assert (scores["rows"], scores["rows_are"], scores["dataset"]) == (20, "other", "new.jsonl")
    assert (scores["weights"], scores["precision"]) == ("base", "bf16")
    assert (scores["answers"], scores["exact_match"]) == (20, 0.0)
    (tmp_path / "book.txt").write_text("One line after another.\n" * 200)
    given = ("dataset=text", "dataset.path=book.txt", "dataset.max_length=64")
    scores, ended = score(zygote, tmp_path, made("lora"), *given)
    assert (scores["answers"], scores["exact_match"], scores["exact_match_interval"]) == (0, None, None)
    assert "exact match" not in ended.stdout
    _, ended = score(zygote, tmp_path, made("lora"), "dataset=sample", "dataset.max_length=64", "eval.rows=9")
    assert "these are not the same rows as the run held out" in ended.stdout
    own = ("dataset.eval_path=asset:sample/train.jsonl", "dataset.eval_max_rows=90")
    scores, ended = score(zygote, tmp_path, made("lora"), *own)
    assert "these are the very rows that the run was trained on" in ended.stdout
    assert scores["rows_are"] == "trained_on"


def test_an_adapter_is_scored_on_the_base_it_was_tuned_on(zygote: Zygote, tmp_path: Path) -> None:
    """Its base may lie elsewhere now; other weights would give a number too, but not that of the run."""
    first = zygote.run(tmp_path, *FEW, "recipe=full", "training.max_steps=1", "output_dir=first")
    assert first.code == 0, first.stderr
    shutil.copytree(tmp_path / "first" / "final", tmp_path / "model")
    few = ("dataset.max_rows=40", "dataset.eval_max_rows=5", "training.max_steps=2", "launch.threads=1")
    ended = zygote.run(
        tmp_path, *few, "precision=fp32", "model.path=model", "eval.samples=0", "output_dir=run"
    )
    assert ended.code == 0, ended.stderr
    (tmp_path / "model").rename(tmp_path / "moved")
    scores, _ = score(zygote, tmp_path, tmp_path / "run", "model.path=moved")
    assert scores["eval_loss"] == pytest.approx(eval_loss(tmp_path / "run"), rel=1e-6)

    weights = tmp_path / "moved" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    ended = zygote.run(tmp_path, f"run={tmp_path / 'run'}", "model.path=moved", module="app.evaluate")
    refused(
        ended.code, ended.stdout, ended.stderr, "model.path=moved: the weights there are not the base of run="
    )
    assert not (tmp_path / "run" / "evaluate.json").exists()


def test_a_run_that_held_nothing_out_is_not_scored_on_what_it_learnt(
    run_app: RunApp, made: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(made("full"), tmp_path / "run")
    settings = yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())
    settings["dataset"]["eval_path"] = None
    (tmp_path / "run" / "run.yaml").write_text(yaml.safe_dump(settings))
    ended = run_app("run=run", module="app.evaluate")
    refused(
        ended.returncode, ended.stdout, ended.stderr, "run=run: it held no rows out. Give dataset.path=FILE"
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("run=none",), "run=none: there is no such folder."),
        (("run=run", "weihgts=both"), "weihgts is not a key. Did you mean weights?"),
        (("run=run", "optimizer.lr=1"), "optimizer.lr does not apply, because an evaluation trains nothing."),
        (("run=run", "dataset.path=nw.jsonl"), "dataset.path=nw.jsonl: no such file or folder in "),
        (("run=run", "dataset.eval_path=nw.jsonl"), "dataset.eval_path=nw.jsonl: no such file or folder in "),
        (
            ("run=run", "model.chat_template=chatmll"),
            "model.chat_template=chatmll is neither a file nor one of ",
        ),
        (("run=run", "output_dir=run/run.yaml"), "output_dir: cannot write run/run.yaml"),
    ],
)
def test_what_is_wrong_is_told_before_anything_is_loaded(
    run_app: RunApp, made: Callable[[str], Path], tmp_path: Path, given: tuple[str, ...], message: str
) -> None:
    shutil.copytree(made("lora"), tmp_path / "run")
    before = content_of(tmp_path)
    ended = run_app(*given, module="app.evaluate")
    refused(ended.returncode, ended.stdout, ended.stderr, message)
    assert ended.stdout == ""
    assert content_of(tmp_path) == before
