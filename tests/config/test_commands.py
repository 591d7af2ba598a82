"""Command lines of finetune generate, finetune report and finetune check; supported platforms."""

import re
from pathlib import Path

import pytest

from app.board import BOARD
from app.config.arguments import split_arguments
from app.config.commands import (
    GENERATE,
    REPORT,
    AnswersConfig,
    all_hardware,
    check_config,
    class_problems,
    folders_in,
    hardware_names,
    require_platform,
)
from app.config.finished_run import EVALUATE, EXPORT, REPRODUCE
from app.config.load import compose_run, named_model
from app.convert import CONVERT
from app.errors import ConfigError, EnvironmentProblem


@pytest.mark.parametrize("machine", ["x86_64", "aarch64", ""])
def test_platform_linux_accepted(machine: str) -> None:
    require_platform("Linux", machine)


@pytest.mark.parametrize(
    ("system", "machine", "words"),
    [
        ("Windows", "AMD64", "WSL 2"),
        ("Darwin", "arm64", "macOS is not supported"),
        ("FreeBSD", "amd64", "FreeBSD is not supported"),
        ("Linux", "riscv64", "Linux on riscv64 is not supported"),
    ],
)
def test_platform_other_refused(system: str, machine: str, words: str) -> None:
    with pytest.raises(EnvironmentProblem, match=words):
        require_platform(system, machine)


# ---- where results go


@pytest.mark.parametrize("name", ["to", "output_dir", "output"])
def test_target_synonyms_accepted(name: str) -> None:
    assert compose_run([*split_arguments([f"{name}=runs/x"])[0]]).output_dir == "runs/x"
    assert check_config(["data", f"{name}=runs/x"]).folder == Path("runs/x")
    assert GENERATE.parse(["run=r", "prompts=a.jsonl", f"{name}=b.jsonl"]).output == "b.jsonl"
    assert REPORT.parse(["run=r", f"{name}=b.html"]).to == "b.html"
    assert CONVERT.parse(["axo.yaml", f"{name}=b.yaml"]).to == "b.yaml"
    assert EXPORT.read(["run=r", f"{name}=b"]).options["to"] == "b"
    for command in (EVALUATE, REPRODUCE):
        assert command.read(["run=r", f"{name}=b"]).settings["output_dir"] == "b"


def test_target_synonym_of_a_command_without_results_is_unknown() -> None:
    with pytest.raises(ConfigError, match="Unknown setting to"):
        BOARD.parse(["runs/", "to=x"])


# ---- finetune generate


def test_generate_prompt_needs_no_quotes() -> None:
    prompt = "a=b, c: ${HOME} 'x' \"y\" [z] \\n"
    config = GENERATE.parse([f"prompt={prompt}", "run=r", "system=null"])
    assert (config.prompt, config.system, config.temperature) == (prompt, None, 0.0)
    assert GENERATE.parse(["run=r", "prompt=~42 degrees"]).prompt == "~42 degrees"
    assert GENERATE.parse(["run=r", "launch.threads=2"]).launch.threads == 2


