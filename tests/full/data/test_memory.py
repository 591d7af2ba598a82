"""Preparing rows holds a bounded part of them."""

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import REPO
from tests.data.small import chat
from tests.harness.python import printed_by

WORD = "rain" * 250  # long words: few tokens, many bytes
UNREAD = " ".join([WORD] * 32)
SMALL, LARGE = 30 << 20, 130 << 20
GROWTH = 60  # MB, of the 100 by which the files differ
CODE = """
import sys
from pathlib import Path
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from app.data.prepare import prepare
from tests.data.small import CHATML, config

backend = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "<pad>": 2}, unk_token="<unk>"))
backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
made = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>", pad_token="<pad>")
made.chat_template = CHATML
for path in sys.argv[2:]:
    prepare(config(path, max_length=300), made, sys.argv[1])
    lines = Path("/proc/self/status").read_text().splitlines()
    print(next(int(line.split()[1]) >> 10 for line in lines if line.startswith("VmHWM")))
"""


def rows(size: int) -> Iterator[str]:
    """Chats with a column that nobody reads, until they are `size` bytes."""
    written = number = 0
    while written < size:
        row = json.dumps({"messages": chat(f"Question {number}?", f"{WORD} {number}"), "unread": UNREAD})
        written, number = written + len(row), number + 1
        yield f"{row}\n"


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, kind: str) -> None:
    """Files differ by more than may be held: held whole, the larger one would be seen."""
    paths = [tmp_path / f"{name}.{kind}" for name in ("small", "large")]
    for path, size in zip(paths, (SMALL, LARGE), strict=True):
        with gzip.open(path, "wt", compresslevel=1) if kind.endswith("gz") else path.open("w") as file:
            file.writelines(rows(size))
    env = os.environ | {"RAYON_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
    before, after = map(int, printed_by("-c", CODE, str(tmp_path / "cache"), *map(str, paths), env=env).split())
    assert after - before < GROWTH
