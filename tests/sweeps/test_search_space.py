"""Search space of a sweep: values, ranges, multiples, and the grid of trials."""

import itertools
import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from app.sweeps.search_space import NO_PRESET, Dimension, Range, Setting, dimensions_in, multiply_out, settings_of
from app.sweeps.sweep import proposer_of
from app.sweeps.trials import Trial, values_of
from tests.harness.composed import composed

READ = OverridesParser.create().parse_override


def setting(text: str) -> Setting:
    (found,), problems = settings_of([text])
    assert problems == []
    return found


def grid(*overrides: str) -> Sequence[Trial]:
    settings, problems = settings_of(overrides)
    assert problems == []
    return proposer_of(settings, NO_PRESET.config).points


VALUES = [
    ("optimizer.lr=1e-3,3e-4", ["0.001", "0.0003"]),
    ("optimizer.lr=choice(1e-3,3e-4)", ["0.001", "0.0003"]),
    ("seed=range(1,4)", ["1", "2", "3"]),
    ("seed=sort(3,1,2)", ["1", "2", "3"]),
    ("seed=tag(some,choice(1,2))", ["1", "2"]),
    ("seed=choice(4)", ["4"]),
    ("recipe=glob(*lora)", ["lora", "qlora"]),
    ("adapter=glob(*, exclude=n*)", ["lora", "peft"]),
    ("adapter.targets=[q_proj,v_proj],[all-linear]", ["[q_proj,v_proj]", "[all-linear]"]),
    ("dataset.path='a,b','c d'", ["'a,b'", "'c d'"]),
    ("dataset.path=a b.jsonl,c.jsonl", ["a\\ b.jsonl", "c.jsonl"]),
    ('dataset.path="a=b,c.jsonl"', ['"a=b,c.jsonl"']),
    ("training.max_steps=null,5", ["null", "5"]),
    ("adapter.targets=[a,b]", ["[a,b]"]),
]


@pytest.mark.parametrize(("text", "values"), VALUES, ids=[text for text, _ in VALUES])
def test_setting_values(text: str, values: list[str]) -> None:
    found = setting(text)
    assert found.key == text.partition("=")[0]
    assert found.texts == tuple(f"{found.key}={value}" for value in values)
    assert found.is_swept == (len(values) > 1)


def test_setting_float_range_without_rounding_errors() -> None:
    found = setting("optimizer.lr=range(0.1,0.4,0.1)")
    assert found.texts[:3] == ("optimizer.lr=0.1", "optimizer.lr=0.2", "optimizer.lr=0.3")


def test_setting_prefix_kept() -> None:
    assert setting("++seed=1,2").texts == ("++seed=1", "++seed=2")
    assert setting("++seed=1,2").key == "seed"
    assert setting("~debug").texts == ("~debug",)


REFUSED = [
    ("optimizer.lr=interval(0,1)", "a grid needs a list of values, not an interval."),
    ("seed=shuffle(range(1,4))", "shuffle changes the order each time"),
    ("seed=1,2,1", "seed=1,2,1: duplicate value 1."),
    ("optimizer.lr=1e-3,0.001", "duplicate value 0.001."),
    ("seed=glob(*)", "glob selects files of a group, and none of [] matches."),
    ("adapter=glob(z*)", "none of ['lora', 'none', 'peft'] matches."),
    ("resume=runs/a", "resume=runs/a: a sweep resumes each trial from its own checkpoint"),
    ("+resume=auto,null", "a sweep resumes each trial from its own checkpoint"),
    ("output_dir=a,b", "output_dir=a,b: a sweep has one folder"),
    ("seed=range(1,1000000000)", "seed: more than 1,000 trials in one sweep."),
]


@pytest.mark.parametrize(("text", "message"), REFUSED, ids=[text for text, _ in REFUSED])
def test_setting_unsweepable_refused(text: str, message: str) -> None:
    _, problems = settings_of([text])
    assert len(problems) == 1
    assert message in problems[0]


def test_settings_too_many_or_given_twice_refused() -> None:
    _, problems = settings_of(["seed=range(40)", "record.every=range(1,41)", "recipe=lora", "recipe=lora,full"])
    assert problems == [
        "recipe has several values and is set 2 times. Set it once.",
        "seed, record.every, recipe: more than 1,000 trials in one sweep. Use fewer values.",
    ]
    assert settings_of(["seed=1", "seed=2", "recipe=lora,full"])[1] == []


VALUE = st.one_of(
    st.integers(-(10**6), 10**6).map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True),
    st.text("ab ,=[]{}()$:", min_size=1, max_size=6).map(lambda text: f"'{text}'"),
    st.lists(st.from_regex(r"[a-z]{1,4}", fullmatch=True), max_size=3).map(lambda names: f"[{','.join(names)}]"),
)


