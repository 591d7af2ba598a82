"""Ladders: rungs as trials in turns, and their comparison."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.config.conf_files import choices_by_group
from app.config.dataset import has_held_out_rows
from app.config.load import compose_run
from app.config.schema import RunConfig
from app.errors import ConfigError, DataError
from app.pages.ladder_tables import measured_tables
from app.pages.page import Table
from app.sweeps.ladder import LADDER, Ladder, batch_text
from app.sweeps.search_space import Preset, Rung, SweepConfig, read_preset
from app.sweeps.sweep import plan_sweep, read_ladder
from app.sweeps.trials import DRY_RUN, FINISHED, PENDING, REFUSED, STOPPED, Outcome
from tests.config.test_overrides import conf
from tests.harness.composed import composed
from tests.sweeps.test_sweep import nothing_more, refusal_of

assert conf  # a fixture

LADDERS = {n: c for n in choices_by_group()["sweep"] if (c := read_preset([f"sweep={n}"]).config).proposer == LADDER}
NAMES = [name for name, config in LADDERS.items() if not config.planned]
FEW = 4  # rungs of ladders for this tier


@pytest.mark.parametrize("name", [name for name in NAMES if len(LADDERS[name].rungs) <= FEW])
def test_ladder_composes_and_small_makes_ten_steady_steps_of_rows(name: str) -> None:
    """Long ladders in tests/full/sweeps/test_ladders_and_search.py."""
    check_small_ladder(name)


def check_small_ladder(name: str) -> None:
    """From step 3 on; a batch is shown in rows, also where they are packed."""
    for run in check_ladder(name, "small"):
        # those of `packing` have many lengths
        if run.dataset.random.rows and run.dataset.path == "random:" and name != "packing":
            rows = int(batch_text(run).split(" x ")[0]) * run.batching.accumulation * int(run.launch.num_processes)
            assert run.dataset.random.rows * (1 - run.dataset.eval_fraction) / rows > 11


def check_ladder(name: str, size: str) -> Sequence[RunConfig]:
    plan = plan_sweep(["-m", f"sweep={name}", f"sweep.size={size}"], nothing_more)
    rungs = read_preset([f"sweep={name}"]).config.rungs
    refused = [trial.refused for trial in plan.proposer.points if trial.refused]
    assert refused == [rung.reason for rung in rungs.values() if rung.reason]
    assert len(plan.runs) == len(rungs) - len(refused) >= 2
    assert all(has_held_out_rows(run.dataset) for run in plan.runs)
    return plan.runs


@pytest.mark.parametrize("name", [name for name, config in LADDERS.items() if config.planned])
def test_ladder_only_planned_composes_and_is_not_trained(name: str) -> None:
    assert all(compose_run(trial.overrides) for trial in read_ladder([f"sweep={name}"]).points)
    (problem,) = refusal_of(f"sweep={name}")
    assert problem.endswith(f"Run finetune check memory sweep={name} hardware=h100")


def test_ladder_order_of_strength() -> None:
    words = ["-m", "sweep=packing", "sweep.size=small", "dataset.random.rows=40", "seed=3", "output_dir=runs/x"]
    plan = plan_sweep(words, nothing_more)
    assert {(run.dataset.random.rows, run.seed) for run in plan.runs} == {(40, 3)}
    assert [trial.name for trial in plan.proposer.points] == ["1-padded", "2-packed"]
    assert plan.identity != plan_sweep(words[:4], nothing_more).identity


def test_ladder_bert_trains_with_the_claimed_batch_and_rate() -> None:
    for name, rung in LADDERS["bert"].rungs.items():
        given = dict(text.split("=") for text in rung.overrides)
        if given:
            batch, rate = int(given["batching.tokens"]) // 256, given["optimizer.lr"]
            assert (batch, rate) == (rung.claimed["batch"], rung.claimed["rate"]), name


@pytest.mark.parametrize("name", ["bert", "mlm"])
def test_ladder_with_a_dataset_of_the_user_drops_sizes_of_random_rows(name: str) -> None:
    own = (f"sweep={name}", "sweep.size=small", f"dataset={'text' if name == 'mlm' else 'labelled_text'}")
    sampled = (*own, "dataset.path=rows.csv", "dataset.sample=80")
    runs = [compose_run(trial.overrides) for trial in read_ladder(sampled).points if not trial.refused]
    assert {(run.dataset.path, run.dataset.sample, run.dataset.max_length) for run in runs} == {("rows.csv", 80, 256)}
    typed = read_ladder([*sampled, "dataset.random.rows=9"]).points[0].overrides
    with pytest.raises(ConfigError, match=r"^dataset\.random\.rows=9 has no effect without dataset=random"):
        compose_run(typed)


INVALID = [
    ("batching.rows=2", "batching.rows differs between the rungs of sweep=single_gpu. Remove it, or edit a copy of"),
    ("precision=bf16", "precision differs between the rungs of sweep=single_gpu."),
    ("seed=1,2", "seed has several values, but the trials of sweep=single_gpu are its rungs. Set one value."),
    ("sweep.trials=3", "sweep.trials: the rungs of sweep=single_gpu are set in its file. Remove it;"),
    ("sweep.size=tiny", "sweep.size=tiny: expected one of full, small."),
    ("optimizer.lrr=1", "Unknown setting optimizer.lrr."),
    ("sweep=mlm adapter.r=8", "adapter.r=8: recipe=full trains no adapter."),
    ("sweep=lr sweep.size=small", "sweep.size is only for ladders, and sweep=lr has no rungs. Remove it."),
]


@pytest.mark.parametrize(("words", "message"), INVALID, ids=[words for words, _ in INVALID])
def test_ladder_invalid_refused(words: str, message: str) -> None:
    (problem,) = refusal_of("sweep=single_gpu", *words.split())
    assert message in problem


OWN_LADDER = """
proposer: rungs
base: [compile=none]
rungs:
  plain: {}
  compiled: {overrides: [compile=blocks]}
  missing: {overrides: [optimizer=nosuch]}
  faulty: {overrides: [optimizer=sgd]}
  given_up: {reason: not offered}
