"""Whatever is wrong with what a user gives: one message, exit code 2, no traceback, and nothing half-written."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.assets import ROOT
from tests.conftest import REPO, RunApp
from tests.harness.runs import FINISHED, Ended, FinishedRuns, Zygote, content_of, refused

CHAT = ("dataset=messages", "dataset.eval_fraction=0")
FEW = ("dataset.max_rows=20", "dataset.eval_max_rows=5", "launch.threads=1")
MODEL = (*FEW, "model=llama", "dataset.max_length=128", "training.max_steps=1", "eval.samples=0")


def row(user: str, *, role: str = "assistant") -> str:
    return json.dumps({"messages": [{"role": "user", "content": user}, {"role": role, "content": "Yes."}]}) + "\n"


# ---- before anything is loaded


@pytest.mark.parametrize(
    ("module", "words", "message"),
    [
        ("app.train", ("training.max_stps=1", "modl=llama"), "error: 2 problems"),
        ("app.check", ("data", "dataset.max_lenght=3"), "Unknown setting dataset.max_lenght."),
        ("app.generate", ("run=empty", "prmpt=Hi"), "Unknown setting prmpt. Did you mean prompt?"),
    ],
)
def test_typo_is_reported_without_torch(
    run_app: RunApp, tmp_path: Path, module: str, words: tuple[str, ...], message: str
) -> None:
    (tmp_path / "torch.py").write_text("raise RuntimeError('torch was imported')")
    ended = run_app(*words, module=module, env={"PYTHONPATH": f"{tmp_path}:{REPO}"})
    refused(ended.returncode, ended.stdout, ended.stderr, message)


EARLY = [
    ("sed=1", "Unknown setting sed. Did you mean seed?"),
    ("dataset=auto dataset.path=no/such.jsonl", "dataset.path=no/such.jsonl: no such file or folder"),
    ("model.path=./no/such", "model.path=./no/such: no such folder. Set a folder with config.json"),
    ("model.chat_template=chatmll", "model.chat_template=chatmll is neither a file nor one of "),
    ("tracker=wandb", "tracker=wandb: not logged in"),
    ("parallel.offload=true", "parallel.offload=true keeps the shards of several processes in CPU RAM"),
    ("output_dir=file", "output_dir=file: not a folder"),
    ("output_dir=full", "output_dir=full: the folder is not empty and not a run"),
    ("resume=no/such", "resume=no/such: no such folder."),
    ("resume=auto", "resume=auto needs output_dir=, the folder of the run to resume."),
    ("dataset=chat.jsonl", "dataset=chat.jsonl: no such file in "),
    ("gpus=2", "Unknown setting gpus. Did you mean launch.num_processes=2?"),
    ("device=cuda", "Unknown setting device. Leave it out. A GPU is used if there is one"),
    ("model=zzz", "gemma4_26b_a4b and more. Or set model= to a folder or a hub id."),
    ("adapter.targets=all-linear", "Set adapter.targets=[all-linear]."),
]


@pytest.mark.parametrize(("given", "message"), EARLY, ids=[given for given, _ in EARLY])
def test_config_error_is_reported_before_loading(zygote: Zygote, tmp_path: Path, given: str, message: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").touch()
    ended = zygote.refused(tmp_path, *given.split(), WANDB_MODE="online", HOME=str(tmp_path / "full"), message=message)
    assert ended.stdout == ""
    left = {path.name for path in (*tmp_path.iterdir(), *(tmp_path / "full").iterdir())}
    ours = ("stdout", "stderr", "cache")
    assert {name for name in left if not name.startswith(ours)} == {"file", "full", "mine.txt"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("model=no/such/folder", "prompt=Hi"), "model.path=no/such/folder: no such folder."),
        (("run=empty", "prompts=no.txt"), "prompts=no.txt: no such file"),
        (("run=none", "prompt=Hi"), "run=none: no such folder."),
        (("run=empty", "prompt=Hi"), "run=empty: no final/ found"),
        (("run=swept", "prompt=Hi"), "run=swept: this is the folder of a sweep. Give the folder of one of its trials"),
    ],
)
def test_missing_run_is_reported(zygote: Zygote, tmp_path: Path, given: tuple[str, ...], message: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "swept").mkdir()
    (tmp_path / "swept" / "sweep.json").touch()
    zygote.refused(tmp_path, *given, module="app.generate", message=message)


# ---- with torch: forks of one process that has imported it


def refuses(zygote: Zygote, folder: Path, *given: str, message: str, **env: Any) -> Ended:
    """The output folder and its parents are as if nothing had been started."""
    ended = zygote.refused(folder, *given, "output_dir=made/for/this", **env, message=message)
    assert not (folder / "made").exists()
    return ended


ROWS = [
    ("", "dataset.path=rows.jsonl: has no rows"),
    (row("Hi") + '{"messages": [}\n', "rows.jsonl:2: column 15: Expecting value"),
    ('{"messages": [{"role": "user", "content": "x"}]}\n', "so there is nothing to train on (dataset.train_on=auto)"),
    (row("long " * 300), "are longer (longest: 609 tokens, first: rows.jsonl:1); raise it"),
]


@pytest.mark.parametrize(("rows", "message"), ROWS, ids=[message for _, message in ROWS])
def test_unusable_rows_are_reported(zygote: Zygote, tmp_path: Path, rows: str, message: str) -> None:
    (tmp_path / "rows.jsonl").write_text(rows)
    given = (*CHAT, "dataset.path=rows.jsonl", "dataset.on_overflow=error")
    ended = refuses(zygote, tmp_path, *given, message=message)
    assert "dataset." in ended.stderr


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("precision=tf32",), "precision=tf32 needs an NVIDIA GPU"),
        (("adapter.targets=[nothing]",), "adapter.targets"),
        (
            ("model.weights=random", "model.architecture.model_type=lllama"),
            "model.architecture.model_type=lllama: unknown model type",
        ),
        (("model.weights=random", "model.architecture.hidden_size=abc"), "'hidden_size' expected int, got str"),
        (
            ("model.weights=random", "model.architecture.hidden_size=193"),
            "193) is not a multiple of the number of attention heads",
        ),
        (("model.weights=random", "model.architecture.vocab_size=100"), "model.tokenizer=null: it has ids up to "),
    ],
)
def test_unsupported_model_or_machine_is_reported(
    zygote: Zygote, tmp_path: Path, given: tuple[str, ...], message: str
) -> None:
    refuses(zygote, tmp_path, *FEW, *given, message=message, CUDA_VISIBLE_DEVICES="")


def test_gated_model_without_network_is_reported(zygote: Zygote, tmp_path: Path) -> None:
    message = "model.path=meta-llama/Llama-3.1-8B-Instruct is not on this machine and could not be downloaded"
    ended = refuses(zygote, tmp_path, "model=llama", message=message, HF_HOME=str(tmp_path / "hub"))
    for advice in ("HF_TOKEN", "https://huggingface.co/meta-llama/", "model.path=DIR", "model.weights=random"):
        assert advice in ended.stderr


@pytest.fixture(scope="session")
def whole_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that can be trained on."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("model")
    numbers = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=1536, **numbers)).save_pretrained(folder)
    shutil.copytree(ROOT / "tiny", folder, dirs_exist_ok=True)
    return folder


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("model.safetensors", lambda file: file.rename(file.with_name("m.bin")), "only m.bin, which can run code"),
        ("tokenizer.json", lambda file: file.write_text("{"), "no tokenizer can be read"),
        ("chat_template.jinja", Path.unlink, "has no chat template. Set model.chat_template=FILE or one of alpaca"),
    ],
)
def test_incomplete_model_folder_is_reported(
    zygote: Zygote, tmp_path: Path, whole_model: Path, name: str, damage: Callable[[Path], object], message: str
) -> None:
    """Others in tests/model/test_load_base.py."""
    shutil.copytree(whole_model, tmp_path / "model")
    damage(tmp_path / "model" / name)
    refuses(zygote, tmp_path, *MODEL, "model.path=./model", "dataset=sample", message=message)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def saves_of(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("resume=null",), "set resume=auto to resume it"),
        (("resume=run/checkpoints/step-000006",), "the checkpoint is damaged (weights.safetensors"),
        (("resume=auto",), "resume=auto: every checkpoint in "),
        (("resume=run/final",), "resume=run/final: no checkpoint found."),
    ],
)
def test_untrusted_run_folder_stays_unchanged(
    zygote: Zygote, tmp_path: Path, finished: FinishedRuns, given: tuple[str, ...], message: str
) -> None:
    finished.copy(tmp_path / "run")
    for save in saves_of(tmp_path / "run"):
        flip(save / "weights.safetensors")
    before = content_of(tmp_path / "run")
    zygote.refused(tmp_path, *FINISHED["lora"], *given, "output_dir=run", message=message)
    assert content_of(tmp_path / "run") == before


def test_resume_with_other_settings_is_refused(zygote: Zygote, tmp_path: Path, finished: FinishedRuns) -> None:
    """From outside, into a new folder; in its own one in tests/full/command/test_resume.py."""
    before, save = content_of(finished()), saves_of(finished())[-1]
    changed, message = ("seed=7", "adapter.alpha=8"), "seed: the checkpoint has 0, this run has 7"
    ended = refuses(zygote, tmp_path, *FINISHED["lora"], *changed, f"resume={save}", message=message)
    assert "adapter.alpha: the checkpoint has 32" in ended.stderr
    assert content_of(finished()) == before
