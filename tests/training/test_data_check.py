"""A look at the data says what a run would find, and what to do about it."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.base.tokenizer import load_tokenizer
from app.data.objectives import NEXT_TOKEN
from app.training.data_check import DataCheck, advice, check_data
from app.training.samples import preview
from app.training.summary import run_table
from tests.data.small import chat, write_chats, write_jsonl
from tests.harness.composed import composed
from tests.training.conftest import plan_of, small_run

Look = Callable[..., DataCheck]
ALL_ROWS = ("dataset.max_rows=700", "dataset.eval_max_rows=null")  # more than any file here has
NEVER = {"role": "nobody", "content": ""}


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The default dataset is tokenized once."""
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def look(tmp_path: Path, cache_dir: str) -> Look:
    def looked(*overrides: str, processes: int = 1) -> DataCheck:
        run = small_run(*dict.fromkeys((*overrides, *ALL_ROWS)), folder=tmp_path)
        return check_data(replace(run, cache_dir=cache_dir), processes, lambda _text: None)

    return looked


def talks(folder: Path, count: int, answer: str = "the answer is {}") -> str:
    chats = [chat(f"Question {n}?", answer.format(n)) for n in range(count)]
    return f"dataset.path={write_chats(folder / f'{count}.jsonl', *chats)}"


def advised(found: DataCheck) -> dict[str, str]:
    return dict(advice(found))


@pytest.mark.parametrize(
    ("batching", "processes"),
    [(("batching.accumulation=3",), 2), (("batching.packing=false", "batching.rows=4"), 2), ((), 1)],
)
def test_data_check_counts_equal_those_of_a_run(
    look: Look, tmp_path: Path, cache_dir: str, batching: tuple[str, ...], processes: int
) -> None:
    words = (*batching, "training.epochs=2.5", *ALL_ROWS)
    facts = look(*words, processes=processes).facts()
    run = plan_of(replace(small_run(*words), cache_dir=cache_dir), tmp_path / "checkpoints")
    assert facts["units_per_step"] == run.loader.units_per_step * processes
    train = run.rows.data.report.train
    assert (facts["rows"], facts["total_tokens"]) == (train.rows_read, train.tokens)
    assert facts["trained_tokens"] == train.trained_tokens
    if processes == 1:
        assert (facts["steps"], facts["steps_per_epoch"]) == (run.steps.steps, run.steps.steps_per_epoch)
        assert facts["tokens_per_step"] == pytest.approx(train.tokens / run.steps.steps_per_epoch)
    if facts["packing"]:
        assert facts["bins"] == run.loader.num_units
        assert facts["fill"] == pytest.approx(train.tokens / (facts["bins"] * facts["bin_tokens"]))
        assert facts["lower_bound_bins"] <= facts["bins"]
    json.dumps(facts, allow_nan=False)


def test_data_check_says_what_a_run_says(look: Look, tmp_path: Path, cache_dir: str) -> None:
    """Of rows with thoughts that the template drops, text of special tokens, unread columns and keys, duplicates."""
    answer = {"role": "assistant", "content": "b", "thinking": "Hm.", "name": "x"}
    rows: list[Any] = [{"messages": [*chat("<|end|>?"), answer], "score": n} for n in (1, 2)]
    path = write_jsonl(tmp_path / "a.jsonl", [*rows, {"messages": chat("Hi", "word " * 99)}])
    words = ("dataset=messages", f"dataset.path={path}", "dataset.max_length=32", "dataset.on_overflow=drop")
    found = look(*words)
    run = replace(small_run(*words, *ALL_ROWS, folder=tmp_path), cache_dir=cache_dir)
    resolved = plan_of(run, tmp_path / "checkpoints")
    [(_, said)] = [row for row in run_table(resolved) if row[0] == "data"]
    assert found.facts()["lines"] == said.split("\n")
    for part in (
        "such as reasoning) of 2",
        "special-token text",
        "not read: score (2 rows)",
        "thinking (2 ",
        "dropped",
        "duplicate",
    ):
        assert part in said


