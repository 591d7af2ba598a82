"""Check that the tiny model has the documented scores.

python -m scripts.make_assets.gate WORK [--pretraining 0 1 2] [--tuning 0 1 2]

Trains a base per pretraining seed and a default run on it per tuning seed, unless WORK has them; on the first base also
QLoRA, a control with shuffled answers, and a run without one skill. Prints a table and writes WORK/gate.json; exit code
3 if a bound is missed. With three seeds each, about half an hour on two cores.
"""

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scripts.make_assets.__main__ import SEED, chat_rows
from scripts.make_assets.chat import Row
from scripts.make_assets.model import pretrain
from scripts.make_assets.scores import Shares, answered, held_out_chat, own_form, read_model

LEFT_OUT = "capital"
TUNING = ("precision=fp32", "dataset.eval_path=null", "eval.every=0", "eval.samples=0", "checkpoint.every=0")
Change = Callable[[list[Row]], list[list[dict[str, str]]]]


@dataclass(slots=True)
class Gate:
    """Measured figures, and missed bounds."""

    work: Path
    figures: dict[str, float] = field(default_factory=dict)
    missed: list[str] = field(default_factory=list)

    def note(self, name: str, value: float, *, at_least: float = 0.0, at_most: float = 1.0) -> None:
        """Print and record a figure."""
        is_within = at_least <= value <= at_most
        self.figures[name] = round(value, 4)
        if not is_within:
            self.missed.append(name)
        print(f"{name:<44}{value:7.3f}{'' if is_within else f'   not within {at_least} to {at_most}'}", flush=True)
        (self.work / "gate.json").write_text(json.dumps(self.figures, indent=2) + "\n", encoding="utf-8")


def chat_score(base: Path, adapter: Path | None = None) -> Shares:
    """Return the exact match on the held-out chat rows."""
    model, tokenizer = read_model(base, adapter)
    return answered(model, held_out_chat(tokenizer))


def own_score(base: Path, adapter: Path | None = None) -> Shares:
    """Return the share of correctly completed sentences in running text."""
    model, tokenizer = read_model(base, adapter)
    return answered(model, own_form(tokenizer))


def tune(base: Path, to: Path, *more: str) -> Path:
    """Train a default run on a base, and return the adapter folder."""
    if not (to / "final").is_dir():
        arguments = (*TUNING, f"model.path={base}", "model=tiny", f"output_dir={to}", *more)
        subprocess.run([sys.executable, "-m", "app.train", *arguments], check=True, stdout=subprocess.DEVNULL)
    return to / "final"


def base_of(seed: int, work: Path) -> Path:
    """Return the base of a pretraining seed, trained if missing."""
    folder = work / f"base-{seed}"
    if not (folder / "model.safetensors").is_file():
        scratch = work / f"pretraining-{seed}"
        scratch.mkdir(parents=True, exist_ok=True)
        pretrain(seed, folder, scratch)
    return folder


def shuffled_answers(rows: list[Row]) -> list[list[dict[str, str]]]:
    """Return conversations with shuffled answers, from which only the form of answers can be learned."""
    talks = [row.messages() for row in rows]
    answers = [message["content"] for talk in talks for message in talk if message["role"] == "assistant"]
    random.Random(f"{SEED} control").shuffle(answers)
    drawn = iter(answers)
    return [[m | {"content": next(drawn)} if m["role"] == "assistant" else m for m in talk] for talk in talks]


def without_one_skill(rows: list[Row]) -> list[list[dict[str, str]]]:
    """Return all rows except those of one skill."""
    return [row.messages() for row in rows if row.skill.name != LEFT_OUT]


def dataset(work: Path, name: str, change: Change) -> str:
    """Write changed rows, and return the setting that trains on them."""
    file = work / f"{name}.jsonl"
    talks = change(chat_rows(held_out=False))
    file.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks), encoding="utf-8")
    return f"dataset.path={file}"


def measure(gate: Gate, pretraining: Sequence[int], tuning: Sequence[int]) -> None:
    """Measure all figures of the table in docs/benchmarks/small-model.md."""
    scores = []
    for seed in pretraining:
        base = base_of(seed, gate.work)
        gate.note(f"base {seed}: own form", own_score(base).mean, at_least=0.80)
        gate.note(f"base {seed}: chat before", chat_score(base).mean, at_most=0.15)
        for again in tuning:
            adapter = tune(base, gate.work / f"lora-{seed}-{again}", f"seed={again}")
            scores.append(chat_score(base, adapter).mean)
            gate.note(f"base {seed}, tuning {again}: chat after", scores[-1], at_least=0.80)
    gate.note("mean of chat after", sum(scores) / len(scores), at_least=0.90)
    on_first_base(gate, base_of(pretraining[0], gate.work), tuning, scores[: len(tuning)])


def on_first_base(gate: Gate, base: Path, tuning: Sequence[int], lora: Sequence[float]) -> None:
    """Measure the comparisons on the first base."""
    quantized = []
    for seed in tuning:
        adapter = tune(base, gate.work / f"qlora-{seed}", f"seed={seed}", "recipe=qlora")
        quantized.append(chat_score(base, adapter).mean)
        gate.note(f"QLoRA, tuning {seed}: chat after", quantized[-1], at_least=0.80)
    below = sum(lora) / len(lora) - sum(quantized) / len(quantized)
    gate.note("QLoRA below LoRA, mean", below, at_least=-1.0, at_most=0.03)
    control = tune(base, gate.work / "control", dataset(gate.work, "shuffled", shuffled_answers))
    gate.note("control, shuffled answers: chat after", chat_score(base, control).mean, at_most=0.15)
    partial = tune(base, gate.work / "left-out", dataset(gate.work, "partial", without_one_skill))
    before, after = (own_score(base, adapter).by_skill[LEFT_OUT] for adapter in (None, partial))
    gate.note(f"{LEFT_OUT} left out: own form lost", before - after, at_least=-1.0, at_most=0.03)


def main() -> int:
    """Return 0 if all bounds hold, else 3."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--pretraining", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tuning", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    gate = Gate(options.work.resolve())
    measure(gate, options.pretraining, options.tuning)
    print("all bounds hold" if not gate.missed else f"missed: {', '.join(gate.missed)}")
    return 3 if gate.missed else 0


if __name__ == "__main__":
    sys.exit(main())
