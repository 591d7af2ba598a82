"""Benchmark scripts: clocks, profiled operations, shapes, plans, tables, documents."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from app.config.load import compose_run
from app.model.build import count_weights
from app.training.auto_settings import Choices, sections_of
from scripts.bench.contest import Contest, run_of
from scripts.bench.frameworks import split_settings
from scripts.bench.gauge import Gauge
from scripts.bench.kernels import class_of, kernels_of
from scripts.bench.loops import BINS, PACKED, PADDED, positions_in
from scripts.bench.machine import Clock, mfu
from scripts.bench.plan import Item, Plan, read_plan
from scripts.bench.table import BEGIN, END, groups, rates, ratios, report
from scripts.bench.workload import FIRST_ID, MIXES, digest, documents, sizes_of, workload
from tests.conftest import REPO

CUDA = torch.device("cuda")
OTHERS = 5_000_000_000
MEASURED = ("sm_mhz", "watts", "celsius")


def driver() -> Any:
    clocks = iter([1980, 1500, *[1740] * 1000])
    return SimpleNamespace(
        NVMLError=ZeroDivisionError,
        NVML_CLOCK_SM=1,
        NVML_TEMPERATURE_GPU=0,
        nvmlMemory_v2=2,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: {"GPU-7": "gpu"}[uuid],
        nvmlDeviceGetMemoryInfo=lambda gpu, version: SimpleNamespace(used=OTHERS),
        nvmlDeviceGetClockInfo=lambda gpu, clock: next(clocks),
        nvmlDeviceGetPowerUsage=lambda gpu: 700_000,
        nvmlDeviceGetTemperature=lambda gpu, sensor: 61,
        nvmlDeviceGetComputeRunningProcesses=lambda gpu: [
            SimpleNamespace(pid=1, usedGpuMemory=5),
            SimpleNamespace(pid=os.getpid(), usedGpuMemory=9),
        ],
    )


@pytest.fixture
def gauge(monkeypatch: pytest.MonkeyPatch) -> Gauge:
    monkeypatch.setitem(sys.modules, "pynvml", driver())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(uuid="7"))
    return Gauge(CUDA)


def test_gauge_samples_until_it_is_stopped(gauge: Gauge) -> None:
    gauge.start()
    time.sleep(0.25)
    gauge.stop()
    facts = gauge.facts()
    time.sleep(0.15)
    assert gauge.facts() == facts
    assert facts["samples"] >= 2
    assert facts["sm_mhz"] == pytest.approx((1980 + 1500 + 1740 * (facts["samples"] - 2)) / facts["samples"], abs=0.1)
    assert (facts["watts"], facts["celsius"]) == (700, 61)
    assert (facts["others_bytes"], facts["alone"]) == (OTHERS, False)
    assert gauge.own_bytes() == 9


def test_gauge_without_driver_reports_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    for device in (CUDA, torch.device("cpu")):
        gauge = Gauge(device)
        gauge.start()
        gauge.stop()
        assert all(value is None for key, value in gauge.facts().items() if key != "samples")
        assert gauge.own_bytes() is None


RANK, KERNEL_VOCABULARY = 16, 1536


@pytest.mark.parametrize(
    ("name", "shapes", "expected"),
    [
        ("aten::mm", [[16384, 4096], [4096, 14336]], "base products"),
        ("aten::mm", [[16384, 4096], [4096, 48]], "thin products"),
        ("aten::addmm_", [[16384, 4096], [16384, 16], [16, 4096], []], "thin products"),
        ("aten::mm", [[512, 4096], [4096, KERNEL_VOCABULARY]], "head products"),
        ("bitsandbytes::gemm_4bit", [[16384, 4096], [29360128, 1], [2]], "base products"),
        ("bitsandbytes::dequantize_4bit", [[29360128, 1]], "quantize"),
        ("torch_attn::_varlen_attn", [[16384, 32, 128]], "attention"),
        ("aten::_flash_attention_backward", [[16384, 32, 128]], "attention"),
        ("triton_poi_fused_addmm_varlen_attn_mul_4", [[16384, 4096]], "element-wise"),
        ("triton_red_fused_mm_mean_3", [[16384, 4096]], "normalisations"),
        ("triton_tem_fused_mm_0", [[16384, 4096], [4096, 16]], "thin products"),
        ("aten::copy_", [[16, 4096], [16, 4096]], "copies"),
    ],
)
def test_class_of_operation(name: str, shapes: list[list[int]], expected: str) -> None:
    assert class_of(name, shapes, RANK, KERNEL_VOCABULARY) == expected


def test_kernels_of_profile_tells_products_apart() -> None:
    x, base, thin, head = (torch.randn(shape) for shape in ((8, 24), (24, 40), (24, RANK), (24, KERNEL_VOCABULARY)))
    with torch.profiler.profile(record_shapes=True) as profiler:
        for weight in (base, base, thin, head):
            x @ weight
        torch._foreach_add([x, x], 1.0)
    kernels = kernels_of(profiler, replace(CONTEST, rank=RANK), KERNEL_VOCABULARY)
    products = {
        row["shapes"]: (row["class"], row["calls"]) for row in kernels["operations"] if row["name"] == "aten::mm"
    }
    assert products == {
        "8x24 24x40": ("base products", 2),
        f"8x24 24x{RANK}": ("thin products", 1),
        f"8x24 24x{KERNEL_VOCABULARY}": ("head products", 1),
    }
    seconds = [row["seconds"] for row in kernels["operations"]]
    assert seconds == sorted(seconds, reverse=True)
    assert sum(kernels["classes"].values()) == pytest.approx(sum(seconds), abs=1e-5)
    assert kernels["kernels"] == [], "there are no kernels on a CPU"


def test_clock_separates_warm_up_and_steps() -> None:
    clock = Clock(torch.device("cpu"), warm_up=2, steps=2)
    clock.begin()
    for pause in (0.05, 0.0, 0.1, 0.1):
        time.sleep(pause)
        clock.mark(torch.tensor(pause))
    assert clock.losses == pytest.approx([0.05, 0, 0.1, 0.1])
    assert clock.first_step >= 0.05
    assert len(clock.step_seconds) == 2
    assert all(seconds >= 0.1 for seconds in clock.step_seconds)
    assert 0 <= clock.cpu_seconds < 0.2, "sleeping uses no CPU"


@pytest.mark.parametrize(("shape", "billions"), [("llama_1b", 1.236), ("llama_8b", 8.030), ("llama_70b", 70.554)])
def test_shapes_have_weights_of_their_models(shape: str, billions: float) -> None:
    run = run_of(replace(CONTEST, model=shape, method="full", settings=()))
    sections = sections_of(run, Choices(precision="bf16", attention="sdpa"))
    assert count_weights(sections).total == pytest.approx(billions * 1e9, rel=1e-3)
    assert run.model.weights == "random"


def test_mfu_counts_four_or_six_operations_a_weight() -> None:
    assert mfu(CONTEST, 1_000_000, 1e6, 8.0) == pytest.approx(0.5)
    assert mfu(replace(CONTEST, method="full"), 1_000_000, 1e6, 8.0) == pytest.approx(0.75)
    assert mfu(CONTEST, 1_000_000, 1e6, None) is None


PLANS = sorted((REPO / "scripts" / "bench" / "plans").glob("*.yaml"))
COMMON = "{model: tiny, method: lora, precision: bf16, mix: chat, length: 64, tokens_per_step: 128, accumulation: 1, \
steps: 2, warm_up: 1, seed: 0, threads: 8, recompute: false, rank: 16, peak_tflops: null, settings: [seed=3]}"


def plan(tmp_path: Path, turns: str, *, tiny: bool = False, beside: str = "{limit: 9, items: []}") -> Plan:
    file = tmp_path / "plan.yaml"
    file.write_text(f"contest: {COMMON}\nbeside: {beside}\nturns: {{limit: 30, items: [{turns}]}}\n")
    return read_plan(file, "cpu", tiny=tiny)


def contests(session: Plan) -> list[Item]:
    return [item for item in (*session.beside, *session.turns) if item.contest]


@pytest.mark.parametrize("tiny", [False, True])
@pytest.mark.parametrize("file", PLANS, ids=lambda file: file.stem)
def test_shipped_plan_contests_compose(file: Path, tiny: bool) -> None:
    session = read_plan(file, "cuda", tiny=tiny)
    for item in contests(session):
        assert item.contest
        run_of(item.contest, split_settings(item.contest.framework)[1])
    names = [item.name for item in session.turns]
    assert len(names) == len(set(names)) or tiny
    assert session.repeated
    assert session.repeated.name == f"{contests(Plan([], session.turns))[0].name}, repeated"


def test_mission_fits_one_call_with_the_recipes_first() -> None:
    turns = read_plan(REPO / "scripts" / "bench" / "plans" / "mission.yaml", "cuda", tiny=False).turns
    assert turns[0].name == "ladder recipes"
    assert sum(item.seconds for item in turns) <= 540


def test_mission_70b_contest_equals_preset() -> None:
    (item,) = contests(read_plan(REPO / "scripts" / "bench" / "plans" / "mission.yaml", "cuda", tiny=False))
    assert item.contest
    run = run_of(item.contest)
    preset = compose_run(["experiment=llama_70b_small", "dataset=messages", "dataset.path=none.jsonl"])
    for section, keys in (("batching", ("tokens",)), ("training", ("recompute", "offload")), ("adapter", ("r",))):
        for key in keys:
            assert getattr(getattr(run, section), key) == getattr(getattr(preset, section), key), key
    assert run.optimizer.kind == preset.optimizer.kind


def test_item_settings_extend_those_of_phase(tmp_path: Path) -> None:
    beside = "{limit: 9, contest: {threads: 2}, items: [{framework: ours, settings: [a=b], seconds: 3, limit: 4}]}"
    session = plan(
        tmp_path, "{framework: ours, seconds: 5}, {name: a, command: 'echo {device}', seconds: 1}", beside=beside
    )
    (first,), (second, command) = session.beside, session.turns
    assert first.contest
    assert second.contest
    assert (first.contest.settings, first.contest.threads, first.limit) == (("seed=3", "a=b"), 2, 4)
    assert (second.contest.settings, second.contest.threads, second.limit) == (("seed=3",), 8, 30)
    assert (command.command, command.threads) == (("echo", "{device}"), 8)


def test_tiny_plan_has_small_shapes_and_no_cpp_compiler(tmp_path: Path) -> None:
    session = plan(tmp_path, "{framework: 'ours:compile=blocks', model: llama_8b, seconds: 50}", tiny=True)
    (contest,) = [item.contest for item in session.turns]
    assert contest
    assert (contest.model, contest.precision) == ("tiny", "fp32")
    assert contest.framework == "ours:compile=blocks,compile.backend=aot_eager"


def test_plan_problems_are_named_together(tmp_path: Path) -> None:
    turns = "{framework: their, model: gpt, seconds: 1}, {framework: ours, step: 3}, {command: 'true', seconds: 2}"
    with pytest.raises(SystemExit) as refused:
        plan(tmp_path, turns)
    message = str(refused.value)
    for words in ("item 1: framework their", "item 1: model gpt", "missing: seconds", "unknown: step", "missing: name"):
        assert words in message
    with pytest.raises(SystemExit, match="has the keys limit, items"):
        plan(tmp_path, "", beside="{items: []}")


def test_plan_that_is_no_mapping_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text("- turns\n")
    with pytest.raises(SystemExit, match="a plan has the keys contest, beside and turns"):
        read_plan(file, "cpu", tiny=False)


def line(framework: str, rate: float, **other: Any) -> dict[str, Any]:
    return {
        "framework": framework,
        "model": "tiny",
        "method": "lora",
        "device": "cpu",
        "precision": "fp32",
        "mix": "chat",
        "length": 512,
        "tokens_per_step": 2048,
        "accumulation": 1,
        "recompute": False,
        "rank": 16,
        "threads": 1,
        "settings": [],
        "workload": "w",
        "steps": 8,
        "turn": 0,
        "tokens_per_second": rate,
        "cpu_seconds": 1e4 / rate,
        "losses": [7.0, 6.0],
        "fill": 0.98,
        "peak_memory_bytes": 2**30,
        "mfu": None,
        "first_step_seconds": 0.5,
        "hardware": {"name": "CPU"},
        "versions": {"torch": "2.13"},
        "commit": "c" * 40,
        **other,
    }


ROUNDS = [line("ours", 100.0), line("trl", 40.0), line("ours", 120.0), line("trl", 50.0), line("ours", 90.0)]


def cells(text: list[str], name: str) -> list[str]:
    (row,) = [each for each in text if each.startswith(f"| `{name}`")]
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_report_takes_median_of_rounds() -> None:
    (group,) = groups(ROUNDS)
    assert rates(group) == {"ours": 100.0, "trl": 45.0}
    assert ratios(group) == pytest.approx({"ours": 1.0, "trl": (100 / 40 + 120 / 50) / 2})
    text = report(ROUNDS)
    assert cells(text, "ours")[:5] == ["`ours`", "100", "90 to 120", "1.00", "1.00"]
    assert cells(text, "trl")[1:5] == ["45", "40 to 50", "2.45", "2.45"]
    assert "- at least 2.5 times TRL, packed: 2.45, **missed**" in text
    assert not any("bare loop" in row for row in text), "it was not measured"


def test_ratios_are_taken_within_turns() -> None:
    lines = [line("ours", 100.0), line("trl", 50.0), line("ours", 10.0), line("trl", 5.0)]
    assert ratios(lines) == {"ours": 1.0, "trl": 2.0}
    assert ratios(lines[1:2]) == {}


def test_groups_separate_different_work() -> None:
    apart = [
        line("trl", 1.0, **other)
        for other in ({"workload": "v"}, {"threads": 2}, {"method": "full"}, {"settings": ["a=b"]})
    ]
    assert len(groups([*ROUNDS, *apart, line("trl", 1.0, hardware={"name": "another"})])) == 6


def test_report_names_losses_that_differ() -> None:
    assert "losses agree" in "".join(report(ROUNDS))
    text = report([*ROUNDS, line("plain", 50.0, losses=[7.0, 6.1])])
    assert "DO NOT AGREE" in "".join(text)
    assert cells(text, "plain")[-1] == "2e-02"


def test_report_names_failures_once() -> None:
    failed = {"framework": "unsloth", "model": "tiny", "method": "lora", "error": "needs a GPU"}
    text = report([*ROUNDS, failed, failed, {"stage": "micro", "item": "gemm", "error": "exit code 1"}])
    assert text[-4:] == ["", "- unsloth tiny lora: needs a GPU", "- micro gemm: exit code 1", ""]


def test_table_runs_as_script(tmp_path: Path) -> None:
    file, document = tmp_path / "found.jsonl", tmp_path / "cpu.md"
    file.write_text("".join(json.dumps(each) + "\n" for each in ROUNDS))
    document.write_text(f"{BEGIN}\n{END}\n")
    script = [sys.executable, str(REPO / "scripts" / "bench" / "table.py"), str(file)]
    subprocess.run([*script, "--into", str(document)], cwd=tmp_path, check=True)
    assert "| `ours` | 100 |" in document.read_text()
    printed = subprocess.run(script, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert "| `trl` | 45 |" in printed


VOCABULARY = 1536
CONTEST = Contest(
    framework="ours",
    model="tiny",
    method="lora",
    device="cpu",
    precision="fp32",
    mix="chat",
    length=512,
    tokens_per_step=4096,
    accumulation=2,
    steps=5,
    warm_up=1,
    seed=3,
    threads=1,
    recompute=False,
    rank=16,
    peak_tflops=None,
    settings=("a=b",),
)


@pytest.mark.parametrize("mix", MIXES)
def test_workload_bins_are_nearly_full(mix: str) -> None:
    contest = replace(CONTEST, mix=mix)
    steps = workload(contest, VOCABULARY)
    assert [len(step) for step in steps] == [2] * 6
    filled = [sum(map(len, packed)) for step in steps for packed in step]
    assert max(filled) <= contest.bin_tokens
    assert np.mean(filled) > 0.98 * contest.bin_tokens
    assert max(map(len, documents(steps))) <= contest.length


def test_workload_depends_on_seed_alone() -> None:
    steps = workload(CONTEST, VOCABULARY)
    assert digest(steps) == digest(workload(CONTEST, VOCABULARY))
    assert digest(steps) != digest(workload(replace(CONTEST, seed=4), VOCABULARY))
    more = workload(replace(CONTEST, steps=9), VOCABULARY)
    assert digest(more[:6]) == digest(steps), "more steps would change the first ones"


def test_workload_has_known_ids_and_untrained_prompts() -> None:
    steps = workload(CONTEST, VOCABULARY)
    ids = np.concatenate([each.ids for each in documents(steps)])
    assert ids.min() >= FIRST_ID
    assert ids.max() < VOCABULARY
    assert not any(each.trained[0] for each in documents(steps))
    sizes = sizes_of(steps)
    assert sizes.tokens == len(ids)
    assert sizes.trained / sizes.tokens == pytest.approx(0.4, abs=0.01)
    counts = np.sort(np.bincount(ids))[::-1]
    assert counts[0] > 5 * counts[100], "all tokens are alike: there is nothing to learn"


def test_positions_in_counts_padding_of_layout() -> None:
    step = workload(CONTEST, VOCABULARY)[0]
    tokens = sizes_of([step]).tokens
    assert positions_in(step, BINS, CONTEST.bin_tokens) == 4096
    assert positions_in(step, PACKED, CONTEST.bin_tokens) == tokens
    assert positions_in(step, PADDED, CONTEST.bin_tokens) == sum(len(b) * max(map(len, b)) for b in step)