def test_bad_rows_are_counted_and_stop_a_run(look: Look, tmp_path: Path) -> None:
    good, bad = chat("Hi", "Hello there"), [NEVER]
    path = write_chats(tmp_path / "a.jsonl", bad, *[good] * 600, bad, chat("Hi"), good)
    words = ("dataset=messages", f"dataset.path={path}", "dataset.eval_fraction=0")
    facts = look(*words).facts()
    assert (facts["rows"], facts["bad_rows"], facts["samples"]) == (604, 3, 601)
    assert facts["duplicate_rows"] == 600
    assert [(each["rows"], each["first"]) for each in facts["bad"]] == [(2, "a.jsonl:1"), (1, "a.jsonl:603")]
    assert facts["bad_places"] == ["a.jsonl:1", "a.jsonl:602", "a.jsonl:603"]
    assert len(facts["stops"]) == 2
    assert facts["stops"][0].startswith("a.jsonl:1 and 1 more row: message 0: unknown role 'nobody'")
    assert look(*words, "dataset.on_bad_row=skip").facts()["stops"] == []


def test_message_weights_are_summed(look: Look, tmp_path: Path) -> None:
    plain = chat("Hi", "Hello there")
    halved: list[Any] = [plain[0], {**plain[1], "weight": 0.5}]
    path = write_chats(tmp_path / "a.jsonl", plain, halved, halved)
    words = ("dataset=messages", f"dataset.path={path}", "dataset.eval_fraction=0")
    facts = look(*words).facts()
    assert facts["weights"] == {
        "samples": 2,
        "trained_tokens_count_as": facts["trained_tokens"] * 2 / 3,
        "share": pytest.approx(facts["trained_share"] * 2 / 3),
    }
    assert look(*ALL_ROWS).facts()["weights"] is None


@pytest.mark.parametrize(("policy", "lost"), [("drop", 1000), ("truncate", 744), ("error", 1000)])
def test_overlong_rows_follow_the_policy(look: Look, tmp_path: Path, policy: str, lost: int) -> None:
    chats = [chat("Hi", "one two three"), chat("Hi", "word " * 1000)]
    words = ("dataset=messages", f"dataset.path={write_chats(tmp_path / 'a.jsonl', *chats)}")
    found = look(*words, f"dataset.on_overflow={policy}", "dataset.eval_fraction=0")
    facts = found.facts()
    assert (facts["rows"], facts["overlong_rows"]) == (2, 1)
    longest = facts["length_percentiles"]["max"]
    assert longest > 1000
    assert facts["overlong_tokens"] == (longest - 256 if policy == "truncate" else longest) > lost
    assert facts["samples"] == (2 if policy == "truncate" else 1)
    assert bool(facts["stops"]) == (policy == "error")
    assert sum(each["samples"] for each in facts["overlong_lengths"]) == 1


def test_mix_sources_are_judged_by_their_formats(look: Look, tmp_path: Path) -> None:
    """Text that is too long is split, and so loses nothing; conversations are dropped."""
    write_chats(tmp_path / "a.jsonl", *[chat("Hi", "Hello there")] * 8, chat("Hi", "long " * 400))
    (tmp_path / "b.txt").write_text("It was long ago. " * 400)
    mix = ("dataset=mix", f"dataset.mix.a.path={tmp_path / 'a.jsonl'}", f"dataset.mix.b.path={tmp_path / 'b.txt'}")
    found = look(*mix, "dataset.mix.b.format=text", "dataset.mix.a.format=messages", "dataset.max_length=128")
    (stopped,) = found.facts()["stops"]
    assert "a.jsonl" in stopped
    assert "dataset.max_length=128" in stopped
    assert not any("None" in key for key in advised(found))
    facts = found.facts()
    assert facts["format"] == "messages + text"
    chats, text = facts["sources"]
    assert (chats["name"], chats["rows"], chats["overlong_rows"], chats["dropped"]) == ("a", 9, 1, 1)
    assert (chats["duplicate_rows"], chats["drawn"], chats["weight"]) == (7, 8, 1.0)
    assert (text["rows"], text["overlong_rows"], text["dropped"]) == (1, 1, 0)
    assert chats["tokens"] + text["tokens"] == facts["total_tokens"]
    assert chats["share"] + text["share"] == pytest.approx(1)
    assert look().facts()["sources"] == []


