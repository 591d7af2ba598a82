"""`dataset.sample`: which rows it selects, how they are counted, and what it cannot be combined with."""

from pathlib import Path
from typing import Any

from app.config.schema import MixSource
from app.data.prepare import Data, prepare
from tests.data.small import config, greetings, locations, tokenizer, write_chats, write_jsonl
from tests.data.test_labelled import labeled

SORTED = labeled(*((f"text {n}", "pos" if n < 60 else "neg" if n < 90 else "rare") for n in range(95)))


def read(path: Path, fmt: str = "labelled_text", labeling: str = "single", **more: Any) -> Data:
    cache = str(path.parent / "cache")
    return prepare(config(path, fmt, **more), tokenizer(), cache, labeling=labeling)


def texts(data: Data) -> set[str]:
    made = tokenizer()
    return {made.decode(data.train.ids(i), skip_special_tokens=True) for i in range(len(data.train))}


def test_sample_of_labeled_rows_has_equal_shares_in_any_file_order(tmp_path: Path) -> None:
    data = read(write_jsonl(tmp_path / "a.jsonl", SORTED), sample=21)
    assert data.report.train.classes == {"neg": 8, "pos": 8, "rare": 5}
    assert "train: 74 rows not in the sample" in data.report.lines()
    assert texts(data) == texts(read(write_jsonl(tmp_path / "b.jsonl", SORTED[::-1]), sample=21))
    assert texts(data) < texts(read(tmp_path / "a.jsonl", sample=40))
    assert len(list((tmp_path / "cache" / "tokens").iterdir())) == 3


def test_sample_of_other_rows_is_uniform(tmp_path: Path) -> None:
    several = read(write_jsonl(tmp_path / "a.jsonl", SORTED), labeling="multi", sample=40)
    assert several.report.train.classes["pos"] > 20
    chats = read(write_chats(tmp_path / "c.jsonl", *greetings(200)), "messages", sample=50)
    lines = [int(place.partition(":")[2]) for place in locations(chats.train)]
    assert len(lines) == 50
    assert 10 < sum(line <= 100 for line in lines) < 40


def test_sample_larger_than_the_source_keeps_all_rows_with_a_note(tmp_path: Path) -> None:
    data = read(write_chats(tmp_path / "a.jsonl", *greetings(9)), "messages", sample=20)
    assert len(data.train) == 9
    assert "train: sample=20 keeps all 9 rows" in data.report.lines()


def test_sample_leaves_bad_rows_to_the_report(tmp_path: Path) -> None:
    rows = [*SORTED, {"text": "no label"}, ["no object"], {"text": "list", "label": ["a", "b"]}]
    data = read(write_jsonl(tmp_path / "a.jsonl", rows), sample=10, on_bad_row="skip")
    train = data.report.train
    assert (train.samples, train.bad_rows, train.not_sampled) == (10, 3, 85)


def test_sample_before_the_eval_fraction_but_not_of_an_eval_file(tmp_path: Path) -> None:
    path = write_chats(tmp_path / "a.jsonl", *greetings(90))
    held_out = read(path, "messages", sample=40, eval_fraction=0.25)
    assert held_out.eval is not None
    assert len(held_out.train) + len(held_out.eval) == 40
    file = write_chats(tmp_path / "e.jsonl", *greetings(30, start=100))
    other = read(path, "messages", sample=20, eval_path=str(file))
    assert (len(other.train), len(other.eval or ())) == (20, 30)


def test_sample_of_each_source_of_a_mix(tmp_path: Path) -> None:
    files = [write_chats(tmp_path / f"{name}.jsonl", *greetings(30, start)) for name, start in (("a", 0), ("b", 50))]
    section = config(files[0], sample=7)
    section.path = None
    section.mix = {"a": MixSource(path=str(files[0]), sample=4), "b": MixSource(path=str(files[1]))}
    sources = prepare(section, tokenizer(), str(tmp_path / "cache")).report.sources
    assert {name: counts.samples for name, counts in sources.items()} == {"a": 4, "b": 7}
