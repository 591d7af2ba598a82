"""Run as a process of its own: prepares a small file, then a large one, and tells its memory and that of its workers.

`prepare_and_tell.py SMALL LARGE FORMAT CACHE`: four numbers in MB, the most that this process and that one of its
workers had after each of the two.
"""

import json
import sys
import threading
from pathlib import Path
from typing import Any

import pyarrow.parquet  # noqa: F401  what is loaded when it is needed would be taken for growth
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from app.data.prepare import prepare
from tests.data.small import CHATML, config


def words() -> Any:
    """A tokenizer that is done at once, because what is measured is what is held."""
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "<pad>": 2}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", eos_token="</s>", pad_token="<pad>"
    )
    made.chat_template = CHATML
    return made


def peak(pid: int | str) -> int:
    """MB that a process had at most. What `getrusage` tells has the parent's in it, of the moment of the fork."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:  # it has ended
        return 0
    return next((int(line.split()[1]) >> 10 for line in lines if line.startswith("VmHWM")), 0)


class Workers(threading.Thread):
    """Looks at the processes that this one has started, until it is told to end."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most = 0
        self._ends = threading.Event()

    def run(self) -> None:
        while not self._ends.wait(0.01):
            mine = [
                child
                for task in Path("/proc/self/task").iterdir()
                for child in (task / "children").read_text().split()
                if b"crew" in command(child)  # between fork and exec it is this program still
            ]
            self.most = max([self.most, *map(peak, mine)])

    def end(self) -> int:
        self._ends.set()
        self.join()
        return self.most


def command(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def main() -> None:
    """The workers are two, wherever it runs."""
    small, large, fmt, cache = sys.argv[1:]
    told = []
    for path in (small, large):
        workers = Workers()
        workers.start()
        report = prepare(
            config(path, fmt, max_length=300, workers=2, on_overflow="auto"), words(), cache
        ).report
        told += [peak("self"), workers.end()]
    print(json.dumps({"memory": told, "tokens": report.train.tokens}))


if __name__ == "__main__":
    main()
