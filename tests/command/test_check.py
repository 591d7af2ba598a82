"""app.check as a process: what is shown, written and returned is what a run would find."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.data.small import chat, write_chats, write_jsonl
from tests.harness.runs import SMALL, Zygote

KEYS = (
    *("rows", "bad_rows", "overlong_rows", "overlong_tokens", "duplicate_rows", "total_tokens", "trained_tokens"),
    *("bins", "fill", "lower_bound_bins", "steps", "format", "length_percentiles"),
)


def look(zygote: Zygote, folder: Path, *words: str) -> tuple[int, str, str]:
    ended = zygote.run(folder, *words, module="app.check")
    return ended.code, ended.stdout, ended.stderr


def facts_in(folder: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((folder / "check.json").read_text())["data"]
    return facts


def test_check_data_equals_the_facts_of_a_run(zygote: Zygote, tmp_path: Path) -> None:
    """In the same folder: what the check left there is in nobody's way."""
    words = (*SMALL, "model.weights=random", f"cache_dir={tmp_path / 'cache'}", "output_dir=run")
    code, said, wrong = look(zygote, tmp_path, "data", *words)
    assert (code, wrong) == (0, "")
    facts = facts_in(tmp_path / "run")
    assert [key for key in KEYS if key not in facts] == []
    assert facts["preview"]["rows"][0]["place"] == "train.jsonl:1"
    assert f"{facts['bins']:,} bins of" in " ".join(said.split())
    assert '<span class="badge good">no problems found</span>' in (tmp_path / "run" / "check.html").read_text()
    entries = sorted((tmp_path / "cache" / "tokens").iterdir())

    zygote.finish(tmp_path, *words, "dry_run=true")
    counts = json.loads((tmp_path / "run" / "manifest.json").read_text())["counts"]
    assert (facts["steps"], facts["bins"]) == (counts["steps"], counts["units"])
    assert (facts["fill"], facts["lower_bound_bins"]) == (counts["fill"], counts["least_units"])
    assert facts["total_tokens"] == counts["data"]["train"]["tokens"]
    assert sorted((tmp_path / "cache" / "tokens").iterdir()) == entries, "nothing was tokenized twice"


def test_check_data_bad_rows_have_places_and_exit_code_2(zygote: Zygote, tmp_path: Path) -> None:
    good = [chat(f"What is {n}?", f"It is {n}") for n in range(40)]
    bad = [{"role": "asistant", "content": "x"}]
    write_chats(tmp_path / "a.jsonl", *good[:20], bad, *good[20:], bad)
    words = ("dataset=messages", "dataset.path=a.jsonl", f"cache_dir={tmp_path / 'cache'}")
    code, said, wrong = look(zygote, tmp_path, "data", *words, "output_dir=look")
    assert code == 2
    assert wrong.startswith("error: a.jsonl:21 and 1 more row: message 0: unknown role 'asistant'")
    assert wrong.endswith("training would fail on these rows\n")
    facts = facts_in(tmp_path / "look")
    assert (facts["rows"], facts["bad_rows"], facts["bad_places"]) == (42, 2, ["a.jsonl:21", "a.jsonl:42"])
    assert "a.jsonl:21 and 1 more row:" in " ".join(said.split())
    trained = zygote.run(tmp_path, *words, "output_dir=run", code=2)
    assert trained.stderr == wrong.removesuffix("training would fail on these rows\n")

    code, _, wrong = look(zygote, tmp_path, "data", *words, "dataset.on_bad_row=skip")
    assert (code, wrong) == (0, "")


