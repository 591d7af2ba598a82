"""python -m scripts.make_assets.gate WORK [--pretraining 0 1 2] [--tuning 0 1 2]: is the small model what the docs say?

For each pretraining seed a base and for each tuning seed a default run on it, made anew unless WORK has them; on the
first base also QLoRA, a control whose answers are shuffled, and a run that one skill is left out of. Prints a table and
writes WORK/gate.json; ends with 3 if a bound is missed. With three seeds each about half an hour of two cores.
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
    """What was measured, and the bounds that it missed."""

    work: Path
    figures: dict[str, float] = field(default_factory=dict)
    missed: list[str] = field(default_factory=list)

    def note(self, name: str, value: float, *, at_least: float = 0.0, at_most: float = 1.0) -> None:
        """One figure, said at once and kept."""
        kept = at_least <= value <= at_most
        self.figures[name] = round(value, 4)
        if not kept:
            self.missed.append(name)
        print(f"{name:<44}{value:7.3f}{'' if kept else f'   not within {at_least} to {at_most}'}", flush=True)
        (self.work / "gate.json").write_text(json.dumps(self.figures, indent=2) + "\n", encoding="utf-8")


def chat_score(base: Path, adapter: Path | None = None) -> Shares:
    """Exact match on the held-out chat rows."""
    model, tokenizer = read_model(base, adapter)
    return answered(model, held_out_chat(tokenizer))


def own_score(base: Path, adapter: Path | None = None) -> Shares:
    """The share of sentences in running text that are ended right."""
    model, tokenizer = read_model(base, adapter)
    return answered(model, own_form(tokenizer))


def tune(base: Path, to: Path, *more: str) -> Path:
    """A default run on that base; its adapter's folder."""
    if not (to / "final").is_dir():
        arguments = (*TUNING, f"model.path={base}", "model=tiny", f"output_dir={to}", *more)
        subprocess.run([sys.executable, "-m", "app.train", *arguments], check=True, stdout=subprocess.DEVNULL)
    return to / "final"


def base_of(seed: int, work: Path) -> Path:
    """The base of that pretraining seed."""
    folder = work / f"base-{seed}"
    if not (folder / "model.safetensors").is_file():
        scratch = work / f"pretraining-{seed}"
        scratch.mkdir(parents=True, exist_ok=True)
        pretrain(seed, folder, scratch)
    return folder


def shuffled_answers(rows: list[Row]) -> list[list[dict[str, str]]]:
    """Every answer in the place of another one: the form of an answer can be learnt from it, and nothing else."""
    talks = [row.messages() for row in rows]
    answers = [message["content"] for talk in talks for message in talk if message["role"] == "assistant"]
    random.Random(f"{SEED} control").shuffle(answers)
    drawn = iter(answers)
    return [[m | {"content": next(drawn)} if m["role"] == "assistant" else m for m in talk] for talk in talks]


def without_one_skill(rows: list[Row]) -> list[list[dict[str, str]]]:
    """All rows but those of one skill."""
    return [row.messages() for row in rows if row.skill.name != LEFT_OUT]


def dataset(work: Path, name: str, change: Change) -> str:
    """The setting that trains on changed rows."""
    file = work / f"{name}.jsonl"
    talks = change(chat_rows(held_out=False))
    file.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks), encoding="utf-8")
    return f"dataset.path={file}"


def measure(gate: Gate, pretraining: Sequence[int], tuning: Sequence[int]) -> None:
    """Every figure of the table in docs/benchmarks/small-model.md."""
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
    """The comparisons that one base is enough for."""
    quantised = []
    for seed in tuning:
        adapter = tune(base, gate.work / f"qlora-{seed}", f"seed={seed}", "recipe=qlora")
        quantised.append(chat_score(base, adapter).mean)
        gate.note(f"QLoRA, tuning {seed}: chat after", quantised[-1], at_least=0.80)
    below = sum(lora) / len(lora) - sum(quantised) / len(quantised)
    gate.note("QLoRA below LoRA, mean", below, at_least=-1.0, at_most=0.03)
    control = tune(base, gate.work / "control", dataset(gate.work, "shuffled", shuffled_answers))
    gate.note("control, shuffled answers: chat after", chat_score(base, control).mean, at_most=0.15)
    partial = tune(base, gate.work / "left-out", dataset(gate.work, "partial", without_one_skill))
    before, after = (own_score(base, each).by_skill[LEFT_OUT] for each in (None, partial))
    gate.note(f"{LEFT_OUT} left out: own form lost", before - after, at_least=-1.0, at_most=0.03)


def main() -> int:
    """0 if every bound holds, else 3."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--pretraining", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tuning", type=int, nargs="+", default=[0, 1, 2])
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    gate = Gate(given.work.resolve())
    measure(gate, given.pretraining, given.tuning)
    print("every bound holds" if not gate.missed else f"missed: {', '.join(gate.missed)}")
    return 3 if gate.missed else 0


if __name__ == "__main__":
    sys.exit(main())
