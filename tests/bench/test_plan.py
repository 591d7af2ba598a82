"""Plans of measurement sessions: what they name must exist before GPU time is spent."""

from pathlib import Path

import pytest

from app.config.load import compose_run
from scripts.bench.contest import run_of
from scripts.bench.frameworks import split_settings
from scripts.bench.plan import Item, Plan, read_plan
from tests.conftest import REPO

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
