"""The program as a user starts it: what it says, what it writes, what comes out."""

import json
from pathlib import Path

import pytest
import yaml

from app.tracking.formatting import PHASES, format_bytes
from tests.harness.runs import SECRET, SMALL, FinishedRuns, Zygote, losses, metrics, numbers, result

STEP_KEYS = ["step", "epoch", "loss", "lr", "grad_norm", "tokens", "trained_tokens"]
STEP_KEYS += ["tokens_per_second", "samples_per_second", "seconds", *PHASES, "peak_memory_bytes"]
RESULT_KEYS = ["status", "objective", "objective_is", "steps", "train_loss_first", "train_loss_last", "eval_loss"]
RESULT_KEYS += ["exact_match", "tokens_per_second", "samples_per_second", "seconds", *PHASES, "peak_memory_bytes"]
RESULT_KEYS += [
    "device_used_bytes",
    "memory_predicted_bytes",
    "memory_measured_bytes",
    "experts",
    "start_metrics",
    "final_metrics",
    "final",
]
ONE = "1 compositions\n"  # of tests/command/compositions.py
FILES = ["base", "checkpoints", "final", "log.txt", "manifest.json", "metrics.jsonl", "preview.json"]
FILES += ["report.html", "result.json", "run.yaml", "samples.jsonl"]


def test_train_writes_the_documented_output_folder(finished: FinishedRuns) -> None:
    run, said = finished(), finished.said["lora"]
    assert sorted(f.name for f in run.iterdir()) == FILES
    steps = [line for line in metrics(run) if "loss" in line]
    assert [list(line) for line in steps] == [STEP_KEYS] * 6
    assert [line["step"] for line in metrics(run) if "eval_loss" in line] == [0, 2, 4, 6]
    evaluations = [line for line in metrics(run) if "eval_loss" in line]
    assert [list(line) for line in evaluations] == [["step", "epoch", "eval_loss", "exact_match"]] * 4
    assert list(result(run)) == RESULT_KEYS
    assert result(run)["exact_match"] == evaluations[-1]["exact_match"]
    assert (
        result(run)["start_metrics"].items() >= {"eval_loss": evaluations[0]["eval_loss"], "exact_match": 0.0}.items()
    )
    assert result(run)["final"] == str(run / "final")
    assert result(run)["objective"] == min(line["eval_loss"] for line in metrics(run) if "eval_loss" in line)
    assert yaml.safe_load((run / "run.yaml").read_text())["training"]["max_steps"] == 6
    manifest = json.loads((run / "manifest.json").read_text())
    chosen = {"precision": "fp32", "attention": "sdpa", "compile": "none", "device": "cpu", "processes": 1}
    assert manifest["choices"] == {**chosen, "threads": 1, "format": "messages", "recompute": False, "tokens": 64}
    assert manifest["counts"]["data"]["train"]["samples"] == 90
    assert set(manifest["hashes"]) == {"train", "eval", "tokenizer", "base"}
    assert manifest["hashes"]["base"] is None, "its weights were drawn"
    assert 0 < sum(manifest["memory"].values()) < result(run)["peak_memory_bytes"]
    predicted, measured = (result(run)[f"memory_{kind}_bytes"] for kind in ("predicted", "measured"))
    # of the bin with most labels, and of that of the second step: it may have a document more, each rounded up
    assert 0.8 * predicted < measured <= predicted + 4096
    assert manifest["memory_plan"]["bytes"] == sum(manifest["memory_plan"]["anatomy"].values()) == predicted
    assert f"tensors: {format_bytes(predicted)} estimated, {format_bytes(measured)} measured" in said
    assert "; whole process: " in said
    assert set(manifest["hardware"]) == {"device", "gpu", "cpu"}
    assert len(list((run / "checkpoints").iterdir())) == 2
    everything = b"".join(f.read_bytes() for f in run.rglob("*") if f.is_file())
    assert SECRET.encode() not in everything


def test_train_from_run_without_changes_gives_its_numbers(
    zygote: Zygote, tmp_path: Path, finished: FinishedRuns
) -> None:
    zygote.run(tmp_path, f"from={finished()}", "output_dir=again", code=0)
    assert numbers(tmp_path / "again") == numbers(finished())
    assert json.loads((tmp_path / "again" / "manifest.json").read_text())["varied_from"] == str(finished())


def test_train_typed_group_reports_what_it_replaces(zygote: Zygote, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("model.path: org/base\nseed: 3")
    words = ("from=mine.yaml", "model=tiny", "--cfg", "job")
    ended = zygote.run(tmp_path, *words, module="tests.command.compositions", code=0)
    assert ended.stderr == "note    from=mine.yaml: model=tiny replaces model.path\n"
    config, composed = ended.stdout[: -len(ONE)], ended.stdout[-len(ONE) :]
    assert yaml.safe_load(config)["model"]["path"] == "asset:tiny"
    assert composed == ONE


def check_golden(zygote: Zygote, run: Path, recipe: str) -> None:
    """A refactor must not move them: they hold for fp32 on any machine, to the rounding of its kernels."""
    zygote.run(run.parent, *SMALL, f"recipe={recipe}", "training.max_steps=6", f"output_dir={run}", code=0)
    golden = json.loads((Path(__file__).parent / "golden_losses.json").read_text())[recipe]
    assert losses(run) == pytest.approx(golden, rel=1e-4)


def test_train_full_losses_are_golden(zygote: Zygote, tmp_path: Path) -> None:
    check_golden(zygote, tmp_path / "run", "full")


def test_dry_run_prints_the_plan_and_leaves_the_folder_to_a_run(zygote: Zygote, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (tmp_path / "mine.yaml").write_text("seed: 0\n")
    words = (*SMALL, "from=mine.yaml", "dry_run=true", f"output_dir={run}")
    ended = zygote.finish(tmp_path, *words, module="tests.command.compositions")
    assert "(2 epochs), about " in ended.stdout
    assert ended.stdout.endswith(ONE)
    assert result(run)["status"] == "dry_run"
    assert not (run / "final").exists()
    assert not (run / "checkpoints").exists()
    assert not (run / "base").exists()
    check_golden(zygote, run, "lora")


@pytest.mark.parametrize(
    ("words", "compositions"), [(("--cfg", "job", "model=llama", "recipe=full"), ONE), (("sed=1",), "0 compositions\n")]
)
def test_start_composes_the_settings_once(
    zygote: Zygote, tmp_path: Path, words: tuple[str, ...], compositions: str
) -> None:
    ended = zygote.run(tmp_path, *words, module="tests.command.compositions")
    assert ended.stdout.endswith(compositions)
