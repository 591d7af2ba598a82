"""Folders as runs and sweeps leave them, without any training."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from app.sweeps.trials import Outcome, best, values_of

SETTINGS: dict[str, Any] = {
    "output_dir": "runs/mine",
    "seed": 0,
    "model": {"path": "asset:tiny", "weights": "random"},
    "adapter": {"kind": "lora", "r": 32},
    "quantization": {"kind": "none"},
    "dataset": {"path": "asset:sample/train.jsonl"},
    "optimizer": {"kind": "adamw", "lr": 0.001},
    "schedule": {"kind": "cosine"},
}
MANIFEST: dict[str, Any] = {
    "created": "2026-01-02T03:04:05+00:00",
    "program": {"version": "0.1", "git": {"commit": "c0ffee" * 6, "dirty": True}},
    "python": "3.11.7",
    "platform": "Linux",
    "cpus": 2,
    "packages": {"torch": "2.13.0"},
    "starts": [
        {
            "time": "2026-01-02T03:04:05+00:00",
            "command_line": ["/usr/bin/python3", "-m", "app.train", "optimizer.lr=1e-3", "dataset.path=a b.jsonl"],
            "folder": "/home/me",
            "host": "box",
        }
    ],
    "seed": 0,
    "choices": {"precision": "fp32", "attention": "sdpa", "device": "cpu", "threads": 2, "processes": 1},
    "counts": {
        "steps": 100,
        "weights": 2_827_968,
        "trained_weights": 466_944,
        "units": 156,
        "units_per_step": 1,
        "unit_name": "bins",
        "fill": 0.991,
        "least_units": 154,
        "data": {
            "train": {"source": "train.jsonl", "rows_read": 90, "samples": 88, "tokens": 1000, "trained_tokens": 210},
            "eval": {"source": "eval.jsonl", "rows_read": 9, "samples": 9, "tokens": 100, "trained_tokens": 21},
            "notes": ["a note about the template"],
        },
    },
    "hardware": {"device": "cpu", "gpu": None, "cpu": "AVX2"},
    "hashes": {"train": "aa" * 32, "eval": "bb" * 32, "tokenizer": "cc" * 32, "base": None},
    "proofs": [{"what": "logits of packed documents", "difference": 1.5e-6, "allowed": 1e-5}],
    "memory": {
        "frozen_weights": 274_000_000,
        "quantization_constants": 0,
        "trained_weights": 2_000_000,
        "gradients": 2_000_000,
        "optimizer_states": 4_000_000,
    },
}
PREVIEW: dict[str, Any] = {
    "marked": "tokens in the loss",
    "rows": [
        {
            "place": "train.jsonl:1",
            "tokens": 9,
            "trained_tokens": 2,
            "pieces": [{"text": "<user>Say hi<end>", "trained": False}, {"text": "hi<end>", "trained": True}],
        }
    ],
    "lengths": {"edges": [1, 3, 5, 7], "samples": [4, 60, 24]},
}
LOG = "2026-01-02 03:04:05+00:00  model  asset:tiny\n2026-01-02 03:05:35+00:00  done\n"


def step(number: int, loss: float | None, **values: Any) -> dict[str, Any]:
    return {
        "step": number,
        "epoch": number / 100,
        "loss": loss,
        "lr": 1e-3,
        "grad_norm": 1.25,
        "tokens": number * 512,
        "trained_tokens": number * 100,
        "tokens_per_second": 5200.0,
        "samples_per_second": 31.05,
        "peak_memory_bytes": 548_000_000,
        **values,
    }


def lines_of(losses: Sequence[float | None]) -> list[dict[str, Any]]:
    return [step(number, loss) for number, loss in enumerate(losses, 1)]


def result_of(lines: Sequence[Mapping[str, Any]], status: str = "finished", **values: Any) -> dict[str, Any]:
    losses = [line["loss"] for line in lines if "loss" in line]
    evals = [line["eval_loss"] for line in lines if "eval_loss" in line]
    return {
        "status": status,
        "objective": min(evals, default=losses[-1] if losses else None),
        "steps": lines[-1]["step"] if lines else None,
        "train_loss_last": losses[-1] if losses else None,
        "eval_loss": evals[-1] if evals else None,
        "tokens_per_second": 5200.0,
        "samples_per_second": 31.05,
        "peak_memory_bytes": 548_000_000,
        **values,
    }


def jsonl(rows: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def sample(at: int, prompt: str, expected: str, answer: str) -> dict[str, Any]:
    return {"step": at, "prompt": prompt, "expected": expected, "answer": answer}


def made_run(
    folder: Path,
    lines: Sequence[Mapping[str, Any]] = (),
    *,
    result: Mapping[str, Any] | None = None,
    samples: Sequence[Mapping[str, Any]] = (),
    settings: Mapping[str, Any] = SETTINGS,
    manifest: Mapping[str, Any] = MANIFEST,
    preview: Mapping[str, Any] = PREVIEW,
) -> Path:
    """`result` is made of the lines unless given; an empty one is left out, as while a run is at work."""
    folder.mkdir(parents=True)
    (folder / "run.yaml").write_text(yaml.safe_dump(dict(settings)))
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "preview.json").write_text(json.dumps(preview))
    (folder / "metrics.jsonl").write_text(jsonl(lines))
    (folder / "log.txt").write_text(LOG)
    if samples:
        (folder / "samples.jsonl").write_text(jsonl(samples))
    outcome = result_of(lines) if result is None else result
    if outcome:
        (folder / "result.json").write_text(json.dumps(outcome))
    return folder


def trial(number: int, swept: Sequence[str], objective: float | None, **values: Any) -> dict[str, Any]:
    status = "failed" if objective is None else "finished"
    return {
        "number": number,
        "overrides": ["training.max_steps=9", *swept],
        "swept": list(swept),
        "values": values_of(swept),
        "folder": f"runs/sweep/{number}-trial",
        "status": status,
        "objective": objective,
        "steps": 9,
        "tokens_per_second": 5000.0,
        "samples_per_second": 299.4,
        "seconds": 61.0,
        "exit_code": 0 if objective is not None else 2,
        "error": None,
        **values,
    }


def made_sweep(folder: Path, trials: Sequence[Mapping[str, Any]]) -> Path:
    folder.mkdir(parents=True)
    command = ["finetune", "train", "-m", "optimizer.lr=1e-3,1e-4"]
    winner = best([Outcome(**each) for each in trials])
    content = {"identity": "x", "command": command, "best": winner, "trials": list(trials)}
    (folder / "sweep.json").write_text(json.dumps(content))
    return folder
