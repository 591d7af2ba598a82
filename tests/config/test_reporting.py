"""What app.report may be told."""

from pathlib import Path

import pytest

from app.config.commands import folders_in, report_config
from app.errors import ConfigError


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), ["run has no value. Give run=DIR, sweep=DIR or runs=DIR1,DIR2."]),
        (("run=a", "sweep=b"), ["run=a and sweep=b each say whose page it is. Keep one."]),
        (("run=a", "runs=b,c"), ["run=a and runs=b,c each say whose page it is. Keep one."]),
        (
            ("runs=a",),
            ["runs=a: a comparison needs two folders at least. For the page of one run give run=DIR."],
        ),
        (("run=",), ["run= is empty. Give a value, or run=null."]),
        (("runs/mine",), ["'runs/mine' is not key=value. Keys: run, sweep, runs, to."]),
        (("rnu=a",), ["rnu is not a key. Did you mean run?"]),
    ],
)
def test_what_is_wrong_is_said(words: tuple[str, ...], said: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        report_config(words)
    assert list(refusal.value.problems) == said


def test_the_page_lies_beside_what_it_is_about() -> None:
    assert report_config(["run=runs/mine"]).target == Path("runs/mine/report.html")
    assert report_config(["sweep=s"]).target == Path("s/report.html")
    assert report_config(["runs=a,b"]).target == Path("comparison.html")
    assert report_config(["run=a", "to=~/x.html"]).target == Path("~/x.html").expanduser()


def test_a_comma_may_belong_to_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("1-lr=1,r=2", "2-lr=1,r=4", "plain"):
        (tmp_path / name).mkdir()
    assert folders_in("1-lr=1,r=2,plain,2-lr=1,r=4") == ["1-lr=1,r=2", "plain", "2-lr=1,r=4"]
    assert folders_in("plain,absent,1-lr=1,r=2") == ["plain", "absent", "1-lr=1,r=2"]
    given = report_config(["runs=1-lr=1,r=2,plain"]).given
    assert given == [("runs=1-lr=1,r=2", Path("1-lr=1,r=2")), ("runs=plain", Path("plain"))]
