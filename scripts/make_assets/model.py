"""python -m scripts.make_assets.model [--seed N] [--to FOLDER]: pretrain the tiny model with finetune train.

Takes about six minutes on one core. The result depends on the seed and the CPU type, which rounds differently;
scripts/make_assets/gate.py checks its scores.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from scripts.make_assets.__main__ import ASSETS, SEED, documents

DOCUMENTS = 72_000  # slightly more than the steps below read
STEPS = 1_760
SETTINGS = (
    *("recipe=full", "model=tiny", "model.weights=random", "precision=fp32", "attention=sdpa"),
    *("dataset=text", "dataset.eval_fraction=0.005", "batching.tokens=1024", f"training.max_steps={STEPS}"),
    *("optimizer=muon", "optimizer.lr=5e-3", "optimizer.beta2=0.98"),
    *("schedule=wsd", "schedule.decay_fraction=0.7", "eval.every=400", "eval.samples=0"),
)
CONFIG_FILES = ("config.json", "generation_config.json")


def pretrain(seed: int, folder: Path, work: Path, more: Sequence[str] = ()) -> None:
    """Pretrain on running text of a seed, and write the weights in bf16 with the tokenizer to `folder`."""
    text = work / "documents.jsonl"
    written = islice(documents(f"{SEED} {seed}"), DOCUMENTS)
    text.write_text("".join(_lines(written)), encoding="utf-8")
    run = work / "run"
    places = (f"dataset.path={text}", f"output_dir={run}", f"cache_dir={work / 'cache'}", f"seed={seed}")
    subprocess.run([sys.executable, "-m", "app.train", *SETTINGS, *places, *more], check=True)
    _install(run / "final", folder)


def _lines(texts: Iterator[str]) -> Iterator[str]:
    return (json.dumps({"text": text}) + "\n" for text in texts)


def _install(final: Path, folder: Path) -> None:
    """Write the model in bf16, half the size; fine-tuning loads a frozen base in 16 bits anyway."""
    import torch
    from safetensors.torch import load_file, save_file

    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.to(torch.bfloat16) for name, weight in load_file(final / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for name in CONFIG_FILES:
        content = json.loads((final / name).read_text(encoding="utf-8"))
        content = {key: value for key, value in content.items() if key != "transformers_version"}
        if "dtype" in content:
            content["dtype"] = "bfloat16"
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        source = ASSETS / "tiny" / name
        if source.parent.resolve() != folder.resolve():
            shutil.copyfile(source, folder / name)


def main() -> None:
    """Write the model next to its tokenizer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--to", type=Path, default=ASSETS / "tiny")
    arguments, more = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as work:
        pretrain(arguments.seed, arguments.to, Path(work), more)


if __name__ == "__main__":
    main()
