"""Sweep presets: files of conf/sweep, overrides of the command line, refusals."""

import pytest

from app.config.conf_files import choices_by_group
from app.config.load import compose_run
from app.errors import ConfigError
from app.sweeps import sweep
from app.sweeps.search_space import dimensions_in, dimensions_of, is_sweep_key, read_preset, settings_of
from app.sweeps.sweep import Proposer, default_path, identity_of, proposer_of
from tests.harness.composed import composed
from tests.sweeps.test_sweep import refusal_of


def proposed(*words: str) -> tuple[Proposer, list[str]]:
    """The proposer of a command line, and its messages."""
    preset = read_preset([word for word in words if is_sweep_key(word)])
    settings, problems = settings_of([word for word in words if not is_sweep_key(word)])
    space, wrong = dimensions_in(preset.config.space)
    assert (problems, wrong) == ([], [])
    dimensions, notes = dimensions_of(preset, space, settings, [])
    return proposer_of(dimensions, preset.config), notes


def points(*words: str) -> list[tuple[str, ...]]:
    return [trial.overrides for trial in proposed(*words)[0].points]


def rates_of(found: list[tuple[str, ...]]) -> list[float]:
    return [float(text.partition("=")[2]) for each in found for text in each if "optimizer.lr=" in text]


def test_preset_rates_around_own_rate() -> None:
    own = composed("recipe=full", "model=llama").optimizer.lr
    expected = [own * 2.0**power for power in range(-3, 4)]
    assert rates_of(points("sweep=lr", "recipe=full", "model=llama")) == pytest.approx(expected, rel=1e-3)
    for given, rate in (("optimizer.lr=0.3", 0.3), ("++optimizer.lr=1e-3", 1e-3)):
        assert rates_of(points("sweep=lr", given, "sweep.space.optimizer.lr=[0.5x,2x]")) == [rate / 2, rate * 2]


def test_preset_combined_with_settings() -> None:
    found = points("sweep=lr", "recipe=lora,full", "seed=1", "sweep.space.optimizer.lr=[0.5x,1x]")
    assert [each[:2] for each in found] == [("recipe=lora", "seed=1")] * 2 + [("recipe=full", "seed=1")] * 2
    lora, full = (composed(f"recipe={recipe}").optimizer.lr for recipe in ("lora", "full"))
    assert rates_of(found)[1::2] == [lora, full]
    assert lora != full


def test_preset_rank_keeps_alpha() -> None:
    found = points("sweep=rank")
    assert found == [(f"adapter.r={rank}",) for rank in (4, 8, 16, 32, 64)]
    runs = [composed(*each) for each in (found[0], found[-1])]
    assert [run.adapter.r for run in runs] == [4, 64]
    assert len({(run.adapter.alpha, run.optimizer.lr) for run in runs}) == 1


def test_preset_space_changed_by_command_line() -> None:
    words = ("sweep=optuna", "sweep.trials=40", "sweep.space.adapter.r=null", "sweep.space.seed=[1,2]")
    preset = read_preset([*words, "sweep.space.optimizer.lr={low: 1e-5, high: 1e-3, log: true}"])
    assert preset.config.trials == 40
    assert list(preset.config.space) == ["adapter.dropout", "schedule.warmup_fraction", "seed", "optimizer.lr"]
    found = {text for each in points(*words, "adapter.dropout=0.2") for text in each}
    assert {text for text in found if text.startswith(("adapter", "seed"))} == {
        "adapter.dropout=0.2",
        "seed=1",
        "seed=2",
    }


def test_preset_unused_keys_left_out() -> None:
    proposer, notes = proposed("sweep=optuna", "recipe=full")
    assert not [text for trial in proposer.points for text in trial.overrides if text.startswith("adapter")]
    assert notes == [
        "varied  optimizer.lr from 0.1x to 10x, log",
        "        schedule.warmup_fraction 0.0 0.03 0.1",
        "        not adapter.r: it has no effect with adapter.kind=none",
        "        not adapter.dropout: it has no effect with adapter.kind=none",
    ]


