"""Run as a process of its own: prepares a small file, then a large one, and tells its memory and that of its workers.

`prepare_and_tell.py SMALL LARGE FORMAT CACHE`: four numbers in MB, the most that this process and that one of its
workers had after each of the two.
"""

import json
import resource
import sys
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


def most() -> list[int]:
    """This process, and the largest of those that it started and that have ended."""
    return [
        resource.getrusage(who).ru_maxrss >> 10 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    ]


def main() -> None:
    """The workers are two, wherever it runs."""
    small, large, fmt, cache = sys.argv[1:]
    told = []
    for path in (small, large):
        report = prepare(
            config(path, fmt, max_length=300, workers=2, on_overflow="auto"), words(), cache
        ).report
        told += most()
    print(json.dumps({"memory": told, "tokens": report.train.tokens}))


if __name__ == "__main__":
    main()
