"""The program as a user starts it: what it says, what it writes, what comes out."""

import json
import sys
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from app.assets import ROOT
from app.record.lines import memory
from scripts.make_assets.scores import answered, held_out_chat, read_model
from tests.conftest import RunApp
from tests.runs import SMALL, Zygote, metrics, result

STEP_KEYS = ["step", "epoch", "loss", "lr", "grad_norm", "tokens", "trained_tokens"]
STEP_KEYS += ["tokens_per_second", "peak_memory_bytes"]
RESULT_KEYS = ["status", "objective", "steps", "train_loss_first", "train_loss_last", "eval_loss"]
RESULT_KEYS += ["exact_match", "tokens_per_second", "peak_memory_bytes"]
RESULT_KEYS += ["memory_predicted_bytes", "memory_measured_bytes", "final"]
FILES = ["base", "checkpoints", "final", "log.txt", "manifest.json", "metrics.jsonl", "preview.json"]
FILES += ["report.html", "result.json", "run.yaml", "samples.jsonl"]


def test_the_default_run_learns_within_a_minute_and_says_what_to_do_next(
    run_app: RunApp, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    ended = run_app(f"output_dir={run}", timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    outcome = result(run)
    assert outcome["status"] == "finished"
    assert outcome["eval_loss"] <= 0.05 * outcome["train_loss_first"]
    assert outcome["steps"] == 397
    lines = metrics(run)
    assert sum(line["tokens"] for line in lines[-2:] if "loss" in line) == 100_502
    *table, told = ended.stdout.splitlines()[-10:-4]
    assert told.startswith("memory  ")
    assert "predicted" in told
    assert "measured" in told
    assert table[0].split() == ["held", "out", "expected", "before", "after", "step", "397"]
    last = ended.stdout.splitlines()[-3:]
    assert str(run / "final") in last[0]
    assert last[2] == f"report  {run}/report.html"
    assert f">python -m app.train output_dir={run}</pre>" in (run / "report.html").read_text()
    assert last[1] == f'try it  {sys.executable} -m app.generate run={run} prompt="..."'
    answer = run_app(
        f"run={run}", "prompt=Give the opposite of cold.", "max_new_tokens=8", module="app.generate"
    )
    assert (answer.returncode, answer.stderr) == (0, "")
    assert answer.stdout.strip() == "hot"
    model, tokenizer = read_model(ROOT / "tiny", run / "final")
    assert answered(model, held_out_chat(tokenizer)).mean >= 0.80


def test_the_output_folder_is_what_others_read(zygote: Zygote, tmp_path: Path) -> None:
    run = tmp_path / "run"
    ended = zygote.run(tmp_path, *SMALL, "training.max_steps=4", f"output_dir={run}", HF_TOKEN="hf_secret123")
    assert (ended.code, ended.stderr) == (0, "")
    assert sorted(f.name for f in run.iterdir()) == FILES
    steps = [line for line in metrics(run) if "loss" in line]
    assert [list(line) for line in steps] == [STEP_KEYS] * 4
    assert [line["step"] for line in metrics(run) if "eval_loss" in line] == [2, 4]
    evaluations = [line for line in metrics(run) if "eval_loss" in line]
    assert [list(line) for line in evaluations] == [["step", "epoch", "eval_loss", "exact_match"]] * 2
    assert list(result(run)) == RESULT_KEYS
    assert result(run)["exact_match"] == evaluations[-1]["exact_match"]
    assert result(run)["final"] == str(run / "final")
    assert result(run)["objective"] == min(line["eval_loss"] for line in metrics(run) if "eval_loss" in line)
    assert yaml.safe_load((run / "run.yaml").read_text())["training"]["max_steps"] == 4
    manifest = json.loads((run / "manifest.json").read_text())
    chosen = {"precision": "fp32", "attention": "sdpa", "device": "cpu", "threads": 1, "processes": 1}
    assert manifest["choices"] == {**chosen, "format": "messages", "recompute": False, "tokens": 64}
    assert manifest["counts"]["data"]["train"]["samples"] == 90
    assert set(manifest["hashes"]) == {"train", "eval", "tokenizer", "base"}
    assert manifest["hashes"]["base"] is None, "its weights were drawn"
    assert 0 < sum(manifest["memory"].values()) < result(run)["peak_memory_bytes"]
    predicted, measured = (result(run)[f"memory_{kind}_bytes"] for kind in ("predicted", "measured"))
    # of the bin with most labels, and of that of the second step: it may have a document more, each rounded up
    assert 0.8 * predicted < measured <= predicted + 4096
    assert manifest["memory_plan"]["bytes"] == sum(manifest["memory_plan"]["anatomy"].values()) == predicted
    told = f"{memory(predicted)} predicted, {memory(measured)} measured"
    assert told in ended.stdout
    assert set(manifest["hardware"]) == {"device", "gpu", "cpu"}
    assert len(list((run / "checkpoints").iterdir())) == 2
    everything = b"".join(f.read_bytes() for f in run.rglob("*") if f.is_file())
    assert b"hf_secret123" not in everything


@pytest.mark.parametrize("recipe", ["lora", "full"])
def test_the_losses_are_the_golden_ones(zygote: Zygote, tmp_path: Path, recipe: str) -> None:
    """A refactor must not move them: they hold for fp32 on any machine, to the rounding of its kernels."""
    run = tmp_path / "run"
    ended = zygote.run(tmp_path, *SMALL, f"recipe={recipe}", "training.max_steps=6", f"output_dir={run}")
    assert ended.code == 0, ended.stderr
    golden = json.loads((Path(__file__).parent / "golden_losses.json").read_text())[recipe]
    assert [line["loss"] for line in metrics(run) if "loss" in line] == pytest.approx(golden, rel=1e-4)


def test_a_dry_run_tells_the_plan_and_loads_no_weights(zygote: Zygote, tmp_path: Path) -> None:
    run = tmp_path / "run"
    ended = zygote.run(tmp_path, *SMALL, "dry_run=true", f"output_dir={run}")
    assert (ended.code, ended.stderr) == (0, "")
    assert "(2 epochs) of 2 bins of 64 tokens, " in ended.stdout
    assert result(run)["status"] == "dry_run"
    assert not (run / "final").exists()
    assert not (run / "checkpoints").exists()
    assert not (run / "base").exists()
    again = zygote.run(tmp_path, *SMALL, "training.max_steps=1", f"output_dir={run}")
    assert again.code == 0, f"a dry run does not take the folder: {again.stderr}"


def test_a_dry_run_of_eight_billion_weights_needs_none_of_them(zygote: Zygote, tmp_path: Path) -> None:
    run = tmp_path / "run"
    ended = zygote.run(tmp_path, "model=llama", "model.weights=random", "dry_run=true", f"output_dir={run}")
    assert (ended.code, ended.stderr) == (0, "")
    assert "8,114,147,328 weights, 83,886,080 trained (1.0%)" in ended.stdout


def test_the_best_weights_are_the_final_ones_when_asked(zygote: Zygote, tmp_path: Path) -> None:
    """With a rate that rises until it ruins the model, the best evaluation is not the last."""
    run = tmp_path / "run"
    ruin = ("recipe=full", "optimizer.lr=0.1", "schedule.warmup_fraction=0.9", "training.clip=0")
    best_wanted = ("eval.every=1", "checkpoint.final=best", "training.max_steps=6")
    ended = zygote.run(tmp_path, *SMALL, *ruin, *best_wanted, f"output_dir={run}")
    assert ended.code == 0, ended.stderr
    evaluations = {line["step"]: line["eval_loss"] for line in metrics(run) if "eval_loss" in line}
    best = min(evaluations, key=lambda step: evaluations[step])
    assert best < 6
    assert f"final/ has the weights of step {best}" in ended.stdout
    saved = load_file(run / f"checkpoints/step-{best:06d}/weights.safetensors")
    final = load_file(run / "final/model.safetensors")
    assert all(tensor.equal(final[name]) for name, tensor in saved.items())


def test_five_steps_of_everything(zygote: Zygote, tmp_path: Path) -> None:
    ended = zygote.run(tmp_path, "debug=fast", *SMALL[:6], "output_dir=run", "tracker=tensorboard")
    assert (ended.code, ended.stderr) == (0, "")
    assert list((tmp_path / "run").rglob("events.out.tfevents*"))


def test_wandb_works_without_an_account(zygote: Zygote, tmp_path: Path) -> None:
    ended = zygote.run(
        tmp_path, *SMALL, "training.max_steps=2", "output_dir=run", "tracker=wandb", WANDB_MODE="offline"
    )
    assert ended.code == 0, ended.stderr
    assert list((tmp_path / "run").rglob("*.wandb"))


@pytest.mark.parametrize(
    ("name", "content", "extra"),
    [
        ("rows.json", '[{"instruction": "Say hi", "input": "", "output": "hi"}]', ("dataset=instruction",)),
        ("rows.csv", "prompt,completion\nSay hi,hi\n", ("dataset=prompt_completion",)),
        (
            "book.txt",
            "To be, or not to be, that is the question. " * 200,
            ("dataset=text", "dataset.eval_fraction=0"),
        ),
    ],
)
def test_the_other_formats_train(
    zygote: Zygote, tmp_path: Path, name: str, content: str, extra: tuple[str, ...]
) -> None:
    (tmp_path / name).write_text(content)
    small = [text for text in SMALL if not text.startswith("dataset.")]
    ended = zygote.run(
        tmp_path,
        *small,
        *extra,
        f"dataset.path={name}",
        "dataset.eval_fraction=0",
        "batching.tokens=256",
        "training.max_steps=2",
        "output_dir=run",
    )
    assert (ended.code, ended.stderr) == (0, "")
    assert "evaluation" not in ended.stdout
    answer = zygote.run(tmp_path, "run=run", "prompt=Say hi", "max_new_tokens=3", module="app.generate")
    assert (answer.code, answer.stderr) == (0, "")


def test_any_local_folder_trains_by_its_path_alone(zygote: Zygote, tmp_path: Path) -> None:
    first = zygote.run(tmp_path, *SMALL, "recipe=full", "training.max_steps=1", "output_dir=first")
    assert first.code == 0, first.stderr
    few = ("dataset.max_rows=40", "dataset.eval_max_rows=5", "training.max_steps=2", "launch.threads=1")
    ended = zygote.run(tmp_path, *few, "model.path=first/final", "output_dir=second", "eval.samples=1")
    assert (ended.code, ended.stderr) == (0, "")
    assert "dataset.max_length=2048 -> 512" in ended.stdout
    assert yaml.safe_load((tmp_path / "second/run.yaml").read_text())["dataset"]["max_length"] == 512
    adapter = json.loads((tmp_path / "second/final/adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == str(tmp_path / "first/final")
    assert not (tmp_path / "second/base").exists()
    manifest = json.loads((tmp_path / "second/manifest.json").read_text())
    assert len(manifest["hashes"]["base"]) == 64