@given(st.lists(VALUE, min_size=2, max_size=5, unique=True))
def test_setting_values_equal_hydra(values: list[str]) -> None:
    meant = [READ(f"key={value}").value() for value in values]
    found, problems = settings_of([f"key={','.join(values)}"])
    if problems:
        written = [READ(f"key={value}").get_value_element_as_str() for value in values]
        assert len(set(written)) < len(written)
    else:
        assert [READ(text).value() for text in found[0].texts] == meant


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_grid_every_combination_once(sizes: list[int]) -> None:
    keys = ["seed", "record.every", "eval.every", "training.epochs"][: len(sizes)]
    trials = grid(*(f"{k}={','.join(map(str, range(1, n + 1)))}" for k, n in zip(keys, sizes, strict=True)))
    every = itertools.product(*([f"{k}={v}" for v in range(1, n + 1)] for k, n in zip(keys, sizes, strict=True)))
    assert [trial.overrides for trial in trials] == list(every)
    assert [trial.number for trial in trials] == list(range(1, len(trials) + 1))
    assert sorted(trial.name for trial in trials) == [trial.name for trial in trials]
    assert all(len(trial.swept) == sum(size > 1 for size in sizes) for trial in trials)


@given(st.text(max_size=300).filter(lambda text: "\0" not in text))
def test_trial_name_safe_and_short(text: str) -> None:
    settings = [Setting("dataset.path", (f"dataset.path={text}", "dataset.path=b"))]
    name = proposer_of(settings, NO_PRESET.config).points[0].name
    assert name.startswith("1-dataset.path")
    assert name.isascii()
    assert not set(name) & set("/\\ :*?\"<>|'$[]{}()\n")
    assert len(name) <= 96


def test_grid_without_swept_values_one_trial() -> None:
    (trial,) = grid("seed=1", "recipe=full")
    assert (trial.name, trial.overrides, trial.swept) == ("1", ("seed=1", "recipe=full"), ())
    assert grid()[0].overrides == ()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("optimizer.lr=1e-3", 0.001),
        ("++adapter.r=8", 8),
        ("adapter.targets=[q_proj,'v proj']", ["q_proj", "v proj"]),
        ("recipe=lora", "lora"),
        ("training.max_steps=null", None),
        ("dataset.path=a=b.jsonl", "a=b.jsonl"),
        ("dataset.path='a=b, c.jsonl'", "a=b, c.jsonl"),
        ("dataset.path=a[b.jsonl", "a[b.jsonl"),
        ("model.architecture.x=inf", "inf"),
    ],
)
def test_values_of_overrides_typed(text: str, value: object) -> None:
    assert values_of([text]) == {text.partition("=")[0].lstrip("+"): value}
    json.dumps(values_of([text]), allow_nan=False)


def dimension(key: str, given: Any) -> Dimension:
    (found,), problems = dimensions_in({key: given})
    assert problems == []
    return found


def problem(key: str, given: Any) -> str:
    found, (only,) = dimensions_in({key: given})
    assert found == []
    return only


@pytest.mark.parametrize(
    ("key", "given", "expected"),
    [
        ("optimizer.lr", {"low": "1e-5", "high": 1e-3, "log": True}, Range("optimizer.lr", 1e-5, 1e-3, log=True)),
        ("optimizer.lr", {"low": "0.1x", "high": "10x"}, Range("optimizer.lr", 0.1, 10.0, is_relative=True)),
        ("adapter.r", {"low": 4, "high": 64, "log": True}, Range("adapter.r", 4, 64, log=True, is_whole=True)),
        ("adapter.r", {"low": "0.5x", "high": "2x"}, Range("adapter.r", 0.5, 2.0, is_relative=True)),
        ("adapter.dropout", {"low": 0, "high": 0.3, "step": 0.1}, Range("adapter.dropout", 0.0, 0.3, step=0.1)),
        (
            "training.max_steps",
            {"low": 1, "high": 9, "step": 4},
            Range("training.max_steps", 1, 9, step=4, is_whole=True),
        ),
    ],
)
def test_range_parsed(key: str, given: dict[str, Any], expected: Range) -> None:
    assert dimension(key, given) == expected


