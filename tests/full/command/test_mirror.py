"""`checkpoint.mirror` of a real run: a new disk, and a store that fails."""

import shutil
from pathlib import Path

from app.files import verify_checksums
from scripts.cluster.restore import restore
from tests.harness.runs import SMALL, Zygote, same_ending

SHORT = (*SMALL, "training.max_steps=6", "checkpoint.every=2", "checkpoint.keep=1")


def test_run_on_a_new_disk_resumes_from_its_mirror_bit_for_bit(zygote: Zygote, tmp_path: Path) -> None:
    whole, run, copies = tmp_path / "whole", tmp_path / "runs/mine", tmp_path / "copies"
    zygote.run(tmp_path, *SHORT, f"output_dir={whole}", code=0)
    command = (*SHORT, f"output_dir={run}", "resume=auto", f"checkpoint.mirror=file://{copies}")
    zygote.run(tmp_path, *command, "training.stop_after=3", code=75)
    shutil.rmtree(run)

    ended = zygote.run(tmp_path, *command, code=2)
    assert f"file://{copies}/mine has checkpoints that are not in output_dir={run}" in ended.stderr
    restore(f"file://{copies}/mine", run)
    ended = zygote.run(tmp_path, *command, code=0)
    assert f"copied to file://{copies}/mine" in (run / "log.txt").read_text()
    same_ending(whole, run)
    names = [folder.name for folder in (run / "checkpoints").glob("step-*")]
    assert sorted(names) == sorted(folder.name for folder in (copies / "mine/checkpoints").glob("step-*"))
    for folder in (*(f"checkpoints/{name}" for name in names), "final", "base"):
        assert verify_checksums(copies / "mine" / folder) is None
        assert (copies / "mine" / folder / "manifest.json").read_text() == (run / folder / "manifest.json").read_text()


def test_run_whose_mirror_fails_finishes_and_says_so_once(zygote: Zygote, tmp_path: Path) -> None:
    zygote.run(tmp_path, *SHORT, "output_dir=run", "checkpoint.mirror=file:///proc/copies", code=0)
    log = (tmp_path / "run/log.txt").read_text()
    assert log.count("checkpoint.mirror: copy to file:///proc/copies/run failed (") == 1
    assert log.count("checkpoint.mirror: file:///proc/copies/run is not complete") == 1
    assert verify_checksums(tmp_path / "run/final") is None


def test_mirror_without_its_package_is_refused_at_the_start(zygote: Zygote, tmp_path: Path) -> None:
    ended = zygote.run(tmp_path, *SHORT, "output_dir=run", "checkpoint.mirror=gs://bucket/runs", code=2)
    assert "checkpoint.mirror=gs://... needs the package gcsfs, which is not installed: pip install" in ended.stderr
    assert not (tmp_path / "run").exists()
