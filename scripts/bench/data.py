"""Speed of chat data preparation compared with TRL: rows/s from a file to token IDs and loss mask.

python -m scripts.bench.data --rows 50000 --out FILE.jsonl     (needs the extra `bench`)

Both read the same file with the same tokenizer and template, and train on answers only; each measurement runs in its
own process, in turns, with empty caches. The time is from the file to rows ready for training, without packing; imports
and the tokenizer are loaded before. Exit code 1 if IDs or masks differ.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scripts.bench.machine import here

ROOT = Path(__file__).resolve().parents[2]
MAX_LENGTH = 4096  # longer than any row, so nothing is truncated
_IGNORED = -100  # ignored label in TRL
_OTHER_SIZE = 5  # factor by which the second, smaller dataset has fewer rows

Row = tuple[NDArray[np.int32], NDArray[np.bool_]]
Line = dict[str, Any]


def main() -> int:
    """Write a JSON line per measurement, and return the exit code."""
    options = _options()
    if options.measure:
        print(json.dumps(MEASURES[options.measure](options.chats, options.folder)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        chats = Path(folder) / "chats.jsonl"
        write_chats(chats, options.rows)
        small = Path(folder) / "fewer.jsonl"
        write_chats(small, options.rows // _OTHER_SIZE)
        lines = [
            {"rows": options.rows // _OTHER_SIZE, **_measured("ours", small)},
            *({"rows": options.rows, **_measured(name, chats)} for _ in range(options.rounds) for name in MEASURES),
        ]
    import torch

    for line in lines:
        line.update(here(torch.device("cpu")))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return verdict(lines)


def write_chats(path: Path, rows: int) -> None:
    """Write chats of one to three rounds with realistic lengths, from words of the sample data; deterministic."""
    sample = ROOT / "app" / "assets" / "sample" / "train.jsonl"
    turns = [turn["content"] for line in sample.read_text().splitlines() for turn in json.loads(line)["messages"]]
    words, random = " ".join(turns).split(), np.random.default_rng(0)
    with path.open("w") as file:
        for _ in range(rows):
            messages = []
            for _ in range(random.choice([1, 1, 1, 2, 3])):
                for role, median_words in (("user", 27), ("assistant", 55)):
                    count = int(np.clip(random.lognormal(np.log(median_words), 0.8), 1, 400))
                    at = int(random.integers(len(words) - count))
                    messages.append({"role": role, "content": " ".join(words[at : at + count])})
            file.write(json.dumps({"messages": messages}) + "\n")


def ours(chats: Path, folder: Path) -> Line:
    """Measure `dataset=messages` without cache, again from the cache, and then the bins of the loader."""
    from app.base.tokenizer import load_tokenizer
    from app.config.load import compose_run
    from app.data.collate import Packed
    from app.data.loader import Loader, StepSplit
    from app.data.prepare import prepare

    run = compose_run(
        [
            "dataset=messages",
            f"dataset.path={chats}",
            "dataset.eval_fraction=0",
            f"dataset.max_length={MAX_LENGTH}",
            f"batching.tokens={MAX_LENGTH}",
        ]
    )
    tokenizer = load_tokenizer(run.model, needs_template=True)
    cold = _Clock()
    rows = prepare(run.dataset, tokenizer, str(folder / "cache")).train
    first = cold.stop()
    warm = _Clock()
    prepare(run.dataset, tokenizer, str(folder / "cache"))
    cached = warm.stop()
    planned = _Clock()
    loader = Loader(rows, Packed(MAX_LENGTH, tokenizer.pad_token_id, MAX_LENGTH), StepSplit(1), seed=0)
    plan = planned.stop()
    read = _Clock()
    tokens = sum(batch.num_tokens for step in range(loader.steps_per_epoch) for batch in loader.batches(step))
    bins = read.stop()
    return {
        **first,
        "seconds_cached": cached["seconds"],
        "seconds_plan": plan["seconds"],
        "loader_tokens_per_second": tokens / bins["seconds"],
        "digest": digest((rows.ids(i), rows.loss_mask(i)) for i in range(len(rows))),
    }


def trl(chats: Path, folder: Path) -> Line:
    """Measure TRL with default settings: one process."""
    return _trl(chats, folder, None)


def trl_parallel(chats: Path, folder: Path) -> Line:
    """Measure TRL with one process per core (`dataset_num_proc`)."""
    return _trl(chats, folder, os.cpu_count())


MEASURES: dict[str, Callable[[Path, Path], Line]] = {"ours": ours, "trl": trl, "trl_parallel": trl_parallel}


def _trl(chats: Path, folder: Path, processes: int | None) -> Line:
    from datasets import load_dataset
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    class Timed(SFTTrainer):  # type: ignore[misc]  # the package has no types
        """TRL's trainer with a clock around the preparation."""

        timing: Line

        def _prepare_dataset(self, *args: Any, **options: Any) -> Any:
            clock = _Clock()
            prepared = super()._prepare_dataset(*args, **options)
            type(self).timing = clock.stop()
            return prepared

    base = str(ROOT / "app" / "assets" / "tiny")
    reading = _Clock()
    rows = load_dataset("json", data_files=str(chats), split="train", cache_dir=str(folder / "read"))
    read = reading.stop()
    trainer = Timed(
        model=AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base)),
        args=SFTConfig(
            output_dir=str(folder / "out"),
            assistant_only_loss=True,
            max_length=None,  # otherwise TRL passes over the rows twice more, without truncating any
            dataset_num_proc=processes,
            report_to="none",
            use_cpu=True,
        ),
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(base),
    )
    samples = trainer.train_dataset.with_format("numpy")
    ids, labels = samples["input_ids"], samples["labels"]
    return {
        **{key: Timed.timing[key] + read[key] for key in read},
        "digest": digest(
            (np.asarray(one, np.int32), np.asarray(label) != _IGNORED) for one, label in zip(ids, labels, strict=True)
        ),
    }


