import errno
import fcntl
import os
import signal
from pathlib import Path

import pytest

from app.errors import AppError, ConfigError, EnvironmentProblem
from app.tracking.output_dir import RunFolder, lock_owner
from tests.harness.child import run, start

CLAIM = """
import sys
from app.tracking.output_dir import RunFolder
folder = RunFolder.claim(sys.argv[1], "auto")
print("claimed", flush=True)
"""


def everything_in(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def a_run(folder: Path) -> Path:
    (folder / "checkpoints" / "step-000010").mkdir(parents=True)
    (folder / "run.yaml").write_text("seed: 0\n")
    return folder


def test_claim_creates_folder_with_documented_names(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    with RunFolder.claim(str(path), None) as folder:
        assert path.is_dir()
        names = [folder.run_yaml, folder.manifest, folder.metrics, folder.result, folder.log, folder.checkpoints]
        documented = ["run.yaml", "manifest.json", "metrics.jsonl", "result.json", "log.txt", "checkpoints"]
        assert [name.relative_to(path).as_posix() for name in names] == documented
    assert everything_in(path) == {}


@pytest.mark.parametrize(
    ("resume", "expected"), [(None, "resume=auto"), ("elsewhere/checkpoints/step-000010", "another run")]
)
def test_claim_folder_with_run_refused(resume: str | None, expected: str, tmp_path: Path) -> None:
    before = everything_in(a_run(tmp_path))
    with pytest.raises(ConfigError) as refusal:
        RunFolder.claim(str(tmp_path), resume)
    assert everything_in(tmp_path) == before
    for part in (f"output_dir={tmp_path}", "checkpoints, run.yaml", expected, "another output_dir"):
        assert part in refusal.value.report()


@pytest.mark.parametrize("resume", ["auto", None])
def test_claim_foreign_folder_refused(resume: str | None, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    before = everything_in(tmp_path)
    with pytest.raises(ConfigError, match=r"thesis\.tex.*new or empty folder"):
        RunFolder.claim(str(tmp_path), resume)
    assert everything_in(tmp_path) == before


@pytest.mark.parametrize("resume", ["auto", "checkpoints/step-000010", "checkpoints"])
def test_claim_resume_accepted(resume: str, tmp_path: Path) -> None:
    before = everything_in(a_run(tmp_path))
    with RunFolder.claim(str(tmp_path), resume if resume == "auto" else str(tmp_path / resume)):
        pass
    assert everything_in(tmp_path) == before


@pytest.mark.parametrize("resume", ["auto", None, "elsewhere/checkpoints/step-000010"])
def test_claim_leftovers_of_kill_accepted(resume: str | None, tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("process 1 on nowhere")
    (tmp_path / ".run.yaml.partial").write_text("se")
    with RunFolder.claim(str(tmp_path), resume):
        pass


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_claim_file_refused(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentProblem, match="output_dir"):
        RunFolder.claim(str(tmp_path / place), None)
    assert everything_in(tmp_path) == {"file": b""}


def test_claim_dangling_link_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(EnvironmentProblem, match="link: not a folder"):
        RunFolder.claim(str(tmp_path / "link"), None)
    assert [entry.name for entry in tmp_path.iterdir()] == ["link"]


@pytest.mark.parametrize("name", ["final", "log.txt", ".lock", ".run.yaml.partial", "checkpoints"])
def test_claim_folder_with_links_refused(name: str, tmp_path: Path) -> None:
    """The folder itself may be one."""
    target, run = tmp_path / "target", a_run(tmp_path / "run")
    target.write_text("mine")
    (tmp_path / "linked").symlink_to(run)
    with RunFolder.claim(str(tmp_path / "linked"), "auto"):
        pass
    if name == "checkpoints":
        (run / name).rename(tmp_path / "elsewhere")
    (run / name).symlink_to(target)
    with pytest.raises(EnvironmentProblem, match=f"{name} is a symbolic link"):
        RunFolder.claim(str(tmp_path / "linked"), "auto")
    assert target.read_text() == "mine"


def test_claim_full_disk_removes_folder(tmp_path: Path) -> None:
    code = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n" + CLAIM
    returncode, _, err = run(code, str(tmp_path / "a" / "b"))
    assert returncode == 1
    assert "EnvironmentProblem" in err
    assert "Type ulimit -f unlimited" in err
    assert everything_in(tmp_path) == {}


def test_lock_second_process_refused_until_kill(tmp_path: Path) -> None:
    holder = start(CLAIM + "input()", str(tmp_path), stdin=-1)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "claimed\n"
        with pytest.raises(EnvironmentProblem, match=f"in use by process {holder.pid} on "):
            RunFolder.claim(str(tmp_path), "auto")
        a_run(tmp_path)
        with pytest.raises(EnvironmentProblem, match=f"in use by process {holder.pid} on "):
            RunFolder.claim(str(tmp_path), None)
        assert run(CLAIM, str(tmp_path))[0] == 1
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    assert run(CLAIM, str(tmp_path))[:2] == (0, "claimed\n")


def test_lock_not_kept_by_forked_worker(tmp_path: Path) -> None:
    code = CLAIM + (
        "import os, sys, time\n"
        "if os.fork() == 0:\n"
        "    print('worker', os.getpid(), flush=True)\n"
        "    os.close(1); os.close(2)\n"
        "    time.sleep(60)\n"
        "    os._exit(0)\n"
        "time.sleep(60)\n"
    )
    holder = start(code, str(tmp_path))
    assert holder.stdout is not None
    assert holder.stdout.readline() == "claimed\n"
    worker = int(holder.stdout.readline().split()[1])
    try:
        holder.kill()
        holder.communicate()
        os.kill(worker, 0)
        RunFolder.claim(str(tmp_path), "auto").release()
    finally:
        os.kill(worker, signal.SIGKILL)


def test_lock_same_process_refused_until_release(tmp_path: Path) -> None:
    first = RunFolder.claim(str(tmp_path), None)
    with pytest.raises(AppError, match=f"process {os.getpid()}"):
        RunFolder.claim(str(tmp_path), None)
    first.release()
    first.release()
    RunFolder.claim(str(tmp_path), None).release()


def test_lock_unsupported_folder_usable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with RunFolder.claim(str(tmp_path), None) as folder:
        assert folder.path == tmp_path


def test_lock_removed_file_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flock, path = fcntl.flock, tmp_path / ".lock"

    def once_late(descriptor: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        path.unlink()
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", once_late)
    with RunFolder.claim(str(tmp_path), None):
        assert f"process {os.getpid()}" in (lock_owner(tmp_path) or "")
