"""The pictures of docs/memory.md, of what a real check found."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from app.config.hardware import read_hardware
from app.config.load import compose_run
from app.plan.memory_check import check_memory
from app.record.lines import memory
from app.record.memory_screen import PARTS, parts_of
from scripts.bench.anatomy import _COLOURS, of_parts, of_places
from tests.conftest import REPO


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    words = ["recipe=lora", "model.weights=random"]
    return check_memory(compose_run(words), words, read_hardware(["hardware=l4"]))


def drawn(picture: str, kind: str) -> list[ET.Element]:
    return [each for each in ET.fromstring(picture).iter() if each.tag.endswith(f"}}{kind}")]


def test_a_bar_is_as_long_as_what_is_needed(facts: dict[str, Any]) -> None:
    much = {**facts, "context_bytes": 40 * 10**9, "needed_bytes": facts["needed_bytes"] + 40 * 10**9}
    picture = of_parts({"a < b": facts, "more": much})
    assert "a < b" in "".join(ET.fromstring(picture).itertext())
    bars = [each for each in drawn(picture, "rect") if list(each)]  # the others are the legend
    told = [each.find("{*}title") for each in bars]
    expected = [f"{PARTS[name]}: {memory(size)}" for one in (facts, much) for name, size in parts_of(one)]
    assert [None if each is None else each.text for each in told] == expected
    first, second = bars[: len(parts_of(facts))], bars[len(parts_of(facts)) :]
    lengths = [sum(float(bar.get("width", 0)) for bar in part) for part in (first, second)]
    sizes = [sum(size for _, size in parts_of(each)) for each in (facts, much)]
    assert lengths[0] / lengths[1] == pytest.approx(sizes[0] / sizes[1], rel=0.02)


def test_a_line_is_where_the_memory_ends(facts: dict[str, Any]) -> None:
    half = {**facts, "memory_bytes": facts["memory_bytes"] // 2}
    picture = of_parts({"whole": facts, "half": half})
    start = min(float(each.get("x", 0)) for each in drawn(picture, "rect") if list(each))
    whole, other = (float(each.get("x1", 0)) - start for each in drawn(picture, "line"))
    assert other == pytest.approx(whole / 2, abs=0.2)


def test_each_part_has_a_colour_of_its_own() -> None:
    assert _COLOURS.keys() == PARTS.keys()
    assert len(set(_COLOURS.values())) == len(PARTS)


def test_the_place_of_the_peak_is_marked(facts: dict[str, Any]) -> None:
    picture = of_places({"one": facts})
    bars = drawn(picture, "rect")
    assert len(bars) == len(facts["phases"])
    at = list(facts["phases"]).index(facts["peak_where"])
    assert [each.get("class") for each in bars] == [
        "marked" if here == at else None for here in range(len(bars))
    ]
    assert float(bars[at].get("width", 0)) == max(float(each.get("width", 0)) for each in bars)


def test_it_runs_as_a_script(facts: dict[str, Any], tmp_path: Path) -> None:
    check, parts, places = (tmp_path / name for name in ("check.json", "parts.svg", "places.svg"))
    check.write_text(json.dumps({"memory": facts}))
    script = [
        sys.executable,
        str(REPO / "scripts/bench/anatomy.py"),
        "--parts",
        str(parts),
        "--places",
        str(places),
    ]
    subprocess.run([*script, f"r=32={check}"], cwd=tmp_path, check=True)
    assert "r=32" in "".join(ET.parse(parts).getroot().itertext())
    ET.parse(places)
