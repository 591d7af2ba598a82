"""The stages of gpu_host.sh: what to measure on a GPU host, most valuable first, each stage within minutes.

python -m scripts.bench.stages STAGE --out DIR

DIR/STAGE.jsonl has the lines, each written as it is found; DIR/STAGE.log what the programs said. An item that
crashes or takes too long is a line with `error`, and the next one follows.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("APP_PYTHON", sys.executable)
_LEAST = 10.0  # seconds that an item must have left to be begun
_SPARE = 5.0  # that train.py gets to write its last line


@dataclass(frozen=True, slots=True)
class Setting:
    """Where, and whether only to see that everything runs."""

    device: str
    tiny: bool
    out: Path  # of this stage's lines


@dataclass(frozen=True, slots=True)
class Item:
    """`command` gets `--deadline` if it can keep one itself. Other codes than `known` are crashes."""

    name: str
    command: list[str]
    keeps_deadline: bool = False
    known: tuple[int, ...] = (0,)


def preflight(setting: Setting) -> list[Item]:
    """Whether the host has what the other stages import, and two tiny steps of each kind that they measure."""
    check = [PYTHON, "-m", "scripts.bench.preflight", "--device", setting.device]
    tiny = replace(setting, tiny=True)
    contenders = "ours,ours:compile=blocks" if setting.device == "cuda" else "ours"
    items = [Item("packages", check)]
    for method, *settings in (("lora",), ("qlora",), ("full",), ("lora", "--set", "quantization=fp8")):
        item = _train(tiny, " ".join((method, *settings[1:])), "tiny", method, contenders, *settings)
        items.append(replace(item, known=(0,)))
    return items


def headline(setting: Setting) -> list[Item]:
    """The figures that docs quote, each with a profiled step; first of all those that decide what is compiled."""
    three, settings = "ours,ours:compile=blocks,ours:compile=blocks,compile.fused=true", ("--profile",)
    again = three if setting.device == "cuda" else "ours"  # on a CPU one item shows that all three run
    paged = "ours:optimizer=paged_adamw_8bit"
    recompute = ("ours:training.recompute=true", "ours:training.recompute=auto")
    return [
        _train(setting, "8b lora", "llama_8b", "lora", three, *settings),
        _train(setting, "8b qlora", "llama_8b", "qlora", f"{again},{paged}", *settings),
        _train(setting, "1b lora", "llama_1b", "lora", again, *settings),
        _train(setting, "8b lora, fp8", "llama_8b", "lora", "ours", *settings, "--set", "quantization=fp8"),
        _train(setting, "8b full", "llama_8b", "full", f"{recompute[1]},optimizer=adamw_8bit", *settings),
        _train(setting, "8b lora, recomputed", "llama_8b", "lora", recompute[0], *settings),
        _train(setting, "8b lora, whole", "llama_8b", "lora", "ours", "--mix", "whole"),
        _train(setting, "70b, small", "llama_70b", "qlora", recompute[0], *_as_preset("llama_70b_small")),
    ]


def micro(setting: Setting) -> list[Item]:
    """Single operations. What decides most comes first."""
    items = []
    for name in ("attention", "gemm", "nf4", "head", "rounding"):
        command = [PYTHON, "-m", "scripts.bench.micro", name, "--device", setting.device, "--out", str(setting.out)]
        items.append(Item(name, [*command, *(["--tiny"] if setting.tiny else [])]))
    return items


def ours(setting: Setting) -> list[Item]:
    """This program alone: its figures, then its switches one by one."""
    recompute = "ours:training.recompute=true"
    kernels = "ours:attention=varlen,ours:attention=flash,ours:attention=sdpa"
    switches = "ours:adapter.fused=false,ours:compile=blocks,ours:optimizer=adamw_8bit,ours:batching.packing=false"
    return [
        _train(setting, "8b lora", "llama_8b", "lora", f"{recompute},ours"),
        _train(setting, "8b qlora", "llama_8b", "qlora", f"{recompute},ours"),
        _train(setting, "8b lora, fp8", "llama_8b", "lora", f"{recompute},ours", "--set", "quantization=fp8"),
        _train(setting, "1b lora", "llama_1b", "lora", "ours,bare"),
        _train(setting, "8b full", "llama_8b", "full", "ours:training.recompute=true,optimizer=adamw_8bit"),
        _train(setting, "1b lora, switches", "llama_1b", "lora", f"ours,bare,{kernels},{recompute},{switches}"),
        _train(setting, "1b full", "llama_1b", "full", "ours"),
        _train(setting, "8b lora, 8192", "llama_8b", "lora", recompute, "--length", "8192"),
    ]


def peers(setting: Setting) -> list[Item]:
    """Other programs on the same work; all recompute all layers where the model is large."""
    return [
        _train(setting, "1b lora", "llama_1b", "lora", "ours,trl_fair,trl,trl_default"),
        _train(setting, "8b lora", "llama_8b", "lora", "ours,trl_fair,trl_fair_liger", "--recompute"),
        _train(setting, "1b lora, kernels", "llama_1b", "lora", "ours,trl_fair_liger,unsloth,plain"),
        _train(setting, "8b qlora", "llama_8b", "qlora", "ours,trl_fair,unsloth", "--recompute"),
        _train(setting, "8b lora, as it comes", "llama_8b", "lora", "ours,trl_default,unsloth", "--recompute"),
    ]


def large(setting: Setting) -> list[Item]:
    """70 billion weights on one card, as the presets have it: the smallest peak, then the speed."""
    small, fast = (_as_preset(f"llama_70b_{name}") for name in ("small", "16k"))
    contenders = "ours,ours:training.recompute=64"
    return [
        _train(setting, "70b, small", "llama_70b", "qlora", "ours", "--recompute", *small),
        _train(setting, "70b, fast", "llama_70b", "qlora", contenders, "--recompute", *fast),
    ]


def single_gpu(setting: Setting) -> list[Item]:
    """What fits and speeds up BERT-large, rung by rung."""
    return [_ladder(setting, "single_gpu")]


def bert(setting: Setting) -> list[Item]:
    """What speeds up BERT-base, rung by rung: 2,000 rows, one epoch."""
    return [_ladder(setting, "bert", "dataset.random.rows=2223", "training.epochs=1")]


def _ladder(setting: Setting, name: str, *settings: str) -> Item:
    command = [PYTHON, "-m", "scripts.bench.ladder", name, "--device", setting.device, "--out", str(setting.out)]
    own = ["--tiny"] if setting.tiny else settings
    return Item(name, [*command, *own], keeps_deadline=True, known=(0, _INCOMPLETE))


def _as_preset(name: str) -> list[str]:
    """Options for one micro-batch of an experiment of conf/, its offload too, without its recomputed layers."""
    from app.config.load import compose_run

    run = compose_run([f"experiment={name}", "dataset=messages", "dataset.path=none.jsonl"])
    settings = [f"optimizer={run.optimizer.kind}", f"training.offload={str(run.training.offload).lower()}"]
    return ["--tokens-per-step", str(run.batching.tokens), "--rank", str(run.adapter.r), "--set", *settings]


def tests(setting: Setting) -> list[Item]:
    """The gpu tier."""
    chosen = ["-k", "nf4_survives"] if setting.tiny else []
    hanging = ("-o", "faulthandler_timeout=120", "-o", "faulthandler_exit_on_timeout=true")
    words = ("gpu", "-v", "-W", "default", *hanging, *chosen)  # a host's own packages warn of other things
    return [Item("gpu tier", ["bash", str(ROOT / "scripts" / "test"), *words])]


STAGES: dict[str, Callable[[Setting], list[Item]]] = {
    "preflight": preflight,
    "headline": headline,
    "tests": tests,
    "micro": micro,
    "ours": ours,
    "peers": peers,
    "70b": large,
    "single_gpu": single_gpu,
    "bert": bert,
}
_ON_GPU = ("--mix", "long", "--length", "2048", "--tokens-per-step", "16384", "--steps", "6", "--warm-up", "4")
_TINY = (
    *("--mix", "short", "--length", "32", "--tokens-per-step", "64"),
    *("--steps", "1", "--warm-up", "1", "--threads", "1"),
)
_DIFFER, _INCOMPLETE = 1, 3  # of train.py, which has written why


def _train(setting: Setting, name: str, model: str, method: str, frameworks: str, *options: str) -> Item:
    """`options` come after the usual ones and before those that make everything small."""
    command = [PYTHON, "-m", "scripts.bench.train", "--device", setting.device, "--rounds", "1"]
    chosen = ["--model", "tiny" if setting.tiny else model, "--method", method, "--frameworks", frameworks]
    sizes = [*_ON_GPU, *options, *(_TINY if setting.tiny else ())]
    return Item(
        name,
        [*command, *chosen, *sizes, "--out", str(setting.out)],
        keeps_deadline=True,
        known=(0, _DIFFER, _INCOMPLETE),
    )


def main() -> None:
    """Run one stage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to see whether everything runs")
    parser.add_argument("--seconds", type=float, default=450, help="for the whole stage")
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    lines, log = options.out / f"{options.stage}.jsonl", options.out / f"{options.stage}.log"
    ends = time.monotonic() + options.seconds
    for item in STAGES[options.stage](Setting(options.device, options.tiny, lines)):
        begun = time.monotonic()
        left = ends - begun
        found = run(item, left, log) if left >= _LEAST else {"error": "no time was left for it"}
        took = round(time.monotonic() - begun, 1)
        _append(lines, {"stage": options.stage, "item": item.name, **found, "took_seconds": took, "end": True})
        print(f"{options.stage}: {item.name}: {found.get('error', 'done')}, {took} s", flush=True)
        if options.stage == "preflight" and "error" in found:
            sys.exit(1)


def run(item: Item, seconds: float, log: Path) -> dict[str, Any]:
    """The code it ended with and its last words; `error` where it did not end as it should."""
    command = list(item.command)
    if item.keeps_deadline:
        command += ["--deadline", f"{seconds - _SPARE:.0f}"]
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ {' '.join(command)}\n")
        file.flush()
        begun = file.tell()
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # what it started too: a GPU must be free for the next one
            process.wait()
            return {"error": f"stopped after {seconds:.0f} s", "said": _last_words(log, begun)}
    said = _last_words(log, begun)
    if code not in item.known:
        return {"returncode": code, "error": f"exit code {code}: {said}", "said": said}
    return {"returncode": code, "said": said}


def _last_words(log: Path, begun: int) -> str:
    """The last line that is not empty, without colours."""
    with log.open("rb") as file:
        file.seek(begun)
        text = file.read().decode(errors="replace")
    written = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines() if line.strip()]
    return written[-1][:300] if written else ""


def _append(file: Path, line: dict[str, Any]) -> None:
    with file.open("a", encoding="utf-8") as opened:
        opened.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
