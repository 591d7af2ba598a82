"""A misspelt name fails early, wherever it stands, and the message has the right one."""

import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.config import groups
from app.config.overrides import check_overrides, split_words
from app.config.schema import RunConfig
from app.config.validate import kinds, leaf_keys
from app.errors import ConfigError
from tests.config.small import refusal_of

GIVEN = [
    ("sed=1", "sed is not a key. Did you mean seed?"),
    ("training.max_stps=1", "training.max_stps is not a key. Did you mean training.max_steps?"),
    ("model.suggest.lr_ful=1", "model.suggest.lr_ful is not a key. Did you mean model.suggest.lr_full?"),
    ("+adapter.rnk=1", "adapter.rnk is not a key. Did you mean adapter.r?"),
    ("++trning.clip=1", "trning.clip is not a key. Did you mean training.clip?"),
    ("lr=1e-3", "lr is not a key. Did you mean optimizer.lr?"),
    ("max_steps=3", "max_steps is not a key. Did you mean training.max_steps?"),
    ("model=lllama", "model=lllama: there is no such model. Did you mean llama?"),
    ("optimiser=adamw", "Did you mean optimizer=adafactor|adamw|"),
    ("+recipi=lora", "recipi is neither a key nor a group. Did you mean recipe=full|"),
    ("optimizer=adamw_8_bit", "Did you mean adamw_8bit?"),
]

IN_YAML = [
    ("config.yaml", "seed: 0", "sed: 0", "sed is not a key. Did you mean seed?"),
    ("config.yaml", "  max_steps:", "  max_stps:", "Did you mean training.max_steps?"),
    ("config.yaml", "\ntraining:\n", "\ntrning:\n", "trning is not a key. Did you mean training?"),
    ("model/tiny.yaml", "  lr_adapter:", "  lr_adaptr:", "Did you mean model.suggest.lr_adapter?"),
    ("model/tiny.yaml", "\nsuggest:\n", "\nsuggst:\n", "model.suggst is not a key. Did you mean model.suggest?"),
    ("adapter/lora.yaml", "\nr: 32", "\nrank: 32", "adapter.rank is not a key."),
    ("recipe/lora.yaml", "  lr:", "  rl:", "optimizer.rl is not a key. Did you mean optimizer.lr?"),
    ("recipe/lora.yaml", "lr_adapter}", "lr_adaptor}", "optimizer.lr: Interpolation key 'model.suggest.lr_adaptor'"),
    ("recipe/lora.yaml", "/adapter: lora", "/adapter: lorra", "adapter/lorra"),
    ("optimizer/adamw.yaml", "kind: adamw", "kind: adamwx", "Did you mean adamw?"),
    ("dataset/_policy.yaml", "  text: text", "  txt: text", "Did you mean dataset.columns.text?"),
    ("schedule/cosine.yaml", "final_fraction: 0.1", "final_fraction: [", "schedule/cosine.yaml"),
]  # fmt: skip


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of conf/ that is in use."""
    copy = tmp_path / "conf"
    shutil.copytree(groups.CONF, copy)
    monkeypatch.setattr(groups, "CONF", copy)
    return copy


def replace(file: Path, right: str, wrong: str) -> None:
    text = file.read_text()
    assert text.count(right) == 1, f"{right!r} in {file}"
    file.write_text(text.replace(right, wrong))


@pytest.mark.parametrize(("given", "message"), GIVEN, ids=[given for given, _ in GIVEN])
def test_on_the_command_line(given: str, message: str) -> None:
    (problem,) = refusal_of(given)
    assert message in problem


@pytest.mark.parametrize(
    ("name", "right", "wrong", "message"), IN_YAML, ids=[f"{n} {w.strip()}" for n, _, w, _ in IN_YAML]
)
def test_in_a_yaml(conf: Path, name: str, right: str, wrong: str, message: str) -> None:
    replace(conf / name, right, wrong)
    assert any(message in problem for problem in refusal_of())


def test_several_in_yaml_and_their_wrong_values_come_together(conf: Path) -> None:
    replace(conf / "adapter/lora.yaml", "\nr: 32", "\nrank: 32")
    replace(conf / "config.yaml", "clip: 1.0", "clip: big")
    replace(conf / "optimizer/adamw.yaml", "beta1:", "bta1:")
    assert len(refusal_of()) == 3


def test_a_sweep_in_a_yaml_is_refused_too(conf: Path) -> None:
    replace(conf / "config.yaml", "hydra:\n", "hydra:\n  mode: MULTIRUN\n")
    assert refusal_of()[0].startswith("hydra.mode=MULTIRUN: a sweep is started by -m")


@pytest.mark.parametrize("given", ["training.max_stps=1", "+adapter.rnk=1", "model=lllama", "modl=llama", ""])
def test_torch_is_not_imported_for_it(given: str, app_env: dict[str, str], tmp_path: Path) -> None:
    """The empty one: a misspelt key in a YAML."""
    copy = tmp_path / "conf"
    shutil.copytree(groups.CONF, copy)
    replace(copy / "config.yaml", "seed: 0", "sed: 0")
    program = (
        "import sys; from pathlib import Path; from app.config import groups\n"
        f"groups.CONF = Path({str(copy)!r}); sys.argv = {['train', *([given] if given else [])]!r}\n"
        "from app import train\n"
        "try: train.main()\n"
        "finally: print(sorted({'torch', 'transformers', 'numpy', 'datasets'} & sys.modules.keys()))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, env=app_env
    )
    assert ended.returncode == 2
    assert ended.stdout == "[]\n"
    assert ended.stderr.startswith("error: ")
    assert "Did you mean" in ended.stderr


def swapped(key: str, at: int) -> str:
    return key[:at] + key[at + 1 : at + 2] + key[at] + key[at + 2 :]


SLIPS: list[Callable[[str, int], str]] = [
    swapped,
    lambda key, at: key[:at] + key[at + 1 :],
    lambda key, at: key[:at] + key[at] + key[at:],
    lambda key, at: f"{key[:at]}e{key[at + 1 :]}",
]


def test_nine_of_ten_slips_of_one_key_stroke_are_understood() -> None:
    keys = leaf_keys(RunConfig)
    dice = random.Random(0)
    understood = tried = 0
    while tried < 300:
        key = dice.choice(keys)
        slip = dice.choice(SLIPS)(key, dice.randrange(len(key)))
        if (
            slip in kinds(RunConfig)
            or not slip.strip(".")
            or ".." in slip
            or slip[0] == "."
            or slip[-1] == "."
        ):
            continue
        with pytest.raises(ConfigError) as refusal:
            check_overrides([f"{slip}=1"], RunConfig)
        tried += 1
        understood += key in str(refusal.value)
    assert understood >= 0.9 * tried, f"{understood} of {tried}"


@given(
    st.lists(st.text(max_size=12) | st.sampled_from(["seed", "=", "model", "${", "'", "[", "~", "+", ","]))
)
def test_whatever_is_typed_is_read_or_refused(parts: list[str]) -> None:
    with suppress(ConfigError):
        check_overrides(split_words(["".join(parts)])[0], RunConfig)