def test_preview_of_mix_shows_distinct_rows_of_each_source(look: Look, tmp_path: Path) -> None:
    weights = {"a": 2, "b": 0.5, "c": 0, "d": 2.5}
    words = ["dataset=mix"]
    for name, weight in weights.items():
        write_chats(tmp_path / f"{name}.jsonl", *[chat(f"{name} {n}?", f"It is {n}") for n in range(8)])
        words += [f"dataset.mix.{name}.path={tmp_path / name}.jsonl", f"dataset.mix.{name}.weight={weight}"]
        words.append(f"dataset.mix.{name}.format=messages")
    found = look(*words)
    places = [row["place"] for row in found.preview["rows"]]
    assert [place.partition(".")[0] for place in places] == ["a", "a", "b", "d"]
    assert places[:2] == ["a.jsonl:1", "a.jsonl:2"]
    assert places[3] == "d.jsonl:1"
    shares = found.data.report.shares.values()
    spread = preview(found.data.train, NEXT_TOKEN, load_tokenizer(found.run.model, needs_template=True), shares)["rows"]
    assert [row["place"] for row in spread][:2] == ["a.jsonl:1", "a.jsonl:8"]


def test_preview_of_mix_of_many_sources_shows_one_row_of_each(look: Look, tmp_path: Path) -> None:
    words = ["dataset=mix"]
    for name in "abcdef":
        write_chats(tmp_path / f"{name}.jsonl", chat(f"{name}?", "Yes"))
        words += [f"dataset.mix.{name}.path={tmp_path / name}.jsonl", f"dataset.mix.{name}.format=messages"]
    assert [row["place"][0] for row in look(*words).preview["rows"]] == [*"abcdef"]


def test_advice_omits_useless_max_length(look: Look, tmp_path: Path) -> None:
    """Rows that are longer by far than the model has positions."""
    path = write_chats(tmp_path / "a.jsonl", *[chat("Hi", "Hello")] * 9, chat("Hi", "long " * 4000))
    found = look("dataset=messages", f"dataset.path={path}", "dataset.on_overflow=drop", "dataset.max_length=256")
    assert found.facts()["dropped"] == 1
    assert not [key for key in advised(found) if "max_length" in key]
    assert "dataset.on_overflow=truncate" in advised(found)


def test_long_text_is_split_without_loss(look: Look, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("Rain falls on the roof. " * 400)
    found = look("dataset=text", f"dataset.path={tmp_path / 'book.txt'}", "dataset.max_length=64")
    facts = found.facts()
    assert (facts["rows"], facts["overlong_rows"], facts["overlong_tokens"]) == (1, 1, 0)
    assert facts["length_percentiles"]["max"] == 64
    assert facts["stops"] == []
    assert not [key for key in advised(found) if "max_length" in key]


def test_dataset_without_usable_rows_is_reported(look: Look, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"chat": []}] * 3)
    facts = look("dataset=messages", f"dataset.path={path}").facts()
    assert (facts["rows"], facts["bad_rows"], facts["steps"], facts["bins"]) == (3, 3, 0, 0)
    assert facts["fill"] is facts["length_percentiles"] is facts["trained_share"] is None
    assert facts["stops"][0].startswith("a.jsonl:1 and 2 more rows: dataset.format=messages needs a column")
    json.dumps(facts, allow_nan=False)


def test_held_out_rows_in_training_are_counted(look: Look, tmp_path: Path) -> None:
    held = write_chats(tmp_path / "held.jsonl", chat("Question 3?", "the answer is 3"), chat("A?", "b"))
    found = look("dataset=messages", talks(tmp_path, 20), f"dataset.eval_path={held}", "dataset.eval_fraction=0")
    told = found.facts()["eval"]
    assert (told["rows"], told["samples"], told["also_trained_on"]) == (2, 2, 1)
    assert (
        "1 eval sample also in the training set" in advised(found)["dataset.eval_path=null dataset.eval_fraction=0.02"]
    )


ADVICE: dict[str, tuple[tuple[str, ...], int, str, str]] = {
    "nothing held out": (("dataset.eval_fraction=0",), 100, "dataset.eval_fraction=0.2", "no eval set"),
    "few held out": (("dataset.eval_fraction=0.02",), 200, "dataset.eval_fraction=0.15", "too few for a reliable loss"),
    "few held out of few": (
        ("dataset.eval_fraction=0.1",),
        100,
        "dataset.eval_path=FILE",
        "too few for a reliable loss",
    ),
    "few samples": (("dataset.eval_fraction=0",), 9, "dataset.eval_path=FILE", "no eval set"),
    "padding": (("batching.packing=false", "batching.rows=64"), 99, "batching.packing=true", "micro-batches are"),
    "few steps": ((), 100, "training.epochs=", "training step"),
    "part of an epoch": (("training.max_steps=1", "batching.tokens=256"), 300, "training.max_steps=null", "cover"),
    "large steps": (("batching.accumulation=4",), 100, "batching.accumulation=1", "smaller steps"),
}


