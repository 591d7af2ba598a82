"""What was tokenised once is not tokenised again, unless what decides it changed or it is damaged."""

import ast
import errno
import fcntl
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.data import cache, making, signatures, storage
from app.data.cache import cached_rows
from app.data.prepare import prepare
from app.data.storage import RowWriter, disk_explained
from app.errors import DataError, EnvironmentProblem
from tests.data.killed_preparation import MOMENTS
from tests.data.small import LINES, chat, config, tokenizer, write_chats

DATA = Path(cache.__file__).parent


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_chats(tmp_path / "a.jsonl", chat("Hi", "Hello"), chat("Thank you", "You are welcome!"))


def entries(folder: Path) -> list[Path]:
    return sorted((folder / "tokens").iterdir())


def write_three(writer: RowWriter) -> dict[str, Any]:
    for n in range(3):
        writer.add(f"a:{n}", np.arange(n + 2, dtype=np.int32), np.arange(n + 2) > 0, side=n)
    return {"n": 3}


def never(writer: RowWriter) -> dict[str, Any]:
    raise AssertionError("the entry should have been found")


def test_a_second_time_nothing_is_tokenised(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepare(config(rows), tokenizer(), str(tmp_path))
    monkeypatch.setattr(making, "read_row", None)  # anything that asked for a row would fail
    copy = tmp_path / "copy" / "a.jsonl"
    copy.parent.mkdir()
    copy.write_bytes(rows.read_bytes())
    again = prepare(config(copy), tokenizer(), str(tmp_path))
    assert again.train.fingerprint == first.train.fingerprint
    assert again.report.lines() == first.report.lines()
    assert again.report.train.source == str(copy)


CHANGES: dict[str, dict[str, Any]] = {
    "max_length": {"max_length": 100},
    "max_rows": {"max_rows": 1},
    "train_on": {"train_on": "last"},
    "on_overflow": {"on_overflow": "truncate"},
    "on_unstable_template": {"on_unstable_template": "last"},
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_decides_the_tokens_decides_the_entry(rows: Path, tmp_path: Path, name: str) -> None:
    prepare(config(rows), tokenizer(), str(tmp_path))
    prepare(config(rows, **CHANGES[name]), tokenizer(), str(tmp_path))
    assert len(entries(tmp_path)) == 2


def test_what_only_stops_a_run_decides_no_entry(rows: Path, tmp_path: Path) -> None:
    """So what app.check has tokenised, going past what it found, is there for the run."""
    for name in ("on_bad_row", "on_overflow", "on_unstable_template"):
        prepare(config(rows, **{name: "error"}), tokenizer(), str(tmp_path))
    prepare(config(rows, on_bad_row="skip", on_overflow="drop"), tokenizer(), str(tmp_path))
    assert len(entries(tmp_path)) == 1


def test_an_entry_made_with_less_care_stops_a_run_that_takes_more(tmp_path: Path) -> None:
    thought = chat("Hi", "<think>hm</think>Hello", "And?", "<think>oh</think>Bye")
    bad = [{"role": "nobody", "content": ""}]
    rows = write_chats(tmp_path / "a.jsonl", bad, chat("Hi", "x" * 999), thought, bad)
    prepare(config(rows, on_bad_row="skip", on_overflow="drop"), tokenizer("thinking"), str(tmp_path))
    careful = config(rows, on_bad_row="error", on_overflow="error", on_unstable_template="error")
    with pytest.raises(DataError) as error:
        prepare(careful, tokenizer("thinking"), str(tmp_path))
    role, length, template = error.value.problems
    assert role.startswith("a.jsonl:1 and 1 more row: message 0 has the role 'nobody'")
    assert role.endswith("(dataset.on_bad_row=skip leaves bad rows out)")
    assert "1 samples are longer than dataset.max_length=200, the longest" in length
    assert "the chat template rewrites earlier turns of 1 conversations" in template
    assert len(entries(tmp_path)) == 1


def test_columns_and_format_decide_the_entry(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("instruction,input,output,text\nadd,1,3,x\n")
    for changes in (
        {"fmt": "instruction"},
        {"fmt": "instruction", "columns": {"input": "text"}},
        {"fmt": "text"},
        {"fmt": "text", "columns": {"text": "output"}},
        {"fmt": "text", "columns": {"prompt": "unused"}},  # the same as without
    ):
        prepare(config(path, **changes), tokenizer(), str(tmp_path))
    assert len(entries(tmp_path)) == 4


def test_tokenizer_and_template_decide_the_entry(rows: Path, tmp_path: Path) -> None:
    template = tokenizer()
    template.chat_template = template.chat_template.replace("\n{% endfor", "{% endfor")
    special = tokenizer()
    special.eos_token = "</s>"
    made = [tokenizer(), template, special, tokenizer(size=380), tokenizer(adds_bos=True)]
    for one in made:
        prepare(config(rows), one, str(tmp_path))
    assert len(entries(tmp_path)) == len(made)
    prepare(config(rows), tokenizer(), str(tmp_path))
    assert len(entries(tmp_path)) == len(made)


def test_the_rows_decide_the_entry(rows: Path, tmp_path: Path) -> None:
    first = prepare(config(rows), tokenizer(), str(tmp_path))
    rows.write_text(rows.read_text().replace("Hello", "Hullo"))
    second = prepare(config(rows), tokenizer(), str(tmp_path))
    assert first.train.fingerprint != second.train.fingerprint


def test_the_code_decides_the_entry() -> None:
    """Every module that a row passes through is in the key."""
    found: set[str] = set()
    wanted = {"stream", "sources", "storage"}
    while wanted:
        module = wanted.pop()
        found.add(module)
        for node in ast.walk(ast.parse((DATA / f"{module}.py").read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("app.data."):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                modules = [name.removeprefix("app.data.").replace(".", "/") for name in (*names, node.module)]
                wanted |= {name for name in modules if (DATA / f"{name}.py").is_file()} - found
    assert set(cache.DECIDING) == found


def test_a_change_of_code_changes_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    made = tokenizer()
    before = cache.cache_key("content", made, {})
    assert cache.cache_key("content", made, {}) == before
    monkeypatch.setattr(cache, "CODE_VERSION", -1)
    cache._code.cache_clear()
    assert cache.cache_key("content", made, {}) != before
    cache._code.cache_clear()


@pytest.mark.parametrize(
    "name", ["tokens.bin", "trained.bin", "places.bin", "index.bin", "again.bin", "meta.json"]
)
@pytest.mark.parametrize("damage", ["torn", "bit", "gone", "longer"])
def test_a_damaged_entry_is_made_again(tmp_path: Path, name: str, damage: str) -> None:
    """At once, and with the time of writing put back."""
    good, _ = cached_rows(str(tmp_path), "key", write_three)
    path = tmp_path / "tokens" / "key" / name
    content, stat = path.read_bytes(), path.stat()
    if damage == "gone":
        path.unlink()
    else:
        at = min(5, len(content) - 1)
        flipped = content[:at] + bytes([content[at] ^ 64]) + content[at + 1 :]
        path.write_bytes({"torn": content[:-2], "bit": flipped, "longer": content + b"\0"}[damage])
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    again, told = cached_rows(str(tmp_path), "key", write_three)
    assert again.fingerprint == good.fingerprint
    assert told == {"n": 3}
    assert cached_rows(str(tmp_path), "key", never)[0].fingerprint == good.fingerprint
    assert [entry.name for entry in entries(tmp_path)] == ["key"]


def test_where_there_are_no_locks_writers_of_the_same_entry_do_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_of: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", unknown)
    together = threading.Barrier(4, timeout=20)
    found: list[str] = []

    def write(writer: RowWriter) -> dict[str, Any]:
        together.wait()
        return write_three(writer)

    def make() -> None:
        found.append(cached_rows(str(tmp_path), "key", write)[0].fingerprint)

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 1
    assert [entry.name for entry in entries(tmp_path)] == ["key"]


def test_of_several_that_need_an_entry_one_makes_it(tmp_path: Path) -> None:
    """As the processes of a run do, or two runs that are started together."""
    made: list[int] = []
    found: list[Any] = []

    def write(writer: RowWriter) -> dict[str, Any]:
        made.append(threading.get_ident())
        time.sleep(0.2)
        return write_three(writer)

    threads = [
        threading.Thread(target=lambda: found.append(cached_rows(str(tmp_path), "key", write)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert [len(rows) for rows, _ in found] == [3] * 4


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        cached_rows(str(tmp_path), "key", never)
    assert entries(tmp_path) == []


def test_what_a_killed_writer_left_goes_after_a_day(tmp_path: Path) -> None:
    old, new = tmp_path / "tokens" / "a.part", tmp_path / "tokens" / "b.part"
    for part in (old, new):
        part.mkdir(parents=True)
        (part / "tokens.bin").write_bytes(b"x")
    day_ago = time.time() - 25 * 3600
    os.utime(old, (day_ago, day_ago))
    cached_rows(str(tmp_path), "key", write_three)
    assert [entry.name for entry in entries(tmp_path)] == ["b.part", "key"]


def test_a_preparation_that_is_killed_is_never_believed_and_leaves_nothing(tmp_path: Path) -> None:
    rows = write_chats(tmp_path / "a.jsonl", *(chat("Hi", f"Hello {n}") for n in range(1500)))
    done = subprocess.run(
        [sys.executable, "-m", "tests.data.killed_preparation", str(rows), str(tmp_path / "cache")],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [moment for moment, *_ in found] == list(MOMENTS)
    for moment, status, left, same, after in found:
        assert status == "ended with -9", moment
        assert [name.endswith(".part") for name in left] == [moment != "in place"], (moment, left)
        assert same, moment
        assert len(after) == 1, (moment, after)
        assert not after[0].endswith(".part"), moment


def test_what_a_living_process_or_another_machine_writes_stays(tmp_path: Path) -> None:
    """Only a lock of this machine says that a writer is dead before a day has passed."""
    (tmp_path / "locks").mkdir()
    parts = {
        name: tmp_path / "tokens" / name
        for name in (f"busy.{cache._HERE}.1.part", f"dead.{cache._HERE}.2.part", "far.0badc0de.3.part")
    }
    for name, part in parts.items():
        part.mkdir(parents=True)
        (tmp_path / "locks" / name.partition(".")[0]).touch()
    with (tmp_path / "locks" / "busy").open() as busy:
        fcntl.flock(busy, fcntl.LOCK_EX)
        cached_rows(str(tmp_path), "key", write_three)
    left = [entry.name for entry in entries(tmp_path)]
    assert left == [f"busy.{cache._HERE}.1.part", "far.0badc0de.3.part", "key"]


@pytest.mark.parametrize("what", ["rows", "tokenizer", "template"])
def test_one_byte_makes_another_entry(rows: Path, tmp_path: Path, what: str) -> None:
    """Neither size nor time shows the change."""
    before = prepare(config(rows), tokenizer(), str(tmp_path)).train.fingerprint
    stat, made = rows.stat(), tokenizer()
    if what == "rows":
        rows.write_text(rows.read_text().replace("Hello", "Hullo"))
        os.utime(rows, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert (rows.stat().st_size, rows.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    elif what == "template":
        made.chat_template = made.chat_template.replace("assistant\n", "assistanx\n")
        assert len(made.chat_template) == len(tokenizer().chat_template)
        assert made.chat_template != tokenizer().chat_template
    else:
        text = made.backend_tokenizer.to_str().replace("[INST]", "[INSU]")
        assert len(text) == len(made.backend_tokenizer.to_str())
        made._tokenizer = type(made.backend_tokenizer).from_str(text)
    again = prepare(config(rows), made, str(tmp_path)).train.fingerprint
    assert len(entries(tmp_path)) == 2
    if what == "rows":
        assert again != before


def test_one_byte_of_a_file_that_is_known_makes_another_entry(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its hash is not taken from the record: the kernel has noted the change, whatever the other times say."""
    monkeypatch.setattr(signatures, "_SETTLED", 0)
    before = prepare(config(rows), tokenizer(), str(tmp_path)).train.fingerprint
    stat = rows.stat()
    time.sleep(0.05)  # longer than a tick of the clock that files have
    rows.write_text(rows.read_text().replace("Hello", "Hullo"))
    os.utime(rows, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (rows.stat().st_size, rows.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    assert prepare(config(rows), tokenizer(), str(tmp_path)).train.fingerprint != before
    assert len(entries(tmp_path)) == 2


def test_from_the_cache_no_content_is_read(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a start does not grow with the set: neither its files nor those of the entry are hashed."""
    monkeypatch.setattr(signatures, "_SETTLED", 0)
    first = prepare(config(rows), tokenizer(), str(tmp_path))
    for name in ("tokens.bin", "trained.bin"):
        content = tmp_path / "tokens" / entries(tmp_path)[0].name / name
        assert content.stat().st_size > 0
    monkeypatch.setattr(hashlib, "file_digest", None)
    monkeypatch.setattr(storage, "_checksum", None)
    again = prepare(config(rows), tokenizer(), str(tmp_path))
    assert again.train.fingerprint == first.train.fingerprint
    assert again.train.largest_id == max(int(again.train.ids(i).max()) for i in range(len(again.train)))


def test_a_copy_of_an_entry_is_verified_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files have other signatures, so their content decides; then their signatures are known."""
    cached_rows(str(tmp_path / "a"), "key", write_three)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    summed: list[Path] = []
    checksum = storage._checksum

    def counted(path: Path) -> int:
        summed.append(path)
        return checksum(path)

    monkeypatch.setattr(storage, "_checksum", counted)
    for _ in range(3):
        cached_rows(str(tmp_path / "b"), "key", never)
    assert len(summed) == len(storage._FILES)
    assert len(list((tmp_path / "b" / "tokens" / "key").iterdir())) == len(storage._FILES) + 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Path:
    """A file system of one megabyte, where this machine lets a process have one of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    tried = subprocess.run(
        ["unshare", "-rm", "mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)], capture_output=True
    )
    if tried.returncode:
        pytest.skip(f"no file system of one's own here: {tried.stderr.decode().strip()}")
    return folder


def test_a_disk_that_fills_up(small_disk: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n".join(LINES * 5000))
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from app.data.prepare import prepare\n"
        "from app.errors import EnvironmentProblem\n"
        "from tests.data.small import config, tokenizer\n"
        "try:\n"
        f"    prepare(config({str(tmp_path / 'a.txt')!r}, 'text'), tokenizer(None), {str(small_disk)!r})\n"
        "except EnvironmentProblem as problem:\n"
        f"    print(list(Path({str(small_disk)!r}, 'tokens').iterdir()))\n"
        "    sys.exit(str(problem))\n"
    )
    mount = f"mount -t tmpfs -o size=1m none {small_disk} && exec "
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", f'{mount} "$0" -c "$1"', sys.executable, code],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    said = (
        f"cache_dir={small_disk}: cannot write the token cache: No space left on device; it needs more than "
    )
    assert done.stderr.strip().startswith(said), done.stderr
    assert int(done.stderr.removeprefix(said).split()[0].replace(",", "")) > 1 << 19
    assert done.stderr.strip().endswith(" bytes; make room there, or set cache_dir to another folder")
    assert done.stdout.strip() == "[]", "what was begun does not keep the disk full"


def test_a_full_disk_names_the_cache() -> None:
    said = r"^cache_dir=/c: cannot write the token cache: No space left"
    with (
        pytest.raises(EnvironmentProblem, match=said),
        disk_explained("/c"),
        Path("/dev/full").open("wb", buffering=0) as full,
    ):
        full.write(b"x")


def test_a_write_that_fails_half_way(tmp_path: Path) -> None:
    """The file size limit is the one full disk that any user can have."""
    (tmp_path / "a.txt").write_text("\n".join(LINES * 200))
    code = (
        "import resource, sys\n"
        "from app.data.prepare import prepare\n"
        "from app.errors import EnvironmentProblem\n"
        "from tests.data.small import config, tokenizer\n"
        f"made, section = tokenizer(None), config({str(tmp_path / 'a.txt')!r}, 'text')\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try:\n"
        f"    prepare(section, made, {str(tmp_path / 'cache')!r})\n"
        "except EnvironmentProblem as problem:\n"
        "    sys.exit(str(problem))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 4096
    assert done.stderr.strip().endswith("make room there, or set cache_dir to another folder"), done.stderr
    assert (
        f"cache_dir={tmp_path}/cache: cannot write the token cache: File too large; it needs" in done.stderr
    )
    assert entries(tmp_path / "cache") == []


def test_a_cache_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentProblem, match=r"^cache_dir=.*file: cannot write the token cache"):
        cached_rows(str(tmp_path / "file"), "key", write_three)
