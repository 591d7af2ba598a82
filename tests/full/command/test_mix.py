"""A mix through real runs: trained, told, scored again, swept."""

import json
from pathlib import Path

from tests.command.test_mix import MIX, sources
from tests.runs import SMALL, Zygote, result


def test_weights_are_swept(zygote: Zygote, tmp_path: Path) -> None:
    sources(tmp_path)
    given = (
        *SMALL,
        *MIX,
        "dataset.max_rows=null",
        "dry_run=true",
        "dataset.mix.code.weight=0,2",
        "output_dir=sweep",
    )
    ended = zygote.run(tmp_path, "-m", *given)
    assert ended.code == 0, ended.stderr + ended.stdout
    runs = sorted((tmp_path / "sweep").glob("*/manifest.json"))
    counts = [json.loads(run.read_text())["counts"]["data"] for run in runs]
    assert [sorted(each["sources"]) for each in counts] == [["chat"], ["chat", "code"]]
    assert [result(run.parent)["status"] for run in runs] == ["dry_run"] * 2
