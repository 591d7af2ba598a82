"""python -m scripts.make_assets [FOLDER]: write sample data and tokenizers, reproducible byte for byte."""

import gzip
import json
import random
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from scripts.make_assets import tokenizer
from scripts.make_assets.chat import Row, make_rows
from scripts.make_assets.documents import Author
from scripts.make_assets.forms import load_forms
from scripts.make_assets.skills import make_skills
from scripts.make_assets.world import invent

SEED = "assets"
ASSETS = Path(__file__).resolve().parents[2] / "app" / "assets"
TRAIN_ROWS_PER_SKILL = 400
EVAL_ROWS_PER_SKILL = 20
PAIRS = 1_200
STYLED_ROWS = 4_000
SENTENCES = 0.3  # fraction of the answers in styles.jsonl
DOCUMENTS = 20_000


def documents(seed: str = SEED) -> Iterator[str]:
    """Yield endless running text about the world, for pretraining."""
    world = invent(SEED)
    return Author(make_skills(world), load_forms(), world).write(random.Random(f"{seed} documents"))


def chat_rows(held_out: bool) -> list[Row]:
    """Return the rows of train.jsonl or eval.jsonl."""
    per_skill = EVAL_ROWS_PER_SKILL if held_out else TRAIN_ROWS_PER_SKILL
    skills = make_skills(invent(SEED))
    return make_rows(skills, load_forms(), held_out, per_skill, random.Random(f"{SEED} chat {held_out}"))


def _answered_twice(held_out: bool) -> Iterator[tuple[list[dict[str, str]], str, str]]:
    """Yield the prompt of each single-turn row, with the answer in a word and in a sentence."""
    forms = load_forms()
    for row in chat_rows(held_out):
        if len(row.items) == 1:
            (item,) = row.items
            yield row.messages()[:-1], item.answer, item.put(forms[row.skill.name].says[0])


def pairs(held_out: bool) -> Iterator[str]:
    """Yield the lines of pairs.jsonl or its eval set: the word is chosen, the sentence rejected."""
    for prompt, word, sentence in islice(_answered_twice(held_out), None if held_out else PAIRS):
        yield _line(prompt=prompt, chosen=word, rejected=sentence)


def labelled_answers(held_out: bool) -> Iterator[str]:
    """Yield the lines of labelled_answers.jsonl or its eval set: both answers of each pair, one per line."""
    for prompt, word, sentence in islice(_answered_twice(held_out), None if held_out else PAIRS):
        yield _line(prompt=prompt, completion=word, label=True)
        yield _line(prompt=prompt, completion=sentence, label=False)


def styles() -> Iterator[str]:
    """Yield the lines of styles.jsonl: questions answered in a word or, at random, in a sentence."""
    rng = random.Random(f"{SEED} styles")
    for prompt, word, sentence in islice(_answered_twice(held_out=False), STYLED_ROWS):
        answer = sentence if rng.random() < SENTENCES else word
        yield _line(messages=[*prompt, {"role": "assistant", "content": answer}])


def _line(**row: Any) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


def make_files() -> dict[str, str]:
    """Return the uncompressed content by path below app/assets."""
    train, held_out = chat_rows(False), chat_rows(True)
    spoken = [message["content"] for row in train for message in row.messages()]
    texts = [*islice(documents(), DOCUMENTS), *spoken]
    return {
        "sample/train.jsonl": "".join(f"{row.line()}\n" for row in train),
        "sample/eval.jsonl": "".join(f"{row.line()}\n" for row in held_out),
        "sample/pairs.jsonl.gz": "".join(pairs(False)),
        "sample/pairs_eval.jsonl": "".join(pairs(True)),
        "sample/labelled_answers.jsonl.gz": "".join(labelled_answers(False)),
        "sample/labelled_answers_eval.jsonl.gz": "".join(labelled_answers(True)),
        "sample/styles.jsonl.gz": "".join(styles()),
        "tiny/tokenizer.json": tokenizer.train(texts),
        "tiny/tokenizer_config.json": tokenizer.config(),
        "wordpiece/tokenizer.json": tokenizer.make_wordpiece(texts),
        "wordpiece/tokenizer_config.json": tokenizer.wordpiece_config(),
    }


def main(folder: Path) -> None:
    """Write and print all files."""
    for name, content in make_files().items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        data = content.encode()
        target.write_bytes(gzip.compress(data, mtime=0) if target.suffix == ".gz" else data)
        print(f"{target}  {target.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ASSETS)