class _Clock:
    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), _cpu_seconds()

    def stop(self) -> dict[str, float]:
        return {"seconds": time.perf_counter() - self._wall, "cpu_seconds": _cpu_seconds() - self._cpu}


def _cpu_seconds() -> float:
    """Return the CPU time of this process and of finished child processes."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def digest(rows: Iterator[Row]) -> str:
    """Return a hash of all rows, independent of their order."""
    hashes = sorted(hashlib.sha256(ids.tobytes() + mask.tobytes()).digest() for ids, mask in rows)
    return hashlib.sha256(b"".join(hashes)).hexdigest()


def _measured(name: str, chats: Path) -> Line:
    with tempfile.TemporaryDirectory() as folder:
        options = ["--measure", name, "--chats", str(chats), "--folder", folder]
        done = subprocess.run(
            [sys.executable, "-m", "scripts.bench.data", *options],
            cwd=ROOT,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": folder},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    line: Line = {"framework": name, **json.loads(done.stdout.splitlines()[-1])}
    print(f"{name:13} {line['seconds']:6.1f} s, {line['cpu_seconds']:6.1f} s of CPU", flush=True)
    return line


def verdict(lines: list[Line]) -> int:
    """Print the rates; return 1 if IDs or masks differ."""
    whole = [line for line in lines if line["rows"] == max(line["rows"] for line in lines)]
    rates = {
        name: median(line["rows"] / line["seconds"] for line in whole if line["framework"] == name) for name in MEASURES
    }
    for name, rate in rates.items():
        print(f"{name:13} {rate:8,.0f} rows/s, ours {rates['ours'] / rate:.2f}x")
    few, many = lines[0], next(line for line in whole if line["framework"] == "ours")
    print(
        f"from the cache {few['seconds_cached']:.3f} s with {few['rows']:,} rows, {many['seconds_cached']:.3f} s with "
        f"{many['rows']:,}; loader {many['loader_tokens_per_second']:,.0f} tokens/s"
    )
    same = len({line["digest"] for line in whole}) == 1
    print("IDs and masks are equal" if same else "IDs or masks DIFFER")
    return 0 if same else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("bench-data.jsonl"))
    for name in ("--chats", "--folder"):
        parser.add_argument(name, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--measure", choices=MEASURES, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