NAMES = ", ".join(choices_by_group()["sweep"])
CHOICES = "|".join(choices_by_group()["sweep"])
REFUSED = [
    ("sweep=rnk", f"sweep=rnk: unknown sweep. Did you mean rank? Choose one of {NAMES};"),
    ("sweep=lr,rank", "sweep=lr,rank: sweep takes one value."),
    ("sweep=3", "sweep=3: unknown sweep."),
    ("sweep.trials=3", f"sweep.trials also needs sweep=NAME. Choose one of {NAMES}."),
    ("sweep=lr sweep.seed=3", "are only for a search: sweep=lr runs a trial for each of its values."),
    ("sweep=optuna sweep.trails=3", "Unknown setting sweep.trails. Did you mean sweep.trials?"),
    ("sweep=optuna sweep.trials=0", "sweep.trials=0 must be at least 1 and at most 1000."),
    ("sweep=optuna sweep.trials=many", "sweep.trials=many: expected a whole number."),
    ("sweep=optuna sweep.trials=1,2", "sweep.trials=1,2: sweep.trials takes one value."),
    ("sweep=optuna sweep.space.seed=1,2", "sweep.space.seed takes one value. Use sweep.space.seed=[1,2]."),
    ("sweep=optuna sweep.space=3", "sweep.space=3: expected"),
    ("sweep=lr sweep.space=null sweep.space.seed=[1,2]", "sweep.space=null: expected a mapping"),
    ("sweep=single_gpu sweep.space.seed=[1,2]", "sweep.space.seed: the rungs of sweep=single_gpu are set in its file."),
    ("sweep=null", "sweep=null: unknown sweep."),
    ("sweep=optuna sweep.space=[", "'sweep.space=[' cannot be read:"),
    ("sweep=optuna sweep.space.optimizer.lrr=[1,2]", "Unknown setting optimizer.lrr. Did you mean optimizer.lr?"),
    ("sweep=optuna sweep.space.optimizer.lr=3", "sweep.space.optimizer.lr=3: expected values, [a, b], or a range,"),
    ("sweep=optuna sweep.space.recipe=[lora,full,lroa]", "recipe=lroa: unknown recipe. Did you mean lora?"),
    ("sweep=optuna sweep.space.seed=[1,1]", "seed=1,1: duplicate value 1."),
    ("sweep=optuna sweep.space.output_dir=[a,b]", "output_dir=a,b: a sweep has one folder"),
    ("sweep=optuna sweep.space.resume=[auto,null]", "a sweep resumes each trial from its own checkpoint"),
    ("sweep=optuna sweep.space={adapter.dropout:[0.1,1.5]}", "adapter.dropout=1.5 must be at least 0 and below 1."),
    (
        "sweep=lr sweep.space.optimizer.lr={low:0.1x,high:2x}",
        "sweep.space.optimizer.lr: a grid needs a list of values, not a range.",
    ),
    ("sweep=lr sweep.space.optimizer.lr=[1x,1e-3]", "multiples (0.5x, above 0) and values cannot be mixed."),
    ("sweep=lr sweep.space.optimizer.lr=[0x,1x]", "multiples (0.5x, above 0) and values cannot be mixed."),
    ("sweep=lr sweep.space={training.max_steps:[1x,2x]}", "training.max_steps is not a number in this run"),
    ("sweep=lr sweep.space.dataset.path=[1x,2x]", "dataset.path is not a number. Set a list of values."),
    ("sweep=rank recipe=full", "sweep=rank has nothing to vary: adapter.r has no effect with adapter.kind=none."),
    ("sweep=rank adapter.r=8", "sweep=rank has nothing to vary: adapter.r is already set."),
    ("sweep=lr sweep.space={}", "sweep=lr has nothing to vary: its space is empty."),
    ("sweep=lr seed=range(200)", "seed, optimizer.lr: more than 1,000 trials in one sweep."),
    ("swep=lr", f"Unknown setting swep. Did you mean sweep={CHOICES}?"),
]


@pytest.mark.parametrize(("words", "message"), REFUSED, ids=[words for words, _ in REFUSED])
def test_preset_invalid_refused(words: str, message: str) -> None:
    (problem,) = refusal_of(*words.split(" "))
    assert message in problem


def test_preset_all_problems_together() -> None:
    problems = refusal_of(
        "sweep=optuna",
        "sweep.space.optimizer.lrr=[1,2]",
        "sweep.space.seed={low:2,high:1}",
        "sed=1",
        "seed=shuffle(1,2)",
    )
    assert [problem.removeprefix("Unknown setting ").split(" ")[0].rstrip(":.") for problem in problems] == [
        "optimizer.lrr",
        "sweep.space.seed={low",
        "seed=shuffle(1,2)",
        "sed",
    ]


def test_preset_invalid_point_named() -> None:
    space = "sweep.space={optimizer.lr: {low: 0.1, high: 0.2}, quantization: [none, nf4]}"
    (problem,) = refusal_of("sweep=optuna", "recipe=full", space)
    assert problem.startswith("quantization.kind=nf4 needs adapter.kind=lora")
    assert problem.endswith("(with optimizer.lr=0.1 quantization=nf4)")


def test_preset_without_m_refused() -> None:
    with pytest.raises(ConfigError, match=r"add -m: python -m app\.train -m sweep=lr"):
        compose_run(["sweep=lr"])


def test_preset_missing_optuna_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "find_spec", lambda name: None)
    (problem,) = refusal_of("sweep=optuna")
    assert problem.startswith("sweep=optuna needs the package optuna, which is not installed: pip install optuna")
    assert points("sweep=rank")


def test_identity_ignores_number_of_trials() -> None:
    def both(*words: str) -> tuple[str, str]:
        preset = read_preset(words)
        return default_path([], preset), identity_of([], preset)

    few, many = both("sweep=optuna", "sweep.trials=3"), both("sweep=optuna", "sweep.trials=30")
    assert few == many
    assert few[0].startswith("runs/sweep-optuna-")
    others = [both("sweep=lr"), both("sweep=optuna", "sweep.seed=1"), both("sweep=optuna", "sweep.space.seed=[1,2]")]
    assert len({few, *others}) == 4


def test_identity_without_preset_unchanged() -> None:
    """A changed identity would make sweeps of earlier versions impossible to resume."""
    settings, _ = settings_of(["seed=1,2", "recipe=lora"])
    assert identity_of(settings) == "f9d6cbceaf3d3bcf3dd17d471786de2b66ada143bf0ae7fb26436d4f23b3600b"
