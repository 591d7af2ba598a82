"""A full disk is the user's to mend and leaves nothing half-written; a fault of ours shows where it is."""

import resource
import subprocess
from pathlib import Path

import pytest

from tests.harness.python import python
from tests.harness.runs import SMALL, Zygote, refused, result


def limited(largest: int, app_env: dict[str, str], folder: Path, *given: str) -> subprocess.CompletedProcess[str]:
    """A run whose files cannot grow beyond `largest` bytes; compiled modules would be cut off there unnoticed."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))

    env = app_env | {"XDG_CACHE_HOME": str(folder / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    return python("-m", "app.train", *SMALL, *given, cwd=folder, env=env, preexec_fn=limit)


def test_full_disk_at_the_start_is_reported(app_env: dict[str, str], tmp_path: Path) -> None:
    ended = limited(1000, app_env, tmp_path, "output_dir=run")
    refused(ended.returncode, ended.stdout, ended.stderr, "cache_dir")
    assert not (tmp_path / "run").exists()


def test_full_disk_at_a_checkpoint_is_reported(app_env: dict[str, str], tmp_path: Path) -> None:
    given = ("output_dir=run", "checkpoint.save_random_base=false")
    ended = limited(60_000, app_env, tmp_path, *given)
    refused(ended.returncode, ended.stdout, ended.stderr, "step-000003")
    assert "Nothing was saved yet. Type ulimit -f unlimited" in ended.stderr
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []
    assert result(tmp_path / "run")["status"] == "failed"


def test_bug_prints_its_traceback(app_env: dict[str, str], tmp_path: Path) -> None:
    program = (
        "import sys, app.optim.optimizers as optimizers\n"
        "def build_optimizer(*_): raise KeyError('injected')\n"
        "optimizers.build_optimizer = build_optimizer\n"
        "from app import train\n"
        f"sys.argv = {['train', *SMALL, 'output_dir=run']!r}\n"
        "train.main()\n"
    )
    ended = python("-c", program, cwd=tmp_path, env=app_env)
    assert ended.returncode == 1
    assert "Traceback (most recent call last)" in ended.stderr
    assert ended.stderr.rstrip().endswith("KeyError: 'injected'")
    assert "in build_optimizer" in ended.stderr


@pytest.mark.parametrize(
    ("fault", "code", "tracebacks", "message"),
    [
        ("file limit", 2, 0, "error: file size limit of the shell exceeded: {}/run/checkpoints/step-000003 could not"),
        ("bug", 1, 1, "KeyError: 'injected'"),
    ],
)
def test_fault_of_one_process_is_one_message(
    zygote: Zygote, tmp_path: Path, fault: str, code: int, tracebacks: int, message: str
) -> None:
    module = "tests.full.command.faulty_process"
    given = (*SMALL, "recipe=full", "parallel=fsdp", "checkpoint.save_random_base=false", "output_dir=run")
    ended = zygote.run_together(tmp_path, 2, fault, *given, module=module)
    assert [each.code for each in ended] == [code, code]
    said = "".join(each.stderr for each in ended)
    assert said.count(message.format(tmp_path)) == 1
    assert said.count("Traceback (most recent call last)") == tracebacks
    assert said.count("error: ") <= 1
    assert "Error executing job" not in said
    assert tracebacks or result(tmp_path / "run")["status"] == "failed"  # a bug comes before the records are opened
