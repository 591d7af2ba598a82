"""The form of the board: fields become settings, uploads become files, several values become a sweep."""

from io import BytesIO
from pathlib import Path

import pytest

from app.errors import AppError
from app.web.form import check_settings, defaults_of, is_sweep, options, proposed_name, settings_of
from app.web.uploads import MAX_UPLOAD_BYTES, check_upload_size, save_upload


def test_settings_of_empty_form_are_none() -> None:
    assert settings_of({}) == []
    assert settings_of({"model": "", "optimizer.lr": " ", "settings": "\r\n \n", "name": "mine", "what": "train"}) == []


@pytest.mark.parametrize(
    ("form", "settings"),
    [
        (
            {"settings": " seed=1\r\nschedule=linear", "adapter.r": "8", "recipe": "qlora", "model": "qwen"},
            ["recipe=qlora", "model=qwen", "adapter.r=8", "seed=1", "schedule=linear"],
        ),
        ({"dataset.path": "chat.jsonl"}, ["dataset=auto", "dataset.path=chat.jsonl"]),
        ({"dataset.path": "books/", "settings": "dataset=text"}, ["dataset.path=books/", "dataset=text"]),
        ({"model.path": "Qwen/Qwen3-8B"}, ["model=folder", "model.path=Qwen/Qwen3-8B"]),
        ({"dataset.path": "a b,c.csv"}, ["dataset=auto", 'dataset.path="a b,c.csv"']),
        ({"optimizer.lr": "1e-4,3e-4", "sweep": "rank"}, ["sweep=rank", "optimizer.lr=1e-4,3e-4"]),
    ],
)
def test_settings_of_filled_fields_are_typed_as_on_command_line(form: dict[str, str], settings: list[str]) -> None:
    assert settings_of(form) == settings
    assert is_sweep(settings) == ("sweep" in form)


def test_options_have_descriptions_and_only_datasets_with_rows() -> None:
    models, datasets, sweeps = (dict(options()[group]) for group in ("model", "dataset", "sweep"))
    assert models["qwen"] == "qwen: Qwen3 8B (open)"
    assert models[""] == "default (tiny)"
    assert {"auto", "alpaca", "sample"} <= datasets.keys()
    assert "sharegpt" not in datasets
    assert "lr" in sweeps
    assert "memory" not in sweeps, "it estimates and does not train"


def test_defaults_follow_choices_and_ignore_numbers_and_mistakes() -> None:
    small, large = defaults_of([]), defaults_of(["model=qwen", "recipe=qlora", "optimizer.lr=3", "sead=1"])
    assert (small["optimizer.lr"], small["dataset.max_length"]) == ("0.002", "256")
    assert (large["optimizer.lr"], large["dataset.max_length"]) == ("0.0002", "2048")
    assert defaults_of(["recipe=full"])["adapter.r"] == "none"


def test_proposed_name_is_unused_and_valid() -> None:
    assert proposed_name({}, []) == "tiny-lora"
    assert proposed_name({"model": "qwen", "recipe": "qlora"}, ["qwen-qlora", "qwen-qlora-2"]) == "qwen-qlora-3"
    assert proposed_name({"model.path": "/models/a b/"}, []) == "a_b-lora"


def test_check_counts_trials_and_reports_all_problems_of_a_sweep() -> None:
    assert check_settings(["optimizer.lr=1e-3,1e-4", "seed=1,2,3"], "train") == 6
    assert check_settings([], "memory") == 1
    with pytest.raises(AppError) as refused:
        check_settings(["optimizer.lr=1e-3,1e-4", "sead=1", "output_dir=x", "model.trust_remote_code=true,false"], "")
    told = refused.value.report()
    for word in ("seed", "output_dir=x: set by the run name", "model.trust_remote_code in the form is not accepted"):
        assert word in told
    with pytest.raises(AppError, match=r"optimizer\.lr: check data takes one run"):
        check_settings(["optimizer.lr=1e-3,1e-4"], "data")
    with pytest.raises(AppError, match="is not accepted because it decides which code runs"):
        check_settings(["sweep=optuna", "sweep.space.model.trust_remote_code=[true]"], "")


# ---- uploads


def test_upload_is_saved_under_safe_name_and_replaces_nothing(tmp_path: Path) -> None:
    def upload(name: str, text: bytes) -> str:
        return save_upload(tmp_path, name, BytesIO(text)).name

    assert upload("my chats.jsonl", b"one") == "my_chats.jsonl"
    assert upload("my chats.jsonl", b"two") == "my_chats-2.jsonl"
    assert upload("my chats.jsonl", b"one") == "my_chats.jsonl", "the same file is not stored twice"
    contents = {file.name: file.read_bytes() for file in (tmp_path / "uploads").iterdir()}
    assert contents == {"my_chats.jsonl": b"one", "my_chats-2.jsonl": b"two"}


@pytest.mark.parametrize(
    "name", ["../a.jsonl", "a/b.jsonl", "..\\a.jsonl", ".a.jsonl", "run.yaml", "a.py", "jsonl", ""]
)
def test_upload_with_other_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(AppError, match="upload"):
        save_upload(tmp_path, name, BytesIO(b"text"))
    assert list(tmp_path.iterdir()) == []


def test_upload_follows_no_link(tmp_path: Path) -> None:
    folder, private = tmp_path / "runs", tmp_path / "private.jsonl"
    (folder / "uploads").mkdir(parents=True)
    private.write_text("private")
    (folder / "uploads" / "a.jsonl").symlink_to(private)
    assert save_upload(folder, "a.jsonl", BytesIO(b"private")).name == "a-2.jsonl"
    assert private.read_text() == "private"
    (folder / "uploads").rename(folder / "other")
    (folder / "uploads").symlink_to(tmp_path)
    with pytest.raises(AppError, match="symbolic link"):
        save_upload(folder, "b.jsonl", BytesIO(b"text"))
    assert not (tmp_path / "b.jsonl").exists()


@pytest.mark.parametrize("length", [None, "", "-1", str(MAX_UPLOAD_BYTES + 1)])
def test_upload_of_unknown_or_large_size_is_refused(length: str | None) -> None:
    check_upload_size(str(MAX_UPLOAD_BYTES))
    with pytest.raises(AppError, match="larger than 2 GB"):
        check_upload_size(length)
