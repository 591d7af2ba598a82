import errno
import os
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from app.errors import EnvironmentProblem
from app.files import (
    append_text,
    checksummed_folder,
    delete_folder,
    read_json,
    verify_checksums,
    write_json,
    write_text,
)
from app.tracking.output_dir import RunFolder
from tests.harness.child import run


def test_write_text_replaces_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_text(path, "old")
    write_json(path, {"Übung": [1, None]})
    assert path.read_text(encoding="utf-8") == '{\n  "Übung": [\n    1,\n    null\n  ]\n}\n'
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


def test_write_text_full_disk_keeps_old_content(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "old")
    code = (
        "import resource, sys; from pathlib import Path; from app.files import write_text\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "write_text(Path(sys.argv[1]), 'new' * 1000)\n"
    )
    returncode, _, err = run(code, str(path))
    assert returncode == 1
    assert "EnvironmentProblem" in err
    assert "file size limit of the shell exceeded" in err
    assert "Type ulimit -f unlimited and start again" in err
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.txt"]


def test_is_disk_full_short_write_of_numpy(tmp_path: Path) -> None:
    code = (
        "import resource, sys; import numpy; from app.files import is_disk_full\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try: numpy.zeros(9999, 'u1').tofile(sys.argv[1])\n"
        "except OSError as fault: print(fault.errno, is_disk_full(fault), is_disk_full(OSError('of no disk')))\n"
    )
    returncode, out, err = run(code, str(tmp_path / "a"))
    assert (returncode, out) == (0, "None True False\n"), err


def test_write_text_follows_no_link(tmp_path: Path) -> None:
    target = tmp_path / "target"
    write_text(target, "mine")
    (tmp_path / ".a.txt.partial").symlink_to(target)
    write_text(tmp_path / "a.txt", "new")
    assert target.read_text() == "mine"
    assert not (tmp_path / "a.txt").is_symlink()


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "\udce9", "9" * 5000])
def test_read_json_damage_is_a_value_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_text(text, errors="surrogateescape")
    with pytest.raises(ValueError):  # noqa: PT011 (whatever it says)
        read_json(tmp_path / "a")


def test_read_json_pipe_is_a_value_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a")
    with pytest.raises(ValueError, match="it is not a regular file"):
        read_json(tmp_path / "a")


def test_write_json_fault_keeps_old_content(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_text(path, "old")
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"loss": float("nan")})
    assert path.read_text() == "old"


def test_checksummed_folder_files_have_mode_of_umask(tmp_path: Path) -> None:
    """safetensors writes them for the owner alone."""
    before = os.umask(0o027)
    try:
        with checksummed_folder(tmp_path / "a") as folder:
            (folder / "inside").mkdir()
            save_file({"x": torch.zeros(2)}, folder / "inside" / "x.safetensors")
    finally:
        os.umask(before)
    modes = [path.stat().st_mode & 0o777 for path in (tmp_path / "a" / "inside" / "x.safetensors", tmp_path / "a")]
    assert modes == [0o640, 0o750]


def test_append_text_full_disk_message() -> None:
    with pytest.raises(
        EnvironmentProblem, match=r"the disk is full: /dev/full .*Nothing was saved yet\. Free disk space"
    ):
        append_text(Path("/dev/full"), "line\n")


def archive_error(cause: OSError | None) -> RuntimeError:
    """As torch's archive writer raises it while the file below it fails."""
    error = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
    error.__context__ = cause
    return error


def error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (error(errno.ENOSPC), "the disk is full: {0} could not be written."),
        (error(errno.EDQUOT), "the disk quota is used up: {0} could not be written."),
        (SafetensorError("I/O error: File too large (os error 27)"), "file size limit of the shell exceeded: {0} "),
        (archive_error(error(errno.ENOSPC)), "the disk is full: {0} could not be written."),
        (archive_error(None), "output_dir: cannot write {0} (Input/output error); choose a writable output_dir"),
        (SafetensorError("I/O error: Input/output error (os error 5)"), "output_dir: cannot write {0} (Input/output"),
        (error(errno.EACCES), "output_dir: cannot write {0} (Permission denied); choose a writable output_dir"),
        (error(errno.EROFS), "output_dir: cannot write {0} (Read-only file system); choose a writable output_dir"),
        (error(errno.ESTALE), "output_dir: cannot write {0} (Stale file handle); choose a writable output_dir"),
    ],
)
@pytest.mark.parametrize("saved", [None, "step-000001"])
def test_checksummed_folder_error_of_disk_is_a_message(
    tmp_path: Path, fault: Exception, message: str, saved: str | None
) -> None:
    if saved:
        (tmp_path / saved).mkdir()
    target = tmp_path / "step-000002"
    with pytest.raises(EnvironmentProblem) as problem, checksummed_folder(target):
        raise fault
    said = str(problem.value)
    assert said.startswith(message.format(target))
    assert ("Earlier checkpoints are intact" in said) == (f"resume={tmp_path}/step-000001" in said) == bool(saved)
    assert [each.name for each in tmp_path.iterdir()] == [saved] * bool(saved)


