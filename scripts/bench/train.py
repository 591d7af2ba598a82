"""Compare the training speed of frameworks: same weights, documents and steps, one process per measurement.

python scripts/bench/train.py --frameworks ours,trl --device cpu --out FILE.jsonl

Writes a JSON line per measurement; contenders take turns. Exit code 1 if the losses of the first ten steps differ, 3 if
a contender did not start or finish (its line has `error`).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # as a script, or as a module

from scripts.bench.contest import METHODS, ROOT, SHAPES, Contest, environment
from scripts.bench.frameworks import FRAMEWORKS, is_framework, split_settings
from scripts.bench.table import allowed_at, furthest
from scripts.bench.workload import MIXES

DIFFER, INCOMPLETE = 1, 3
Line = dict[str, Any]


def main() -> None:
    """Measure, write and compare."""
    options = _options(sys.argv[1:])
    contest = _contest(options)
    ends = time.monotonic() + options.deadline
    options.out.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    with options.out.open("a", encoding="utf-8") as file:
        for turn in in_turn(contest, options.frameworks, options.rounds):
            line = measured(turn, min(options.limit, ends - time.monotonic()))
            file.write(json.dumps(line) + "\n")
            file.flush()
            lines.append(line)
            print(_words(line), flush=True)
    sys.exit(verdict(lines, contest.precision))


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--frameworks",
        type=_frameworks,
        default=["ours", "trl"],
        help=f"any of {', '.join(FRAMEWORKS)}, ours:KEY=VALUE",
    )
    add("--model", choices=SHAPES, default="tiny")
    add("--method", choices=METHODS, default="lora")
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--precision", choices=["fp32", "bf16"], help="fp32 on a CPU, bf16 on a GPU")
    add("--mix", choices=MIXES, default="chat", help="document lengths")
    add("--length", type=int, default=512, help="maximum document length")
    add("--tokens-per-step", type=int, default=2048)
    add("--accumulation", type=int, default=1, help="micro-batches per step")
    add("--steps", type=int, default=8, help="measured steps")
    add("--warm-up", type=int, default=2, help="steps before the measured ones")
    add("--rounds", type=int, default=2, help="number of rounds, as A B C, A B C")
    add("--seed", type=int, default=0)
    add("--threads", type=int, default=len(os.sched_getaffinity(0)))
    add("--rank", type=int, default=16, help="LoRA rank; alpha is twice the rank")
    add("--recompute", action="store_true", help="gradient checkpointing in all layers, for all contenders")
    add("--profile", action="store_true", help="profile one more step, and write its slowest kernels")
    add("--peak-tflops", type=float, help="peak rate of the device, for the MFU, if it is unknown")
    add(
        "--set",
        dest="settings",
        nargs="*",
        default=[],
        metavar="KEY=VALUE",
        help="settings of finetune train for all contenders",
    )
    add("--limit", type=float, default=3600, help="time limit of one measurement in seconds")
    add("--deadline", type=float, default=1e9, help="time limit of all measurements in seconds")
    add("--out", type=Path, required=True, help="file to append the lines to")
    options = parser.parse_args(arguments)
    if options.tokens_per_step % options.accumulation:
        parser.error("--tokens-per-step must be a multiple of --accumulation")
    if options.length > options.tokens_per_step // options.accumulation:
        parser.error("--length must be at most the micro-batch: --tokens-per-step / --accumulation")
    return options


def _frameworks(text: str) -> list[str]:
    names = split_names(text)
    wrong = [name for name in names if not is_framework(name)]
    if wrong:
        raise argparse.ArgumentTypeError(f"{', '.join(wrong)}: choose from {', '.join(FRAMEWORKS)}, ours:KEY=VALUE")
    return names


def split_names(text: str) -> list[str]:
    """Split at commas, except between the settings of `ours:key=value,key=value`."""
    names: list[str] = []
    for part in text.split(","):
        if names and "=" in part and ":" not in part and names[-1].startswith("ours:"):
            names[-1] += f",{part}"
        else:
            names.append(part)
    return names


def _contest(options: argparse.Namespace) -> Contest:
    names = {field.name for field in fields(Contest)}
    values = {name: value for name, value in vars(options).items() if name in names}
    precision = options.precision or ("fp32" if options.device == "cpu" else "bf16")
    return Contest(**values | {"framework": "", "precision": precision, "settings": tuple(options.settings)})


def in_turn(contest: Contest, frameworks: list[str], rounds: int) -> Iterator[Contest]:
    """Yield the contests in turns (A B C, A B C), so that other load affects all contenders."""
    for turn in range(rounds):
        for framework in frameworks:
            yield contest.of(framework, turn)


def measured(contest: Contest, seconds: float) -> Line:
    """Return the line of one measurement in a fresh process."""
    missing = FRAMEWORKS[split_settings(contest.framework)[0]].requires(contest)
    if missing:
        return {**asdict(contest), "error": f"needs {' and '.join(missing)}", "missing": True}
    if seconds <= 0:
        return {**asdict(contest), "error": "no time left"}
    with tempfile.TemporaryDirectory() as folder:
        settings, result = Path(folder) / "contest.json", Path(folder) / "result.json"
        settings.write_text(contest.as_json())
        problem = _run(contest, [str(settings), str(result)], seconds)
        if result.exists():
            line: Line = json.loads(result.read_text())
            return line
    return {**asdict(contest), "error": problem}


def _run(contest: Contest, arguments: list[str], seconds: float) -> str:
    """Run a measurement, and return its problem in one line."""
    python = os.environ.get("APP_PYTHON", sys.executable)
    try:
        done = subprocess.run(
            [python, "-m", "scripts.bench.measure", *arguments],
            cwd=ROOT,
            env=os.environ | environment(contest.device, contest.threads),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"stopped after {seconds:.0f} s"
    output = [line for line in done.stdout.splitlines() if line.strip()]
    print("\n".join(output[-12:]) if done.returncode else "", file=sys.stderr, end="\n" if done.returncode else "")
    return f"exit code {done.returncode}: {output[-1].strip() if output else 'no output'}"


def _words(line: Line) -> str:
    name = f"{line['framework']:14} {line['model']} {line['method']}"
    if "error" in line:
        return f"{name}  {line['error']}"
    share = "" if line["mfu"] is None else f"  MFU {line['mfu']:.1%}"
    memory = line["peak_memory_bytes"] / 2**30
    return f"{name}  {line['tokens_per_second']:10,.0f} tokens/s{share}  {memory:.2f} GiB  loss {line['losses'][-1]}"


def verdict(lines: list[Line], precision: str) -> int:
    """Return the exit code, and print the reasons on standard error."""
    whole: dict[str, list[Line]] = {}
    for line in lines:
        if "error" not in line:
            whole.setdefault(line["framework"], []).append(line)
    for name, theirs in list(whole.items())[1:]:
        first = next(iter(whole.values()))
        ratio = _rate(first) / _rate(theirs)
        print(f"{first[0]['framework']} is {ratio:.2f} times as fast as {name}")
    errors = {line["framework"]: line["error"] for line in lines if "error" in line}
    for name, error in errors.items():
        print(f"not measured: {name}: {error}", file=sys.stderr)
    differences = furthest({name: theirs[0]["losses"] for name, theirs in whole.items()}) if whole else {}
    allowed = allowed_at(precision)
    for name, difference in differences.items():
        if difference > allowed:
            print(f"losses differ: {name} by {difference:.1e} (at most {allowed:.0e})", file=sys.stderr)
    if any(difference > allowed for difference in differences.values()):
        return DIFFER
    return INCOMPLETE if errors else 0


def _rate(lines: list[Line]) -> float:
    return median(float(line["tokens_per_second"]) for line in lines)


if __name__ == "__main__":
    main()
