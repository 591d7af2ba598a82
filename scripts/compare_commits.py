"""Compare twelve short runs and three checks of two checkouts, file by file; a refactoring must not change them.

python scripts/compare_commits.py BEFORE AFTER FOLDER

BEFORE and AFTER are folders with checkouts of this program. Exit code 1 if files or keys differ, which are printed.
"""

import difflib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TINY = (
    "dataset.max_rows=60 dataset.eval_max_rows=12 training.max_steps=4 eval.every=2 eval.samples=1 "
    "eval.sample_tokens=4 checkpoint.every=2 launch.threads=1 precision=fp32"
)
RUNS = {
    "full": "recipe=full",
    "lora": "recipe=lora",
    "qlora": "recipe=qlora training.recompute=true",
    "int8": "recipe=lora quantization=int8 adapter.rslora=true",
    "fp8": "recipe=lora quantization=fp8",
    "dora": "recipe=lora adapter.dora=true optimizer=adamw_8bit",
    "oft": "recipe=lora adapter=peft adapter.method=OFT 'adapter.fields={oft_block_size: 16}'",
    "bf16": "recipe=full precision=bf16 precision.trained=bf16 optimizer=muon schedule=wsd",
    "compiled": "recipe=lora compile=blocks compile.backend=aot_eager",
    "padded": "recipe=lora batching.packing=false batching.accumulation=2",
    "preference": "recipe=dpo",
    "sharded": "recipe=lora parallel=fsdp launch.num_processes=2",
}
PLANS = {
    "8B QLoRA": "memory recipe=qlora model=llama hardware=rtx4090",
    "70B LoRA, sharded": "memory recipe=lora model=llama_70b hardware=h100 parallel=fsdp launch.num_processes=8",
    "rows": "data",
}
COMPARED = ("run.yaml", "manifest.json", "result.json", "metrics.jsonl", "log.txt", "check.json")

# keys that depend on the clock, the machine or the checkout
LEFT_OUT = re.compile(
    r"time|date|second|git|commit|dirty|host|clock|memory_taken|memory_measured|_per_second|peak_memory|process|took|path"
    r"|README|adapter_config"  # hashes of files with a path in them
)
# the same in text lines
NUMBERS_OF_CLOCKS = re.compile(r"\d[\d.,]* ?(s|min|h|ms|GB|MB|tokens/s|samples/s|k tokens/s)\b|\d\d:\d\d(:\d\d)?")


def main() -> None:
    """Run both checkouts, and compare the results."""
    before, after, folder = (Path(word).resolve() for word in sys.argv[1:4])
    problems = []
    for name, words in {**RUNS, **PLANS}.items():
        outputs = [_output(checkout, folder / side, name, words) for checkout, side in ((before, "a"), (after, "b"))]
        differences = list(_differences(*outputs))
        problems += [f"{name}: {text}" for text in differences]
        print(f"{name:20} {len(differences)} differences", flush=True)
    print("\n".join(problems))
    sys.exit(bool(problems))


def _output(checkout: Path, folder: Path, name: str, words: str) -> Path:
    """Run a command, and return its folder, with its output in `printed.txt`."""
    place = folder / name.replace(" ", "_")
    place.mkdir(parents=True)
    command, settings = ("check", "") if name in PLANS else ("train", TINY)
    if "precision=" in words:
        settings = settings.replace("precision=fp32", "")
    line = f"{sys.executable} -m app.{command} {words} {settings} output_dir=out"
    environment = os.environ | {"PYTHONPATH": str(checkout), "XDG_CACHE_HOME": str(folder / "cache")}
    ended = subprocess.run(
        ["bash", "-c", line], check=False, cwd=place, env=environment, capture_output=True, text=True
    )
    (place / "printed.txt").write_text(f"{ended.returncode}\n{ended.stdout}{ended.stderr}")
    return place


def _differences(before: Path, after: Path) -> Iterator[str]:
    files = [
        sorted(str(file.relative_to(place)) for file in place.rglob("*") if file.is_file()) for place in (before, after)
    ]
    if files[0] != files[1]:
        yield f"files {set(files[0]) ^ set(files[1])}"
    for name in files[0]:
        pair = before / name, after / name
        if not pair[1].is_file():
            continue
        if Path(name).suffix in (".safetensors", ".bin"):
            if pair[0].read_bytes() != pair[1].read_bytes():
                yield f"{name}: other bytes"
        elif Path(name).name in (*COMPARED, "printed.txt"):
            old, new = _comparable(pair[0], before).splitlines(), _comparable(pair[1], after).splitlines()
            lines = difflib.unified_diff(old, new, lineterm="", n=0)
            yield from (f"{name}: {line}" for line in lines if not line.startswith(("---", "+++", "@@")))


def _comparable(file: Path, place: Path) -> str:
    text = file.read_text().replace(str(place), "PLACE").replace(str(place.parent), "FOLDER")
    if file.suffix == ".json":
        return json.dumps(_compared(json.loads(text)), indent=1, sort_keys=True)
    if file.suffix == ".jsonl":
        return "\n".join(json.dumps(_compared(json.loads(line)), sort_keys=True) for line in text.splitlines())
    return _words(text)


def _compared(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _compared(inner) for key, inner in value.items() if not LEFT_OUT.search(str(key))}
    if isinstance(value, list):
        return [_compared(item) for item in value]
    return _words(value) if isinstance(value, str) else value


def _words(text: str) -> str:
    """Return the text without numbers that differ between runs: times and measured memory."""
    return NUMBERS_OF_CLOCKS.sub("N", re.sub(r" \([+-][\d.]+%\)", "", text))


if __name__ == "__main__":
    main()
