"""Proposers of trials: ladders and optuna's search."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from app.config.conf_files import choices_by_group
from app.config.dataset import has_held_out_rows
from app.config.load import compose_run
from app.config.schema import RunConfig
from app.errors import ConfigError, DataError
from app.pages.comparison_page import measured_tables
from app.pages.page import Table
from app.sweeps.proposers import LADDER, STARTUP_TRIALS, Ladder, Search, batch_text
from app.sweeps.search_space import Preset, Rung, SweepConfig, dimensions_in, read_preset, settings_of
from app.sweeps.sweep import plan_sweep, read_ladder
from app.sweeps.trials import DRY_RUN, FAILED, FINISHED, RUNNING, Outcome, Trial, values_of
from tests.config.test_overrides import conf
from tests.harness.composed import composed
from tests.sweeps.test_sweep import nothing_more, refusal_of

assert conf  # a fixture

LADDERS = {n: c for n in choices_by_group()["sweep"] if (c := read_preset([f"sweep={n}"]).config).proposer == LADDER}
NAMES = [name for name, config in LADDERS.items() if not config.planned]
FEW = 4  # rungs of ladders for this tier


@pytest.mark.parametrize("name", [name for name in NAMES if len(LADDERS[name].rungs) <= FEW])
def test_ladder_composes_and_small_makes_ten_steady_steps_of_rows(name: str) -> None:
    """Long ladders in tests/full/sweeps/test_proposers.py."""
    check_small_ladder(name)


def check_small_ladder(name: str) -> None:
    """From step 3 on; a batch is shown in rows, also where they are packed."""
    for run in check_ladder(name, "small"):
        # those of `packing` have many lengths
        if run.dataset.random.rows and run.dataset.path == "random:" and name != "packing":
            rows = int(batch_text(run).split(" x ")[0]) * run.batching.accumulation
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


REFUSED = [
    ("batching.rows=2", "batching.rows differs between the rungs of sweep=single_gpu. Remove it, or edit a copy of"),
    ("precision=bf16", "precision differs between the rungs of sweep=single_gpu."),
    ("seed=1,2", "seed has several values, but the trials of sweep=single_gpu are its rungs. Set one value."),
    ("sweep.trials=3", "sweep.trials: the rungs of sweep=single_gpu are set in its file. Remove it;"),
    ("sweep.size=tiny", "sweep.size=tiny: expected one of full, small."),
    ("optimizer.lrr=1", "Unknown setting optimizer.lrr."),
    ("sweep=mlm adapter.r=8", "adapter.r=8: recipe=full trains no adapter."),
    ("sweep=lr sweep.size=small", "sweep.size is only for ladders, and sweep=lr has no rungs. Remove it."),
]


@pytest.mark.parametrize(("words", "message"), REFUSED, ids=[words for words, _ in REFUSED])
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
# what the second rung is like; the first has SAME, loss 0.5, held-out loss 1.0, 100 tokens/s
COMPARED = [
    (SPLIT_ROWS, {}, ("equal", 2.0)),
    (SAME, {"loss": 0.51, "eval_loss": 1.019}, ("close", 2.0)),
    (SAME, {"loss": 0.51, "eval_loss": 1.021}, ("no", 2.0)),
    (SAME, {"loss": 0.51, "skipped_steps": 1}, ("no", 2.0)),
    ([*BATCHES, "batching.accumulation=2"], {}, (None, 2.0)),
    ([*BATCHES, "optimizer.lr=3e-3"], {}, (None, 2.0)),
    (SAME, {"depth": 1}, ("equal", None)),
    (SAME, {"watts": 300.0}, ("equal", 2.0)),
]


def finished(folder: Path, number: int, rate: float, **facts: Any) -> Outcome:
    """A finished rung: two slow steps, then two at `rate` tokens a second."""
    own = folder / str(number)
    (own / "checkpoints" / "step-000004").mkdir(parents=True)
    progress = {"skipped_steps": facts.get("skipped_steps", 0), "depth": facts.get("depth", 0)}
    (own / "checkpoints" / "step-000004" / "state.json").write_text(json.dumps({"progress": progress}))
    result = {"train_loss_last": facts.get("loss", 0.5), "eval_loss": facts.get("eval_loss", 1.0), "seconds": 4.0}
    (own / "result.json").write_text(json.dumps({"status": FINISHED, **result}))
    clocks = {"max_sm_mhz": 1665, "sm_mhz": 200 + number, "power_limit_watts": facts.get("watts", 350.0)}
    (own / "manifest.json").write_text(json.dumps({"counts": {"fill": None}, "clocks": clocks}))
    lines = [{"step": n, "tokens": 10 * n, "seconds": 10 / each} for n, each in enumerate((1.0, 1.0, rate, rate), 1)]
    (own / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in [*lines, {"step": 4}]))
    return Outcome(number=number, overrides=(), swept=(), folder=str(own), status=FINISHED)


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
    measured, claimed = (block for part in measured_tables(compared) for block in part.blocks)
    assert isinstance(measured, Table)
    assert isinstance(claimed, Table)
    assert ("split after out-of-memory" in "".join(measured.notes)) == ("depth" in facts)
    assert ("max_sm_mhz 1665 -> 1665, power_limit_watts 350.0 -> 300.0" in "".join(measured.notes)) == (
        "watts" in facts
    )
    assert "samples/s" not in measured.head, "no rung has it"
    assert claimed.cells == [["one", "8.0", "-"], ["two", "12.0", "1234"]]
    assert "| two | 12.0 | 1234 |" in claimed.markdown()


SPACE = {
    "optimizer.lr": {"low": 4e-4, "high": 4e-2, "log": True},
    "adapter.r": [8, 16, 32],
    "schedule.warmup_fraction": {"low": 0.0, "high": 0.1},
}
Objective = Callable[[dict[str, Any]], float | None]


def search(*words: str, trials: int = 8, seed: int = 0, space: dict[str, Any] = SPACE) -> Search:
    settings, problems = settings_of(words)
    dimensions, wrong = dimensions_in(space)
    assert (problems, wrong) == ([], [])
    return Search([*settings, *dimensions], SweepConfig(proposer="tpe", trials=trials, seed=seed))


def outcome(trial: Trial, objective: float | None, status: str = FINISHED) -> Outcome:
    return Outcome(
        number=trial.number,
        overrides=trial.overrides,
        swept=trial.swept,
        folder=f"runs/sweep/{trial.name}",
        proposed=trial.proposed,
        status=status if objective is not None else FAILED,
        objective=objective,
    )


def valley(values: dict[str, Any]) -> float:
    warmup: float = values.get("schedule.warmup_fraction", 0.0)
    return math.log(values["optimizer.lr"] / 1e-2) ** 2 + warmup


def ended(proposer: Search, objective: Objective = valley, before: Sequence[Outcome] = ()) -> list[Outcome]:
    found = list(before)
    while trial := proposer.next(found):
        found.append(outcome(trial, objective(values_of(trial.swept))))
    return found


def rate_of(recipe: str) -> float:
    return composed(f"recipe={recipe}").optimizer.lr


def told(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    return [asdict(each) for each in outcomes]


def test_search_first_trial_is_own_run() -> None:
    found = ended(search("seed=1", "recipe=lora"))
    assert found[0].overrides == (
        "seed=1",
        "recipe=lora",
        f"optimizer.lr={rate_of('lora')}",
        "adapter.r=32",
        "schedule.warmup_fraction=0.03",
    )
    for each in found:
        values = values_of(each.swept)
        assert list(values) == list(SPACE)
        assert 0.0004 <= values["optimizer.lr"] <= 0.04
        assert values["adapter.r"] in (8, 16, 32)
        assert 0 <= values["schedule.warmup_fraction"] <= 0.1
    assert len({each.swept for each in found}) == len(found) == 8


def test_search_first_trial_when_run_outside_space() -> None:
    found = ended(search(trials=1, space={"optimizer.lr": {"low": 1.0, "high": 2.0}}))
    assert 1.0 <= values_of(found[0].swept)["optimizer.lr"] <= 2.0


def test_search_deterministic() -> None:
    one, same, other = (ended(search(seed=seed)) for seed in (3, 3, 4))
    assert one == same
    assert [each.swept for each in one][1:] != [each.swept for each in other][1:]


def test_search_resumed_same_trials() -> None:
    whole = ended(search())
    for stop in (1, 4, 6):
        again = search()
        recalled = again.recall(told(whole[:stop]))
        assert [(each.overrides, each.name) for each in recalled] == [
            (each.overrides, each.folder.rpartition("/")[2]) for each in whole[:stop]
        ]
        assert ended(again) == whole
    begun = [*whole[:2], replace(whole[2], status=RUNNING, objective=None)]
    again = search()
    assert len(again.recall(told(begun))) == 3
    assert ended(again) == whole


def test_search_resumed_with_multiples() -> None:
    def made() -> Search:
        space = {"optimizer.lr": {"low": "0.1x", "high": "10x", "log": True}}
        return search("seed=1", "++optimizer.lr=2e-3", trials=3, space=space)

    whole = ended(made())
    assert whole[0].overrides == ("seed=1", "optimizer.lr=0.002")
    assert all(0.0002 <= values_of(each.swept)["optimizer.lr"] <= 0.02 for each in whole)
    again = made()
    again.recall(told(whole[:2]))
    assert ended(again) == whole


def test_search_over_recipes_leaves_out_what_a_trial_does_not_read() -> None:
    proposer = search("adapter.dropout=0.1", space={"recipe": ["full", "lora"], "adapter.r": [8, 16]}, trials=3)
    whole = ended(proposer, lambda _values: 0.0)
    assert {"recipe=full", "recipe=lora"} <= {text for each in whole for text in each.overrides}
    for each in whole:
        assert ("recipe=lora" in each.overrides) == any("adapter" in text for text in each.overrides)
        assert composed(*each.overrides)
    assert [each.overrides for each in proposer.recall(told(whole))] == [each.overrides for each in whole]


def test_search_more_trials_allowed_fewer_refused() -> None:
    whole = ended(search(trials=9))
    few = ended(search(trials=5))
    more = search(trials=9)
    more.recall(told(few))
    assert ended(more) == whole
    with pytest.raises(ConfigError, match=r"sweep\.trials=5: this sweep has already started 9 trials"):
        search(trials=5).recall(told(whole))


def test_search_recorded_trial_keeps_settings() -> None:
    """It failed, and the same command tried it again."""
    first = ended(search(), lambda values: None if values["adapter.r"] == 8 else valley(values))
    assert [each.status for each in first].count(FAILED) in range(1, 8)
    again = search()
    again.recall(told(first))
    assert [each.swept for each in ended(again)] == [each.swept for each in first]


def test_search_dry_run_plans_startup_trials() -> None:
    plans: list[Outcome] = []
    proposer = search()
    while trial := proposer.next(plans):
        plans.append(outcome(trial, 0.0, DRY_RUN))
    assert len(plans) == STARTUP_TRIALS
    assert search().recall(told(plans)) == []
    assert [each.swept for each in ended(search())][:2] == [each.swept for each in plans][:2]


def test_search_finite_space_without_repetition() -> None:
    space = {
        "adapter.r": [8, 16, 32],
        "adapter.dropout": {"low": 0.0, "high": 0.2, "step": 0.1},
        "seed": {"low": 1, "high": 2},
    }
    found = ended(search(trials=40, space=space), lambda values: float(values["adapter.r"]))
    assert len({each.swept for each in found}) == 18
    assert {text.partition("=")[2] for each in found for text in each.swept if "dropout" in text} == {"0", "0.1", "0.2"}