def test_generate_all_problems_together() -> None:
    with pytest.raises(ConfigError) as refusal:
        GENERATE.parse(["rum=r", "temperature=-1", "seed=x", "chat=perhaps", "launch.threads=0", "launch.thread=1"])
    assert refusal.value.problems == (
        "Unknown setting rum. Did you mean run?",
        "chat=perhaps: expected true or false or null.",
        "temperature=-1.0 must be at least 0.",
        "seed=x: expected a whole number.",
        "Unknown setting launch.thread. Did you mean launch.threads?",
        "launch.threads=0 must be at least 1 and at most 1024.",
    )
    with pytest.raises(ConfigError, match=r"Unrecognized argument 'hello'. Options are key=value: run, checkpoint, "):
        GENERATE.parse(["hello"])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("run=a", "second=b"), "second is the second text of a pair. Set prompt=TEXT for the first"),
        (("run=a", "output=b"), "output=b needs prompts=FILE"),
        (("model=a", "adapter=false"), "adapter=false: model=a has no adapter."),
        (("run=a", "beams=2"), "beams=2 is not supported in a chat, because beam search cannot stream."),
        (("model=a", "top_k=3"), "top_p and top_k have no effect with temperature=0 (greedy decoding)."),
    ],
)
def test_generate_idle_options_refused(words: tuple[str, ...], told: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        GENERATE.parse(words)
    assert told in str(refusal.value)


@pytest.mark.parametrize(
    ("words", "pair", "told"),
    [
        (("prompt=x", "beams=2"), False, "beams would have no effect: run=r was trained with"),
        (("prompt=x", "temperature=0.5"), False, "temperature would have no effect: run=r was trained with"),
        (("prompt=x",), True, "run=r was trained on text pairs: also set second=TEXT."),
        (("prompt=x", "second=y"), False, "run=r was trained on single texts: leave second out."),
        ((), False, "which predicts labels and cannot chat."),
    ],
)
def test_generate_idle_options_of_a_classifier_refused(words: tuple[str, ...], pair: bool, told: str) -> None:
    (problem,) = class_problems(GENERATE.parse(("run=r", *words)), "r", pair)
    assert told in problem


def test_generate_model_names_as_in_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert [named_model(name).path for name in ("tiny", "Qwen/Qwen3-8B")] == ["asset:tiny", "Qwen/Qwen3-8B"]
    (tmp_path / "tiny").mkdir()
    for name, told in (("folder", "has no path"), ("tiny", "Set model=./tiny or model=asset:tiny.")):
        with pytest.raises(ConfigError, match=told):
            named_model(name)


def test_option_without_key_missing_shows_example() -> None:
    for command, example in ((CONVERT, "finetune convert config.yml to=mine.yaml"), (BOARD, "finetune board")):
        with pytest.raises(ConfigError, match=re.escape(f"{command.bare}= is required, e.g. {example}")):
            command.parse([])


# ---- finetune report


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "run= is required, e.g. run=DIR, sweep=DIR or runs=DIR1,DIR2."),
        (("run=a", "sweep=b"), "run=a and sweep=b both select a report. Keep one."),
        (("run=a", "runs=b,c"), "run=a and runs=b,c both select a report. Keep one."),
        (("runs=a",), "runs=a: a comparison needs at least two folders. For one run set run=DIR."),
        (("run=~no-user/a",), "run=~no-user/a: unknown user no-user. Write the full path, or ./~no-user/a."),
        (("run=",), "run= is empty. Set a value, or run=null."),
        (("runs/mine",), "Unrecognized argument 'runs/mine'. Options are key=value: run, sweep, runs, to."),
        (("rnu=a",), "Unknown setting rnu. Did you mean run?"),
    ],
)  # fmt: skip
def test_report_without_one_subject_refused(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        REPORT.parse(words)
    assert refusal.value.problems == (said,)


def test_report_target_default() -> None:
    assert REPORT.parse(["run=runs/mine"]).target == Path("runs/mine/report.html")
    assert REPORT.parse(["sweep=s"]).target == Path("s/report.html")
    assert REPORT.parse(["runs=a,b"]).target == Path("comparison.html")
    assert REPORT.parse(["run=a", "to=~/x.html"]).target == Path("~/x.html").expanduser()


def test_report_folder_names_with_commas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("1-lr=1,r=2", "2-lr=1,r=4", "plain"):
        (tmp_path / name).mkdir()
    assert folders_in("1-lr=1,r=2,plain,2-lr=1,r=4") == ["1-lr=1,r=2", "plain", "2-lr=1,r=4"]
    assert folders_in("plain,absent,1-lr=1,r=2") == ["plain", "absent", "1-lr=1,r=2"]
    folders = REPORT.parse(["runs=1-lr=1,r=2,plain"]).folders
    assert folders == [("runs=1-lr=1,r=2", Path("1-lr=1,r=2")), ("runs=plain", Path("plain"))]


# ---- finetune check


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as refused:
        check_config(words)
    return " ".join(refused.value.problems)


UNPUBLISHED = ("dgx_spark",)  # rates


def test_hardware_facts_plausible() -> None:
    table = {hardware.name: hardware for hardware in all_hardware()}
    assert list(table) == hardware_names()
    assert "auto" not in table
    for name, hardware in table.items():
        assert 7 < hardware.memory_gib < 300, name
        assert 200 < hardware.bandwidth_gb < 20_000, name
        half = hardware.bf16_tflops or hardware.fp16_tflops or 0
        assert 20 < half < 5_000 or name in UNPUBLISHED, name
        assert hardware.before_ampere == (hardware.fp16_tflops is not None), name
        assert hardware.fp8_tflops is None or 1.5 < hardware.fp8_tflops / half < 2.5, name
        assert hardware.tf32_tflops is None or 1.9 < half / hardware.tf32_tflops < 2.1, name
        assert hardware.fp32_tflops is None or hardware.fp32_tflops < half, name
        has_fp8 = hardware.capability is None or tuple(map(int, hardware.capability.split("."))) >= (8, 9)
        assert has_fp8 == (hardware.fp8_tflops is not None) or name in UNPUBLISHED, name
        assert hardware.names, name
    for nominal in (
        8,
        11,
        12,
        16,
        24,
        32,
        40,
        48,
        80,
        141,
        192,
    ):  # of each size there is one, a bit less than it is sold as
        assert any(0.85 * nominal < each.memory_gib < 1.01 * nominal for each in table.values()), nominal


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("precision=bf16", "hardware=t4 has 7.5. Set precision=fp16, or leave precision out."),
        ("precision=tf32", "precision=tf32 needs an NVIDIA GPU of compute capability 8.0"),
        ("attention=varlen", "Set attention=sdpa, or leave attention out."),
    ],
)
def test_settings_of_newer_gpus_are_refused_before_ampere(words: str, message: str) -> None:
    assert message in refusal("memory", words, "hardware=t4")
    assert check_config(["memory", words, "hardware=rtx3060"]).options.hardware is not None