@pytest.mark.parametrize(
    ("key", "values", "texts"),
    [
        ("adapter.r", [8, 16], ["8", "16"]),
        ("optimizer.lr", ["1e-3", 0.01], ["0.001", "0.01"]),
        ("optimizer.lr", ["0.5x", "1X", "2.5e1x"], ["0.5x", "1X", "2.5e1x"]),
        ("recipe", ["lora", "full"], ["lora", "full"]),
        ("adapter.targets", [["q_proj", "v_proj"], ["all-linear"]], ["[q_proj,v_proj]", "[all-linear]"]),
        ("training.max_steps", [None, 5], ["null", "5"]),
        ("batching.packing", [True, False], ["True", "False"]),
        ("dataset.path", ["a, b.jsonl", "c's"], ["'a, b.jsonl'", "'c\\'s'"]),
        ("dataset.columns", [{"text": "a b"}, {"text": "c"}], ["{text:'a b'}", "{text:c}"]),
        ("adapter.r", [8], ["8"]),
    ],
)
def test_list_parsed(key: str, values: list[Any], texts: list[str]) -> None:
    found = dimension(key, values).texts
    assert [text.replace(": ", ":") for text in found] == [f"{key}={text}" for text in texts]


WRONG = [
    ("optimizer.lr", {"low": 2, "high": 1}, "low must be below high."),
    ("optimizer.lr", {"low": 0, "high": 1, "log": True}, "low must be above 0 for log."),
    ("optimizer.lr", {"low": 0.1, "high": "inf"}, "low and high must be numbers"),
    ("optimizer.lr", {"low": 0.1, "high": "10x"}, "low and high must be numbers, or both multiples"),
    ("optimizer.lr", {"low": 1, "high": 2, "step": 0}, "step must be a number above 0, without log."),
    ("optimizer.lr", {"low": 1, "high": 2, "step": "x"}, "step must be a number above 0, without log."),
    ("optimizer.lr", {"low": 1, "high": 2, "step": 0.5, "log": True}, "step must be a number above 0, without log."),
    ("optimizer.lr", {"low": 1, "high": 2, "log": "no"}, "log must be true or false."),
    ("adapter.r", {"low": 1, "high": 2.5}, "expected whole numbers."),
    ("optimizer.lr", {"low": 1}, "expected low: and high:,"),
    ("optimizer.lr", {"low": 1, "high": 2, "lg": True}, "expected low: and high:, optionally log: true or step:."),
    ("model.path", {"low": 1, "high": 2}, "model.path is not a number. Set a list of values."),
    ("recipe", {"low": 1, "high": 2}, "recipe is not a number."),
    ("optimizr.lr", {"low": 1, "high": 2}, "Unknown setting optimizr.lr. Did you mean optimizer.lr?"),
    ("optimizr.lr", ["1x", "2x"], "Unknown setting optimizr.lr. Did you mean optimizer.lr?"),
    ("adapter.r", [], "expected values, [a, b], or a range"),
    ("adapter.r", 8, "expected values, [a, b], or a range"),
]


@pytest.mark.parametrize(("key", "given", "message"), WRONG, ids=[f"{key}={given}" for key, given, _ in WRONG])
def test_dimension_invalid_refused(key: str, given: Any, message: str) -> None:
    assert message in problem(key, given)


@given(st.floats(1e-9, 1e9), st.floats(1.001, 1e6), st.floats(0, 1))
def test_range_rounded_stays_inside(low: float, ratio: float, place: float) -> None:
    each = Range("optimizer.lr", low, low * ratio)
    number = min(low + (low * ratio - low) * place, each.high)
    near = each.rounded(number)
    assert each.has(near)
    assert near == pytest.approx(number, rel=1e-3)
    assert float(each.text(near).partition("=")[2]) == near
    assert [float(text.partition("=")[2]) for text in each.texts] == [each.low, each.high]


def test_range_numbers() -> None:
    steps = Range("adapter.dropout", 0.0, 0.35, step=0.1)
    assert [steps.number(place) for place in range(int(steps.count))] == [0.0, 0.1, 0.2, 0.3]
    assert [steps.has(number) for number in (0.3, 0.25, 0.35, -0.1)] == [True, False, False, False]
    whole = Range("adapter.r", 2, 5, is_whole=True)
    assert (whole.count, whole.number(3), whole.has(3)) == (4, 5, True)
    assert Range("optimizer.lr", 0.1, 0.2).count == math.inf


def test_multiply_out_by_own_value() -> None:
    found = multiply_out(
        [("recipe=full", "optimizer.lr=2x"), ("recipe=lora", "adapter.r=8", "optimizer.lr=2x", "adapter.r=0.4x")],
        {"optimizer.lr", "adapter.r"},
    )
    full, lora = (composed(f"recipe={recipe}").optimizer.lr for recipe in ("full", "lora"))
    assert found == [
        ("recipe=full", f"optimizer.lr={2 * full:.4g}"),
        ("recipe=lora", f"optimizer.lr={2 * lora:.4g}", "adapter.r=3"),
    ]