@pytest.mark.parametrize("fault", [RuntimeError("ours"), SafetensorError("ours"), error(errno.ENOENT)])
def test_checksummed_folder_fault_of_ours_stays(tmp_path: Path, fault: Exception) -> None:
    with pytest.raises(type(fault)) as raised, checksummed_folder(tmp_path / "final"):
        raise fault
    assert raised.value is fault


def test_delete_folder_that_stays_is_a_remark(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "link").symlink_to("old")
    remark = delete_folder(tmp_path / "link")
    assert remark is not None
    assert remark.startswith(f"{tmp_path}/link cannot be deleted (")
    assert delete_folder(tmp_path / "old") is None
    assert not (tmp_path / "old").exists()


def test_append_text_survives_kill(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from app.files import append_text\n"
        "for number in range(1000): append_text(Path(sys.argv[1]), f'{number}\\n')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    returncode, _, _ = run(code, str(tmp_path / "log.txt"))
    assert returncode == -9
    assert (tmp_path / "log.txt").read_text() == "".join(f"{number}\n" for number in range(1000))


def test_verify_checksums_edited_card_is_accepted(tmp_path: Path) -> None:
    with checksummed_folder(tmp_path / "final") as folder:
        for name in ("README.md", "config.json"):
            write_text(folder / name, "old")
    write_text(tmp_path / "final" / "README.md", "new")
    assert verify_checksums(tmp_path / "final") is None
    write_text(tmp_path / "final" / "config.json", "new")
    assert verify_checksums(tmp_path / "final") == "config.json has changed since it was written"


# a mount of an object store: a hook raises its error where Python calls the system
MOUNT = """
import errno, os, sys; from pathlib import Path
def refuse(event, arguments):
    if {refuses}: raise OSError(errno.{error}, os.strerror(errno.{error}))
"""


@pytest.mark.parametrize(
    ("operation", "refuses"),
    [
        ("create folders", "event == 'os.mkdir' and '.probe' in str(arguments[0])"),
        ("append to files", "event == 'open' and arguments[1] == 'a'"),
        ("replace files", "event == 'os.rename' and os.path.isfile(arguments[0])"),
        ("rename folders", "event == 'os.rename' and os.path.isdir(arguments[0])"),
        ("delete folders", "event == 'os.rmdir'"),
    ],
)
def test_output_dir_on_mount_without_an_operation_is_refused(tmp_path: Path, operation: str, refuses: str) -> None:
    code = (
        MOUNT.format(refuses=refuses, error="ENOSYS") + "from app.tracking.output_dir import RunFolder\n"
        "sys.addaudithook(refuse)\nRunFolder.claim(sys.argv[1], None)\n"
    )
    folder = tmp_path / "run"
    returncode, _, err = run(code, str(folder))
    assert returncode == 1
    assert f"output_dir={folder}: its file system cannot {operation} (Function not implemented), which saving" in err
    assert operation == "delete folders" or not folder.exists()


def test_claimed_folder_shows_no_trace_of_the_tried_operations(tmp_path: Path) -> None:
    (tmp_path / ".probe.partial/old").mkdir(parents=True)  # of a killed start
    with RunFolder.claim(str(tmp_path), None):
        assert [entry.name for entry in tmp_path.iterdir()] == [".lock"]


def test_checksummed_folder_on_mount_without_modes_is_written(tmp_path: Path) -> None:
    code = (
        MOUNT.format(refuses="event == 'os.chmod'", error="EPERM") + "from app.files import checksummed_folder\n"
        "sys.addaudithook(refuse)\n"
        "with checksummed_folder(Path(sys.argv[1])) as folder: (folder / 'weights').write_text('1')\n"
    )
    returncode, _, err = run(code, str(tmp_path / "final"))
    assert returncode == 0, err
    assert verify_checksums(tmp_path / "final") is None