def test_check_advised_commands_repeat_typed_settings_and_pass(zygote: Zygote, tmp_path: Path) -> None:
    """Rows of about 300 tokens, which the default length of the model refuses."""
    story = " ".join(["It rains on the hills and in the town."] * 25)
    rows = [{"question": f"What is {n}?", "answer": f"It is {n}.", "paragraph": f"{n} {story}"} for n in range(9)]
    write_jsonl(tmp_path / "a.jsonl", rows)
    settings = ("model=tiny", "dataset.max_length=500", "batching.tokens=512", "cache_dir=the cache")
    code, _, wrong = look(zygote, tmp_path, "data", *settings, "dataset=a.jsonl", "output_dir=look")
    assert code == 2
    commands = re.findall(r"type: finetune check (.*)", wrong)
    assert len(commands) == 2
    assert commands[0] in facts_in(tmp_path / "look")["stops"][0]
    trained = zygote.run(tmp_path, *settings, "dataset=a.jsonl", "output_dir=run", code=2)
    assert re.findall(r"type: finetune check (.*)", trained.stderr) == commands
    for command in commands:
        words = shlex.split(command)
        assert {*settings} < {*words}
        assert not any(word.startswith("output_dir") for word in words)
        assert look(zygote, tmp_path, *words)[::2] == (0, "")
    short = [word for word in shlex.split(commands[0]) if word not in settings[1:3]]
    assert "longer" in look(zygote, tmp_path, *short)[2]


def test_check_without_arguments_checks_all_and_writes_nothing(zygote: Zygote, tmp_path: Path) -> None:
    write_chats(tmp_path / "a.jsonl", chat("Hi", "Hello"), chat("Hi", "Hello"))
    cache = tmp_path / "cache"
    words = ("dataset=messages", "dataset.path=a.jsonl", f"cache_dir={cache}", "compile=none")
    code, said, wrong = look(zygote, tmp_path, *words)
    assert (code, wrong) == (0, "")
    assert "1 duplicate sample" in said
    assert sorted(entry.name for entry in tmp_path.iterdir() if entry.is_dir()) == ["cache"]