@pytest.mark.parametrize("name", ADVICE)
def test_advice_has_settings_to_type(look: Look, tmp_path: Path, name: str) -> None:
    words, count, key, why = ADVICE[name]
    path = talks(tmp_path, count, "{}" + (" and more of it" * 12 if name == "part of an epoch" else ""))
    if name == "padding":
        chats = [chat("Hi", "word " * (1 + n)) for n in range(count)]
        path = f"dataset.path={write_chats(tmp_path / 'uneven.jsonl', *chats)}"
    found = advised(look("dataset=messages", path, *words))
    [told] = [text for each, text in found.items() if each.startswith(key)]
    assert why in told


def test_advised_max_length_fits_the_model(look: Look, tmp_path: Path) -> None:
    chats = [chat("Hi", "word " * n) for n in range(1, 200)]
    words = (
        "dataset=messages",
        f"dataset.path={write_chats(tmp_path / 'a.jsonl', *chats)}",
        "dataset.on_overflow=drop",
    )
    short = look(*words, "dataset.max_length=100", "batching.tokens=100")
    assert short.facts()["overlong_rows"] > 0
    [key] = [each for each in advised(short) if each.startswith("dataset.max_length=")]
    length = int(key.split()[0].partition("=")[2])
    assert key == f"dataset.max_length={length} batching.tokens={length}"
    after = look(*words, *key.split())
    assert after.facts()["overlong_rows"] <= 0.01 * after.facts()["rows"]
    assert not [key for key in advised(after) if "max_length" in key]
    longer = [*chats, *[chat("Hi", "word " * 900)] * 40]
    words = (*words[:1], f"dataset.path={write_chats(tmp_path / 'b.jsonl', *longer)}", words[2])
    most = look(*words, "dataset.max_length=512", "batching.tokens=512")
    assert "model=tiny reads 512 tokens at most, " in advised(most)["dataset.on_overflow=truncate"]


def test_lengths_of_pairs_are_those_of_the_longer_answer(look: Look, tmp_path: Path) -> None:
    rows = [{"prompt": "Hi", "chosen": "word " * n, "rejected": "no"} for n in range(1, 100)]
    words = ("recipe=orpo", "dataset=preference", f"dataset.path={write_jsonl(tmp_path / 'a.jsonl', rows)}")
    short = look(*words, "dataset.on_overflow=drop", "dataset.max_length=64", "batching.tokens=128")
    lengths = short.facts()["length_percentiles"]
    assert lengths["p95"] <= lengths["max"]
    [key] = [each for each in advised(short) if each.startswith("dataset.max_length=")]
    after = look(*words, "dataset.on_overflow=drop", *key.split())
    assert after.facts()["overlong_rows"] <= 0.01 * len(rows)


