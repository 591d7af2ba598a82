"""`dataset=auto` from the command line: what it meant is told, kept, and what later commands go by."""

import json
from pathlib import Path

from app.config.dataset import sources_of
from app.config.load import read_run
from tests.command.test_auto_format import ROWS, folder
from tests.harness.runs import SMALL, Zygote

__all__ = ["folder"]  # a fixture


def test_detected_formats_of_a_mix_are_kept(zygote: Zygote, folder: Path) -> None:
    pairs = [
        {"prompt": [{"role": "user", "content": f"Add {n}"}], "completion": [{"role": "assistant", "content": "9"}]}
        for n in range(40)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    mix = ("dataset=mix", "dataset.mix.talk.path=rows.jsonl", "dataset.mix.sums.path=pairs.jsonl")
    given = (*SMALL, *mix, "dataset.format=auto", *ROWS[3:], "training.max_steps=2", "output_dir=run")
    ended = zygote.run(folder, *given, code=0)
    said = " ".join(ended.stdout.split())
    for note in (
        "dataset.mix.talk.format=auto: taken as dataset.mix.talk.format=sharegpt"
        " dataset.mix.talk.columns.conversations=talk, because 96 of the first 96",
        "dataset.mix.sums.format=auto: taken as dataset.mix.sums.format=chat_completion, because 40 of the first 40",
    ):
        assert said.count(note) == 1, said
    manifest = json.loads((folder / "run" / "manifest.json").read_text())
    assert manifest["choices"]["format"] == "sharegpt + chat_completion"
    kept = sources_of(read_run(folder / "run" / "run.yaml").dataset)
    assert {name: section.format for name, section in kept.items()} == {"talk": "sharegpt", "sums": "chat_completion"}
    scored = zygote.run(folder, "run=run", module="app.evaluate", code=0)
    assert "these are the rows that the run held out" in " ".join(scored.stdout.split())
    checked = zygote.run(
        folder, "data", *mix, "dataset.format=auto", "dataset.on_overflow=split", module="app.check", code=2
    )
    assert "would tear a row of dataset.mix.talk.format=sharegpt apart" in " ".join(checked.stderr.split())