def memory_in(folder: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((folder / "check.json").read_text())["memory"]
    return facts


def test_check_memory_needs_no_data_or_weights(zygote: Zygote, tmp_path: Path) -> None:
    """The rows are nowhere, and the model is on no disk here."""
    words = ("model=llama", "dataset=messages", "dataset.path=nowhere.jsonl", "hardware=h100", "output_dir=look")
    answers = ("compile=none", "answers.rows=4", "answers.length=2048")
    code, said, wrong = look(zygote, tmp_path, "memory", *words, *answers)
    assert (code, wrong) == (0, "")
    facts = memory_in(tmp_path / "look")
    assert (facts["hardware"], facts["fits"], facts["stops"], facts["knobs"]) == ("h100", True, [], [])
    assert sum(facts["anatomy"].values()) == facts["peak_bytes"] == max(facts["phases"].values())
    assert facts["phases"][facts["peak_where"]] == facts["peak_bytes"]
    assert facts["anatomy"]["frozen_weights"] == pytest.approx(2 * 8.03e9, rel=0.001)
    assert facts["flops_per_token"] == pytest.approx(4 * 8.03e9, rel=0.05)  # backward without the weights' gradients
    assert facts["bound"]["tokens_per_second"] == pytest.approx(4096 * 989e12 / facts["flops"])
    assert facts["flops_per_token"] / facts["forward_flops"] == pytest.approx(2, rel=0.05)
    assert facts["faster"] == []  # LoRA on an unquantized base, in micro-batches of 4,096 tokens
    assert facts["answers"]["anatomy"]["cache"] == 4 * 2048 * 32 * 4096, (
        "32 layers of 2 x 8 heads x 128 numbers in bf16"
    )
    assert "fits" in said
    assert "key-value cache   1.1 GB" in said
    assert '<span class="badge good">fits H100</span>' in (tmp_path / "look" / "check.html").read_text()


WRONG = {
    "data dataset=auto dataset.path=nowhere.jsonl": "error: dataset.path=nowhere.jsonl: no such file or folder in",
    "cluster": "error: launch.num_processes=1: finetune check cluster needs several processes. Set",
    "dataset=messages data": "error: Unrecognized argument 'data'.",
}


@pytest.mark.parametrize("words", WRONG)
def test_check_typos_are_reported(zygote: Zygote, words: str, tmp_path: Path) -> None:
    code, said, wrong = look(zygote, tmp_path, *words.split())
    assert wrong.startswith(WRONG[words])
    assert (code, said) == (2, "")


def test_check_quantization_compares_formats(zygote: Zygote, tmp_path: Path) -> None:
    code, said, wrong = look(zygote, tmp_path, "quantization", *SMALL, "output_dir=look")
    assert (code, wrong) == (0, "")
    facts = json.loads((tmp_path / "look" / "check.json").read_text())["quantization"]
    errors = {each["format"]: each["error"] for each in facts["formats"]}
    assert errors["int8, for a row"] < errors["E4M3, for a row"] < errors["NF4, for 64 weights"]
    assert len(facts["layers"]) == 14
    shown = f"NF4, for 64 weights (4.50 bits) {errors['NF4, for 64 weights']:.2%}"
    assert shown in " ".join(said.split())
    assert (tmp_path / "look" / "check.html").read_text().count('<rect class="bar"') == len(errors)


def test_check_quantization_with_rows_measures_layer_inputs(zygote: Zygote, tmp_path: Path) -> None:
    code, said, wrong = look(zygote, tmp_path, "quantization", "rows=5", *SMALL, "output_dir=look")
    assert (code, wrong) == (0, "")
    inputs = json.loads((tmp_path / "look" / "check.json").read_text())["quantization"]["activations"]
    assert (inputs["rows"], inputs["threshold"], len(inputs["layers"])) == (5, 6.0, 14)
    assert 0 < inputs["llm_int8_error"] <= inputs["int8_error"] < 0.05
    assert f"5 samples, {inputs['tokens']} tokens, 14 linear layers" in " ".join(said.split())


def test_check_cluster_processes_find_each_other(zygote: Zygote, tmp_path: Path) -> None:
    words = ("cluster", "output_dir=look")
    first, second = zygote.run_together(tmp_path, 2, *words, module="app.check")
    assert (first.code, first.stderr, second.code, second.stdout, second.stderr) == (0, "", 0, "", "")
    facts = json.loads((tmp_path / "look" / "check.json").read_text())["cluster"]
    assert (facts["processes"], facts["machines"], facts["backend"]) == (2, 1, "gloo")
    assert (facts["stops"], facts["seconds"] < 60) == ([], True)
    assert sorted(file.name for file in (tmp_path / "look").iterdir()) == ["check.html", "check.json"]
    for each in facts["ranks"]:
        assert {"torch", "transformers", "peft", "accelerate", "bitsandbytes"} <= each["versions"].keys()
        assert abs(each["clock_offset_seconds"]) < 1
    rows = facts["collectives"]
    assert {row["name"] for row in rows} == {*("all-reduce", "broadcast", "reduce-scatter", "all-gather", "reduce")}
    assert all(row["algorithm_bytes_per_second"] == row["bytes"] / row["seconds"] for row in rows)
    assert "<h1>2 processes on 1 machine, gloo</h1>" in (tmp_path / "look" / "check.html").read_text()


def test_check_memory_of_a_ladder(zygote: Zygote, tmp_path: Path) -> None:
    words = ("memory", "sweep=packing", "sweep.size=small", "hardware=rtx3080ti", "output_dir=look")
    code, said, wrong = look(zygote, tmp_path, *words, "model.architecture.num_hidden_layers=1")
    assert (code, wrong) == (0, "")
    lines = said.splitlines()
    assert lines[0] == "Estimated on RTX 3080 Ti: maximum of each part, tensors at the peak"
    assert [line.split()[0] for line in lines[1:4]] == ["rung", "padded", "packed"]
    assert "Claimed by the source: Llama 7B on Dolly with NeMo; GPU not named" in lines
    facts = json.loads((tmp_path / "look" / "check.json").read_text())["ladder"]
    assert (facts["sweep"], facts["label"], facts["stops"]) == ("packing", "RTX 3080 Ti", [])
    assert [rung["tensors"] > rung["frozen_weights"] > 0 for rung in facts["rungs"]] == [True, True]
    page = (tmp_path / "look" / "check.html").read_text()
    assert "<h1>packing</h1>" in page
    assert "<h2>Estimated on RTX 3080 Ti: maximum of each part, tensors at the peak</h2>" in page


def test_check_memory_of_a_ladder_goes_on_where_the_planner_fails(zygote: Zygote, tmp_path: Path) -> None:
    words = ("memory", "sweep=packing", "sweep.size=small", "output_dir=look")
    code, said, wrong = look(zygote, tmp_path, *words, "model.architecture.num_key_value_heads=5")  # of 6 heads
    assert code == 3
    assert wrong.count("Traceback") == 2
    assert [line.split(":")[0] for line in said.splitlines()[:4]] == [
        "Estimated on this machine",
        "rung",
        "padded",
        "packed",
    ]
    assert "padded: the planner failed: RuntimeError" in said
    facts = json.loads((tmp_path / "look" / "check.json").read_text())["ladder"]
    assert facts["stops"] == [f"{rung['name']}: {rung['error']}" for rung in facts["rungs"]]


LADDERS_REFUSED = [
    ("memory sweep=lr", "sweep=lr is not a ladder; finetune check memory estimates one run or the rungs of a ladder."),
    ("memory sweep=packing batching.packing=true", "batching.packing differs between the rungs of sweep=packing."),
    ("memory sweep=packing hardware=rtx3", "hardware=rtx3"),
    ("data sweep=packing", "sweep= is an option of finetune check memory, for ladders."),
]


@pytest.mark.parametrize(("words", "message"), LADDERS_REFUSED, ids=[words for words, _ in LADDERS_REFUSED])
def test_check_of_a_ladder_refused(zygote: Zygote, tmp_path: Path, words: str, message: str) -> None:
    code, _, wrong = look(zygote, tmp_path, *words.split())
    assert code == 2
    assert wrong.startswith(f"error: {message}")


def test_check_models_lists_every_kind_without_torch(zygote: Zygote, tmp_path: Path) -> None:
    code, said, wrong = look(zygote, tmp_path, "models", "output_dir=look")
    assert (code, wrong) == (0, "")
    facts = json.loads((tmp_path / "look" / "check.json").read_text())["models"]
    assert facts["total"] == facts["by_task"]["causal"]["total"] == 189
    assert facts["accepted"] == sum(e["tier"] != "refused" for e in facts["kinds"] if e["task"] == "causal")
    assert facts["accepted"] == facts["total"] - facts["by_task"]["causal"]["refused"]
    tiers = {each["kind"]: each["tier"] for each in facts["kinds"] if each["task"] == "causal"}
    chosen = ("llama", "qwen3_5_text", "nemotron", "bloom", "t5")
    assert [tiers.get(kind) for kind in chosen] == ["packed", "packed", "padded", "own", None]
    assert all(each["reason"] for each in facts["kinds"] if each["tier"] != "packed")
    assert f"{facts['by_task']['causal']['packed']} packed" in said


def test_check_models_of_a_folder_is_its_verdict(zygote: Zygote, tmp_path: Path) -> None:
    assert look(zygote, tmp_path, "models", "model=bert")[::2] == (0, ""), "the rows of the sample are none for it"
    for kind, code in (("gpt2", 0), ("t5", 2)):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "config.json").write_text(json.dumps({"model_type": kind, "n_layer": 1, "num_layers": 1}))
        (tmp_path / kind / "model.safetensors").write_bytes(b"not read")
        found, said, wrong = look(zygote, tmp_path, "models", f"model.path={tmp_path / kind}", f"output_dir=of_{kind}")
        assert found == code
        assert kind in said
        assert wrong.startswith("error: model.path=") == bool(code)
        facts = json.loads((tmp_path / f"of_{kind}" / "check.json").read_text())["models"]
        assert [facts["total"], facts["accepted"]] == [1, 1 if code == 0 else 0]
