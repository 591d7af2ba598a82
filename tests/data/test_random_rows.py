"""Rows made from a seed: how long they are, what is said of them, and that they can be learnt."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.config.load import compose_run
from app.config.schema import MixSource
from app.data.prepare import Data, prepare
from app.data.sources import train_source
from app.errors import ConfigError, DataError
from tests.data.small import config, tokenizer, write_jsonl
from tests.data.test_labelled import framing, labeled

TOKENIZERS = {"plain": lambda: tokenizer(None), "with bos": lambda: tokenizer(None, adds_bos=True), "framed": framing}


def read(folder: Path, made: Any, fmt: str = "labelled_text", max_length: int = 32, **more: Any) -> Data:
    random = {"rows": 60, "length": 32, **more.pop("random", {})}
    section = config("random:", fmt, max_length=max_length, random=random, **more)
    return prepare(section, made, str(folder / "cache"))


@pytest.mark.parametrize("fmt", ["labelled_text", "text"])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_random_rows_have_exactly_the_wanted_tokens(tmp_path: Path, kind: str, fmt: str) -> None:
    data = read(tmp_path, TOKENIZERS[kind](), fmt)
    assert data.train.lengths.tolist() == [32] * 60
    lines = data.report.lines()
    assert not [line for line in lines if "lost" in line or "truncated" in line or "not read" in line], lines
    assert (data.report.train.longest, data.report.train.over_long) == (32, 0)


def test_random_rows_follow_their_seed_and_begin_with_their_label(tmp_path: Path) -> None:
    made = tokenizer(None)
    data, again, other = (
        read(tmp_path, made, random={"classes": 3, "seed": seed}, eval_path="random:") for seed in (0, 0, 1)
    )
    assert data.train.fingerprint == again.train.fingerprint != other.train.fingerprint
    assert sorted(data.report.train.classes.values()) == [20, 20, 20]
    assert data.eval is not None
    assert data.report.shared == 0, "held-out rows are drawn anew"
    for rows in (data.train, data.eval):
        for i in range(6):
            assert made.decode(rows.ids(i)).split()[0] == rows.class_of(i)
            assert rows.class_of(i) in data.classes


def test_random_rows_of_several_lengths_are_whole_or_refused(tmp_path: Path) -> None:
    made, drawn = tokenizer(None), {"shortest": 4}
    data = read(tmp_path, made, random=drawn, max_length=200)
    words = [len(made.decode(data.train.ids(i)).split()) for i in range(60)]
    assert min(words) < 10 < 26 < max(words) <= 32
    with pytest.raises(DataError, match=r"max_length=40: \d+ of 60 samples of random: .* are longer .longest"):
        read(tmp_path, made, random=drawn, max_length=40)


def test_random_rows_zipf_many_short_and_few_long(tmp_path: Path) -> None:
    random = {"shortest": 4, "length": 43, "rows": 2000, "lengths": "zipf"}
    source = train_source(config("random:", "text", max_length=400, random=random))
    words = np.array([len(row["text"].split()) for _, row in source.rows() if isinstance(row, dict)])
    shares = 1 / np.arange(1, 41) / np.sum(1 / np.arange(1, 41))
    assert (words.min(), words.max()) == (4, 43)
    assert np.abs(np.bincount(words, minlength=44)[4:] / 2000 - shares).max() < 0.03
    drawn = [read(tmp_path, tokenizer(None), max_length=400, random={**random, "rows": 50}) for _ in range(2)]
    assert drawn[0].train.fingerprint == drawn[1].train.fingerprint


def test_random_rows_are_a_source_of_a_mix(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", labeled(("rain", "b"), ("cat", "a")))
    section = config("random:", "labelled_text", max_length=32, random={"rows": 8, "length": 32})
    section.path, section.mix = None, {"noise": MixSource(path="random:", weight=2.0), "own": MixSource(path=str(file))}
    data = prepare(section, tokenizer(None), str(tmp_path / "cache"))
    assert sorted(data.train.lengths.tolist())[2:] == [32] * 16
    assert len(data.classes) == 4
    assert not [line for line in data.report.lines() if "truncated" in line]


def test_random_rows_settings_of_other_data_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"dataset\.random\.rows=9 has no effect without dataset=random"):
        compose_run(["dataset.random.rows=9"])


@pytest.mark.parametrize("task", ["causal", "classification"])
def test_random_rows_suit_the_task_and_the_model(task: str) -> None:
    run = compose_run([f"task={task}", "dataset=random"])
    assert run.dataset.random.length == run.dataset.max_length == run.model.suggest.length


FOLDERS: dict[str, tuple[dict[str, list[dict[str, Any]]], int, int]] = {
    "imdb": (
        {
            "train": labeled(("dull", 0), ("the capital", 0), ("fine", 1)),
            "test": labeled(("rain", 0), ("cat", 1)),
            "unsupervised": labeled(("unknown", -1)),
        },
        3,
        2,
    ),
    "dolly": (
        {
            "train": [
                {"instruction": f"say {n}", "context": "rain" * (n % 2), "response": str(n), "category": "open_qa"}
                for n in range(200)
            ]
        },
        200,
        0,
    ),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_presets_of_the_hub_read_a_folder_of_the_same_columns(tmp_path: Path, name: str) -> None:
    splits, trained, held = FOLDERS[name]
    for split, rows in splits.items():
        write_jsonl(tmp_path / f"{split}.jsonl", rows)
    task = "classification" if name == "imdb" else "causal"
    run = compose_run([f"task={task}", f"dataset={name}", f"dataset.path={tmp_path}"])
    data = prepare(run.dataset, tokenizer("chatml"), str(tmp_path / "cache"))
    assert data.eval is not None
    assert len(data.train) + (0 if held else len(data.eval)) == trained
    assert not held or len(data.eval) == held
    assert data.classes == (("0", "1") if name == "imdb" else ())
    assert not [line for line in data.report.lines() if "not read: c" in line or "not read: category" in line]