def test_check_hardware_with_overrides() -> None:
    found = check_config(["memory", "hardware=h100", "hardware.memory_gib=70.5", "seed=3", "exact=true"])
    hardware = found.options.hardware
    assert hardware is not None
    assert (hardware.name, hardware.memory_gib, hardware.label) == ("h100", 70.5, "H100")
    assert (found.run.seed, found.overrides, found.options.exact) == (3, ("seed=3",), True)
    unmeasured = check_config(["memory", "hardware=h100", "hardware.context_gib=null"]).options.hardware
    assert unmeasured is not None
    assert unmeasured.context_gib is None
    assert check_config(["memory"]).options.hardware is None
    assert check_config(["hardware=auto"]).options.hardware is None
    assert (check_config([]).checks, check_config(["data"]).checks) == (("data", "memory"), ("data",))


def test_check_fp8_without_support_refused() -> None:
    for name, has in (("a100", "8.0"), ("mi300x", "none")):
        told = refusal("memory", "quantization=fp8", f"hardware={name}")
        assert told.startswith("quantization.kind=fp8 needs an NVIDIA GPU of compute capability 8.9 or higher, and")
        assert f"hardware={name} has {has}" in told
        assert "choose one of b200, dgx_spark, h100, h200, l4, l40," in told
    for name in ("h200", "rtx4090"):
        assert check_config(["memory", "quantization=fp8", f"hardware={name}"]).run.quantization.kind == "fp8"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("memory", "hardware=h10"), "hardware=h10: unknown hardware. Did you mean h100?"),
        (("memory", "hardware=h100", "hardware.memory_gb=3"), "Did you mean hardware.memory_gib?"),
        (("memory", "hardware=h100", "hardware.memory_gib=much"), "hardware.memory_gib=much: expected a number."),
        (("memory", "hardware=h100", "hardware.memory_gib=0"), "hardware.memory_gib=0.0 must be above 0"),
        (("memory", "hardware.memory_gib=3"), "hardware.memory_gib needs hardware=NAME."),
        (("memory", "exactt=true"), "Unknown setting exactt. Did you mean exact?"),
        (("memory", "exact=perhaps"), "exact=perhaps: expected true or false."),
        (("memory", "exactt=true", "sed=1", "hardware=h10"), "Did you mean seed? hardware=h10:"),
        (("memory", "answers.row=4"), "Unknown setting answers.row. Did you mean answers.rows?"),
        (("memory", "answers.rows=0"), "answers.rows=0 must be at least 1."),
        (("data", "answers.rows=2"), "answers.rows=2 is an option of finetune check memory."),
        (("memory", "answers.rows=2", "task=masked", "dataset=text", "dataset.path=x.txt"),
         "answers: task=masked does not generate text. Leave it out, or set task=causal."),
        (("data", "hardware=h100"), "hardware=h100 is an option of finetune check memory."),
        (("data", "rows=2", "exact=true"), "rows=2 is an option of finetune check quantization. Leave it out."),
        (("data", "rows=2", "exact=true"), "exact=true is an option of finetune check memory. Leave it out."),
        (("quantization", "rows=-1"), "rows=-1 must be at least 0."),
        (("memori",), "Unknown check 'memori'. Did you mean memory? Choose one of data, memory, clu"),
        (("data", "--cfg", "job"), "--cfg job is an option of finetune train. Leave it out."),
    ],
)  # fmt: skip
def test_check_invalid_arguments_refused(words: tuple[str, ...], told: str) -> None:
    assert told in refusal(*words)


def test_check_answers_are_asked_for_by_any_of_their_keys() -> None:
    config = check_config(["memory", "+exact=true", "answers.length=100", "answers.beams=2"])
    assert (config.options.exact, config.options.answers) == (True, AnswersConfig(rows=8, length=100, beams=2))
    assert check_config(["memory"]).options.answers is None


def test_check_models_needs_no_rows_that_fit() -> None:
    for word in ("recipe=dpo", "model=bert"):
        assert check_config(["models", word]).checks == ("models",)


def test_train_hardware_key_refused() -> None:
    with pytest.raises(ConfigError, match=r"finetune check memory hardware=h100"):
        compose_run(["hardware=h100"])