def test_default_length_of_pairs_has_a_note(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": "Hi", "chosen": "Yes", "rejected": "No"}])
    words = ("recipe=dpo", "dataset=auto", f"dataset.path={tmp_path / 'a.jsonl'}", f"cache_dir={tmp_path / 'cache'}")
    said: list[str] = []
    check_data(composed(*words), 1, said.append)
    check_data(composed(*words, "dataset.max_length=100"), 1, said.append)
    note = "note    dataset.max_length=128: a bin of batching.tokens=256 must fit both answers of a pair."
    assert [line.startswith(note) for line in said if "max_length" in line] == [True]


def test_advice_ends_what_would_stop_again(look: Look, tmp_path: Path) -> None:
    chats = [chat("Hi", "word " * (100 if n % 2 else 900)) for n in range(40)]
    path = f"dataset.path={write_chats(tmp_path / 'a.jsonl', *chats)}"
    words = ("dataset=messages", path, "dataset.max_length=64", "batching.tokens=64")
    [key] = [each for each in advised(look(*words)) if each.startswith("dataset.max_length=")]
    assert key == "dataset.max_length=512 batching.tokens=512 dataset.on_overflow=drop"
    assert look(*words, *key.split()).stops == []


def test_advice_names_unread_texts_and_written_chats(look: Look, tmp_path: Path) -> None:
    row = {"text": "<s>[INST] Hi [/INST] Hello.</s>", "notes": "It rains on the roof. " * 9, "tag": "x y"}
    row |= {"more": "It is late. " * 10, "label": "good"}
    words = ("dataset=auto", f"dataset.path={write_jsonl(tmp_path / 'a.jsonl', [row] * 3)}")
    found = advised(look(*words))
    assert found["dataset.leave_out=[notes,more]"].startswith(
        "not read: notes (198 characters per row), more (120 characters per row). dataset.columns.FIELD=NAME reads"
    )
    assert not [key for key in advised(look(*words, "dataset.leave_out=[notes,more]")) if "leave_out" in key]
    as_classes = "task=classification dataset=labelled_text dataset.columns.label=label"
    assert found[as_classes].startswith("column label is not read; if it is the class of each text")
    assert found["dataset=messages"].startswith("3 texts with [INST]: chats already rendered for a model")
    assert not [key for key in found if "tag" in key]


def test_advice_names_split_that_is_not_read(look: Look, tmp_path: Path) -> None:
    for split in ("train", "test"):
        write_chats(tmp_path / f"{split}.jsonl", chat("Hi", "Hello there"), chat("Bye", "See you"))
    found = advised(look("dataset=messages", f"dataset.path={tmp_path}"))
    assert found["dataset.eval_split=test dataset.eval_fraction=0"].endswith("the split test is not read")


def test_rows_scored_beside_are_read(look: Look, tmp_path: Path) -> None:
    general = tmp_path / "general.jsonl"
    general.write_text('{"text": "a plain text"}\n')
    assert any(each.startswith("also: 1 row, ") for each in look(f"eval.also={general}").data.report.notes)
    general.write_text('{"odd": 1}\n')
    assert look(f"eval.also={general}").stops[0].startswith(f"eval.also={general}: ")


def test_unknown_token_id_stops_a_run(look: Look) -> None:
    [problem] = look("model.architecture.vocab_size=100").stops
    assert problem.startswith("model.tokenizer=")


def test_preview_marks_masked_tokens(look: Look, tmp_path: Path) -> None:
    """Also where the task draws what is to be predicted."""
    facts: dict[str, Any] = look("dataset=text", talks_as_text(tmp_path)).facts()
    assert facts["preview"]["marked"] == "tokens in the loss"
    assert [row["place"] for row in facts["preview"]["rows"]] == ["a.txt"]


def talks_as_text(folder: Path) -> str:
    (folder / "a.txt").write_text("The cat sleeps.")
    return f"dataset.path={folder / 'a.txt'}"


def test_data_check_rewriting_template_advises_join(look: Look, tmp_path: Path) -> None:
    template = tmp_path / "rewriting.jinja"
    thought = "{{ '<think></think>' if m.role == 'assistant' and loop.last else '' }}"
    asked = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    template.write_text(
        f"{{% for m in messages %}}<|{{{{ m.role }}}}|>{thought}{{{{ m.content }}}}<|end|>{{% endfor %}}{asked}"
    )
    long = [chat(*("word " * 40 for _ in range(8))) for _ in range(2)]
    path = write_chats(tmp_path / "a.jsonl", chat("a", "b", "c", "d"), chat("e", "f", "g", "h"))
    words = ("dataset=messages", f"model.chat_template={template}")
    found = look(*words, f"dataset.path={path}")
    assert advised(found)["dataset.on_unstable_template=join"].startswith(
        "the chat template rewrites earlier turns, so 2 conversations became 4 samples that repeat each other; `join`"
    )
    joined = look(*words, f"dataset.path={path}", "dataset.on_unstable_template=join")
    assert not any("on_unstable_template" in key for key in advised(joined))
    assert joined.data.report.train.trained_tokens == found.data.report.train.trained_tokens
    cut = look(*words, f"dataset.path={write_chats(tmp_path / 'b.jsonl', *long)}", "dataset.on_overflow=drop")
    assert "dataset.on_unstable_template=join dataset.on_overflow=truncate" in advised(cut)
    thinks = [{**m, "reasoning_content": "Hm."} if m["role"] == "assistant" else m for m in chat("a", "b", "c", "d")]
    reasons = look(*words, f"dataset.path={write_jsonl(tmp_path / 'c.jsonl', [{'messages': thinks}])}")
    assert "dataset.on_unstable_template=last" in advised(reasons)
    [stop] = look(*words, f"dataset.path={path}", "dataset.on_unstable_template=error").stops
    assert stop.endswith("=expand (one sample per turn), join (one sample for all turns) or last (only the last turn)")
