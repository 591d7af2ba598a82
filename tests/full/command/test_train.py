"""The program as a user starts it: what it says, what it writes, what comes out."""

import json
from pathlib import Path

import yaml
from safetensors.torch import load_file

from app.assets import ROOT
from scripts.make_assets.scores import answered, held_out_chat, read_model
from tests.conftest import RunApp
from tests.harness.runs import SMALL, Zygote, metrics, result


def test_default_run_learns_within_a_minute(run_app: RunApp, tmp_path: Path) -> None:
    run = tmp_path / "run"
    ended = run_app(f"output_dir={run}", timeout=300, code=0)
    assert ended.stderr == ""
    outcome = result(run)
    assert outcome["status"] == "finished"
    assert outcome["eval_loss"] <= 0.05 * outcome["train_loss_first"]
    assert outcome["steps"] == 397
    lines = metrics(run)
    assert sum(line["tokens"] for line in lines[-2:] if "loss" in line) == 100_502
    *table, told = ended.stdout.splitlines()[-11:-5]
    assert told.startswith("memory  ")
    assert "tensors: " in told
    assert "estimated" in told
    assert "measured" in told
    assert table[0].split() == ["prompt", "expected", "before", "after", "step", "397"]
    last = ended.stdout.splitlines()[-3:]
    assert str(run / "final") in last[0]
    assert last[2] == f"report  {run}/report.html"
    assert f">finetune train output_dir={run}</pre>" in (run / "report.html").read_text()
    assert last[1].startswith("Try it: ")
    assert last[1].endswith(f'finetune generate run={run} prompt="..."')
    answer = run_app(f"run={run}", "prompt=Give the opposite of cold.", "max_new_tokens=8", module="app.generate")
    assert (answer.returncode, answer.stderr) == (0, "")
    assert answer.stdout.strip() == "hot"
    model, tokenizer = read_model(ROOT / "tiny", run / "final")
    assert answered(model, held_out_chat(tokenizer)).mean >= 0.80


def test_local_model_folder_trains_by_its_path(zygote: Zygote, tmp_path: Path) -> None:
    zygote.run(tmp_path, *SMALL, "recipe=full", "training.max_steps=1", "output_dir=first", code=0)
    few = ("dataset.max_rows=40", "dataset.eval_max_rows=5", "training.max_steps=2", "launch.threads=1")
    ended = zygote.finish(tmp_path, *few, "model.path=first/final", "output_dir=second", "eval.samples=1")
    assert "dataset.max_length=2048 -> 512" in ended.stdout
    assert yaml.safe_load((tmp_path / "second/run.yaml").read_text())["dataset"]["max_length"] == 512
    adapter = json.loads((tmp_path / "second/final/adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == str(tmp_path / "first/final")
    assert not (tmp_path / "second/base").exists()
    manifest = json.loads((tmp_path / "second/manifest.json").read_text())
    assert len(manifest["hashes"]["base"]) == 64


def test_final_best_takes_the_best_checkpoint(zygote: Zygote, tmp_path: Path) -> None:
    """With a rate that rises until it ruins the model, the best evaluation is not the last."""
    run = tmp_path / "run"
    ruin = ("recipe=full", "optimizer.lr=0.1", "schedule.warmup_fraction=0.9", "training.clip=0")
    best_wanted = ("eval.every=1", "checkpoint.final=best", "training.max_steps=6")
    ended = zygote.run(tmp_path, *SMALL, *ruin, *best_wanted, f"output_dir={run}", code=0)
    evaluations = {line["step"]: line["eval_loss"] for line in metrics(run) if "eval_loss" in line and line["step"]}
    best = min(evaluations, key=lambda step: evaluations[step])
    assert best < 6
    assert f"final/ has the weights of step {best}" in ended.stdout
    saved = load_file(run / f"checkpoints/step-{best:06d}/weights.safetensors")
    final = load_file(run / "final/model.safetensors")
    assert all(tensor.equal(final[name]) for name, tensor in saved.items())


def test_dry_run_of_a_missing_model_uses_its_preset_and_says_so(zygote: Zygote, tmp_path: Path) -> None:
    words = ("recipe=qlora", "model=qwen3_0_6b", "training.recompute=false", "compile=none", "dataset.max_rows=50")
    printed = zygote.run(tmp_path, *words, "dry_run=true", "output_dir=plan", code=0).stdout
    assert "model    Qwen/Qwen3-0.6B, 596,049,920 parameters + adapter " in printed
    assert "Qwen/Qwen3-0.6B is not on this machine: token counts and steps are approximate" in printed
    assert yaml.safe_load((tmp_path / "plan" / "run.yaml").read_text())["model"]["weights"] == "pretrained"
    other = zygote.run(tmp_path, *words, "model.path=org/other", "dry_run=true", "output_dir=other")
    assert other.code == 2
    assert "model.path=org/other is not on this machine" in other.stderr