"""


def test_ladder_rungs_read_some_keys_and_are_refused_alone(conf: Path) -> None:
    def check(run: RunConfig) -> None:
        if run.optimizer.kind == "sgd":
            raise DataError("no such file")

    (conf / "sweep" / "own.yaml").write_text(OWN_LADDER)
    plan = plan_sweep(["-m", "sweep=own", "compile.backend=aot_eager"], check)
    assert [(run.compile.kind, run.compile.backend) for run in plan.runs] == [
        ("none", "inductor"),
        ("blocks", "aot_eager"),
    ]
    (missing, reason), *others = [(trial.name, trial.refused) for trial in plan.proposer.points if trial.refused]
    assert missing == "3-missing"
    assert reason.startswith("optimizer=nosuch: unknown optimizer.")
    assert others == [("4-faulty", "no such file"), ("5-given_up", "not offered")]


BATCHES = ["batching.packing=false", "batching.rows=4"]
SAME, SPLIT_ROWS = [*BATCHES], [*BATCHES, "batching.rows=2", "batching.accumulation=2"]
TWO_PROCESSES = [*BATCHES, "batching.rows=2", "launch.num_processes=2"]
# what the second rung is like; the first has SAME, loss 0.5, held-out loss 1.0, 100 tokens/s
COMPARED = [
    (SPLIT_ROWS, {}, ("equal", 2.0)),
    (SAME, {"loss": 0.51, "eval_loss": 1.019}, ("close", 2.0)),
    (SAME, {"loss": 0.51, "eval_loss": 1.021}, ("no", 2.0)),
    (SAME, {"loss": 0.51, "skipped_steps": 1}, ("no", 2.0)),
    ([*BATCHES, "batching.accumulation=2"], {}, (None, 2.0)),
    ([*BATCHES, "optimizer.lr=3e-3"], {}, (None, 2.0)),
    (SAME, {"depth": 1}, ("equal", None)),
    (SAME, {"others": {"count": 3, "bytes": 2e9}}, ("equal", None)),
    (SAME, {"step_tokens": 150}, ("equal", None)),
    (SAME, {"watts": 300.0}, ("equal", 2.0)),
    (TWO_PROCESSES, {"processes": 2}, ("equal", 2.0)),
    (TWO_PROCESSES, {"processes": 2, "cpus": 2}, ("equal", 2.0)),
    (TWO_PROCESSES, {"processes": 2, "cpus": 1}, ("equal", None)),
]


def finished(folder: Path, number: int, rate: float, **facts: Any) -> Outcome:
    """Return the outcome of a trial with two slow steps, then two at `rate` tokens/s."""
    own = folder / str(number)
    (own / "checkpoints" / "step-000004").mkdir(parents=True)
    progress = {"skipped_steps": facts.get("skipped_steps", 0), "depth": facts.get("depth", 0)}
    (own / "checkpoints" / "step-000004" / "state.json").write_text(json.dumps({"progress": progress}))
    result = {"train_loss_last": facts.get("loss", 0.5), "eval_loss": facts.get("eval_loss", 1.0), "seconds": 4.0}
    result |= {"accuracy": facts.get("accuracy"), "other_processes": facts.get("others")}
    (own / "result.json").write_text(json.dumps({"status": FINISHED, **result}))
    clocks = {"max_sm_mhz": 1665, "sm_mhz": 200 + number, "power_limit_watts": facts.get("watts", 350.0)}
    counts = {"fill": None, "data": {"eval": {"classes": {"good": 6, "bad": 4}}}}
    machine = {"cpus": facts.get("cpus"), "hardware": {"device": "cpu" if "cpus" in facts else "cuda"}}
    machine |= {"choices": {"processes": facts.get("processes", 1)}}
    (own / "manifest.json").write_text(json.dumps({"counts": counts, "clocks": clocks, **machine}))
    size = facts.get("step_tokens", 1000)
    speeds = enumerate((1.0, 1.0, rate, rate), 1)
    lines = [
        {"step": n, "tokens": size * n, "seconds": size / each, "samples_per_second": each / 10} for n, each in speeds
    ]
    (own / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in [*lines, {"step": 4}]))
    share = facts.get("cpu_share", 0.0)
    return Outcome(number=number, overrides=(), swept=(), folder=str(own), status=FINISHED, other_cpu_share=share)


@pytest.mark.parametrize(("overrides", "facts", "expected"), COMPARED)
def test_ladder_second_rung_compared_with_the_first(
    tmp_path: Path, overrides: list[str], facts: dict[str, Any], expected: tuple[str | None, float | None]
) -> None:
    rungs = {"one": Rung(claimed={"samples/s": 8.0}), "two": Rung(claimed={"samples/s": 12.0, "MB": 1234})}
    ladder = Ladder(Preset("mine", SweepConfig(proposer=LADDER, source="a paper", rungs=rungs)), [])
    ladder.check({1: composed(*SAME), 2: composed(*{o.split("=")[0]: o for o in overrides}.values())}, {})
    outcomes = [finished(tmp_path, 1, 100.0), finished(tmp_path, 2, 200.0, **facts)]
    compared = ladder.compared(outcomes)
    first, second = compared["rungs"]
    assert (first["ratio"], first["as_first"], first["tokens_per_second"]) == (1.0, None, 100.0)
    assert (second["as_first"], second["ratio"]) == expected
    speed, results, claimed = (block for part in measured_tables(compared) for block in part.blocks)
    assert isinstance(speed, Table)
    assert isinstance(results, Table)
    assert isinstance(claimed, Table)
    notes = "\n".join(speed.notes)
    assert ("no speed ratio (out of memory, repeated in smaller parts): two" in notes) == ("depth" in facts)
    assert ("no speed ratio (less than 2 s): two" in notes) == ("step_tokens" in facts)
    assert ("no speed ratio (more processes than CPU cores): two" in notes) == (facts.get("cpus") == 1)
    is_scaling = overrides == TWO_PROCESSES and second["ratio"] is not None
    assert second["efficiency"] == (1.0 if is_scaling else None)
    assert ("per process" in speed.head) == is_scaling
    assert ("two: 3 processes used 2.0 GB of the same GPU" in notes) == ("others" in facts)
    assert ("max_sm_mhz 1665 -> 1665, power_limit_watts 350.0 -> 300.0" in notes) == ("watts" in facts)
    assert (
        dict(zip(speed.head, speed.cells[1], strict=True)).items() >= {"samples/s": "20.00", "source": "1.50"}.items()
    )
    assert "accuracy" not in results.head, "no rung has it"
    assert claimed.cells == [["one", "8.0", "-"], ["two", "12.0", "1234"]]
    assert "| two | 12.0 | 1234 |" in claimed.markdown()


def compared(folder: Path, *outcomes: Mapping[str, Any], repeats: int = 1) -> list[dict[str, Any]]:
    """Return the rungs of a ladder whose trials, turn after turn, have these rates and results."""
    rungs = {f"rung{number}": Rung() for number in range(len(outcomes) // repeats)}
    config = SweepConfig(proposer=LADDER, rungs=rungs, repeats=repeats)
    ladder = Ladder(Preset("mine", config), [])
    ladder.check({number: composed(*SAME) for number in range(1, len(rungs) + 1)}, {})
    trials = [finished(folder, number, **facts) for number, facts in enumerate(outcomes, 1)]
    return list(ladder.compared(trials)["rungs"])


def test_ladder_repeated_rungs_have_medians_and_spread(tmp_path: Path) -> None:
    rates = (100.0, 150.0, 90.0, 130.0, 110.0, 80.0)
    first, second = compared(tmp_path, *({"rate": rate} for rate in rates), repeats=3)
    assert (first["tokens_per_second"], second["tokens_per_second"]) == (100.0, 130.0)
    assert (first["repeats"], first["spread"], second["spread"]) == (3, pytest.approx(0.2), pytest.approx(7 / 13))
    assert (second["ratio"], second["is_noise"]) == (1.3, True)
    (speed, *_) = measured_tables({"source": "", "rungs": [first, second]})
    (table,) = speed.blocks
    assert isinstance(table, Table)
    assert table.cells[1][table.head.index("x first")] == "~1.30"


def test_ladder_turns_run_all_rungs_before_any_again_and_keep_refusals() -> None:
    plan = plan_sweep(["-m", "sweep=packing", "sweep.repeats=2"], nothing_more)
    proposer, done = plan.proposer, list[Outcome]()
    statuses = iter([(FINISHED, None), (REFUSED, "not here"), (FINISHED, None), (REFUSED, "not here")])
    names = []
    while trial := proposer.next(done):
        status, error = next(statuses)
        names.append((trial.number, trial.name, trial.refused))
        done.append(Outcome(number=trial.number, overrides=(), swept=(), folder="", status=status, error=error))
    assert names == [
        (1, "1-padded", None),
        (2, "2-packed", None),
        (3, "1-padded-2", None),
        (4, "2-packed-2", "not here"),
    ]
    assert [trial.name for trial in proposer.recall([])] == [name for _, name, _ in names]
    more = plan_sweep(["-m", "sweep=packing", "sweep.repeats=3"], nothing_more)
    assert more.identity == plan.identity, "repeats can be added"


def test_ladder_stopped_in_the_second_turn_has_the_results_of_the_first(tmp_path: Path) -> None:
    rungs = {"one": Rung(), "two": Rung()}
    ladder = Ladder(Preset("mine", SweepConfig(proposer=LADDER, rungs=rungs)), [])
    ladder.check({number: composed(*SAME) for number in (1, 2)}, {})
    trials = [finished(tmp_path, number, 100.0) for number in (1, 2)]
    unfinished = [
        replace(trial, number=number, status=status)
        for trial, number, status in zip(trials, (3, 4), (STOPPED, PENDING), strict=True)
    ]
    compared_rungs = ladder.compared([*trials, *unfinished])["rungs"]
    assert [(rung["status"], rung["repeats"]) for rung in compared_rungs] == [("finished", 1)] * 2


def test_ladder_dry_run_has_one_turn() -> None:
    proposer = plan_sweep(["-m", "sweep=packing"], nothing_more).proposer
    plans = [Outcome(number=n, overrides=(), swept=(), folder="", status=DRY_RUN) for n in (1, 2)]
    assert proposer.next(plans) is None


def test_ladder_rung_learns_within_two_points_of_the_first_and_above_a_constant_answer(tmp_path: Path) -> None:
    accuracies = (0.9, 0.885, 0.87, 0.61)
    rungs = compared(tmp_path / "good", *({"rate": 1.0, "accuracy": accuracy} for accuracy in accuracies))
    assert [rung["learns"] for rung in rungs] == ["yes", "yes", "no", "no"]
    rungs = compared(tmp_path / "chance", *({"rate": 1.0, "accuracy": 0.6} for _ in range(2)))
    assert [rung["learns"] for rung in rungs] == ["no", "no"]


def test_ladder_other_programs_on_the_cpu_are_noted(tmp_path: Path) -> None:
    quiet, busy = compared(tmp_path, {"rate": 10.0, "cpu_share": 0.05}, {"rate": 20.0, "cpu_share": 0.6})
    assert (quiet["disturbances"], busy["disturbances"]) == ([], ["other programs used 60% of the CPU"])
    assert busy["ratio"] == 2.0
