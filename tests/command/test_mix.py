"""A mix through real runs: trained, told, scored again, swept."""

from pathlib import Path

from tests.data.small import chat, write_chats
from tests.runs import Zygote, refused

MIX = ("dataset=mix", "dataset.mix.chat.path=chat.jsonl", "dataset.mix.code.path=code.jsonl")
PLAIN = (
    "dataset.max_rows=null",
    "dataset.eval_fraction=0.2",
    "dataset.eval_max_rows=null",
    "training.max_steps=2",
    "eval.samples=0",
)


def sources(folder: Path) -> None:
    write_chats(folder / "chat.jsonl", *(chat("Hi", f"Hello {n}") for n in range(40)))
    write_chats(folder / "code.jsonl", *(chat("Hi", f"Print {n}") for n in range(15)), chat("Hi", "Hello 1"))


def test_impossible_mix_is_refused_early(zygote: Zygote, tmp_path: Path) -> None:
    sources(tmp_path)
    given = ("dataset.mix.code.path=cod.jsonl", "output_dir=run")
    ended = zygote.run(tmp_path, *MIX[:2], *given)
    refused(ended.code, ended.stdout, ended.stderr, "dataset.mix.code.path=cod.jsonl: no such file or folder")
    assert "did you mean code.jsonl or chat.jsonl?" in ended.stderr
    assert not (tmp_path / "run").exists()
