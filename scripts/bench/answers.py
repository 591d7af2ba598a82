"""Preference recipes trained with several seeds, and the answers of the resulting models.

    python -m scripts.bench.answers runs/answers [SEED...]      print the table of docs/preferences.md

Existing runs are reused.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean

from app.assets import ROOT

SEEDS = (0, 1, 2)
FIRST = "recipe=lora dataset=styles"  # seven in ten answers are a word, the others a sentence
COMMANDS = (
    FIRST,
    "recipe=dpo adapter.start=FIRST",
    "recipe=kto adapter.start=FIRST",
    "recipe=simpo adapter.start=FIRST",
    "recipe=orpo",
)
SHARES = ("right word", "one word", "pair_accuracy")
NUMBERS = ("chosen_log_probability", "rejected_log_probability")
Numbers = dict[str, float]


def main() -> None:
    """Train, generate answers, and print the table."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    seeds = [int(word) for word in sys.argv[2:]] or SEEDS
    for seed in seeds:
        for number in range(len(COMMANDS)):
            measured(trained(folder, number, seed))
    print("\n".join(table(folder, seeds)))


def table(folder: Path, seeds: Sequence[int]) -> Iterator[str]:
    """Yield table rows: means over the seeds, and correct words also by seed."""
    yield f"| command | {' | '.join(name.replace('_', ' ') for name in (*SHARES, *NUMBERS))} |"
    yield "|---" * (1 + len(SHARES) + len(NUMBERS)) + "|"
    for number, command in enumerate(COMMANDS):
        results = [measured(trained(folder, number, seed)) for seed in seeds]
        cells = [f"`{command.replace('FIRST', 'runs/styles')}`"]
        for name in (*SHARES, *NUMBERS):
            values = [numbers[name] for numbers in results if name in numbers]
            middle = mean(values) if values else 0.0
            cells.append("" if not values else f"{middle:.0%}" if name in SHARES else f"{middle:.2f}")
        by_seed = ", ".join(f"{100 * numbers['right word']:.0f}" for numbers in results)
        yield f"| {' | '.join([cells[0], f'{cells[1]} ({by_seed})', *cells[2:]])} |"


def trained(folder: Path, number: int, seed: int) -> Path:
    """Return the run of a command, trained if missing."""
    run, first = (folder / f"{index}-{seed}" for index in (number, 0))
    if not (run / "final").is_dir():
        words = COMMANDS[number].replace("FIRST", str(first)).split()
        _call("app.train", *words, f"seed={seed}", f"output_dir={run}", "eval.samples=0")
    return run


def measured(run: Path) -> Numbers:
    """Return the last metrics of a run, and shares of its greedy answers to held-out questions."""
    pairs = [json.loads(line) for line in (ROOT / "sample" / "pairs_eval.jsonl").open(encoding="utf-8")]
    questions, file = run.parent / "questions.jsonl", run / "answers.jsonl"
    questions.write_text("".join(json.dumps({"messages": pair["prompt"]}) + "\n" for pair in pairs), encoding="utf-8")
    if not file.exists():
        _call("app.generate", f"run={run}", f"prompts={questions}", f"output={file}", "max_new_tokens=24", "batch=64")
    answers = [json.loads(line)["answer"].strip() for line in file.open(encoding="utf-8")]
    right = mean(answer == pair["chosen"] for answer, pair in zip(answers, pairs, strict=True))
    metrics: Numbers = json.loads((run / "result.json").read_text(encoding="utf-8"))["final_metrics"]
    return {**metrics, "right word": right, "one word": mean(len(answer.split()) == 1 for answer in answers)}


def _call(module: str, *words: str) -> None:
    subprocess.run([sys.executable, "-m", module, *words, "launch.threads=1"], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
