"""Overrides of the command line and of `from=FILE.yaml`: refused with the nearest name, or passed to the run."""

import json
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.config import conf_files
from app.config.arguments import is_sweep, split_arguments
from app.config.commands import check_config
from app.config.conf_files import choices_by_group
from app.config.load import compose_run
from app.config.overrides import RATE, check_overrides
from app.config.schema import RunConfig
from app.config.validate import field_types, leaf_keys, typed_only
from app.errors import AppError, ConfigError
from app.sweeps.sweep import plan_sweep
from tests.config.small import refusal_of
from tests.harness.composed import composed

REFUSED = [
    ("", "Unrecognized argument ''. Settings are key=value."),
    ("=3", "Unrecognized argument '=3'."),
    ("model.=3", "'model.=3' cannot be read"),
    ("model.add_tokens=[<x>]", "Quote the value: 'model.add_tokens=[\"...\"]'"),
    ("~resume", "~resume: settings cannot be removed. Set resume=none, null or 0."),
    ("model@here=tiny", "model@here=tiny: packages (@) are not supported. Write model=..."),
    ("model=null", "model=null: unknown model. Choose one of bert, bert_large, folder, gemma3_"),
    ("model=_hub", "model=_hub: unknown model."),
    ("model=lllama", "model=lllama: unknown model. Did you mean llama?"),
    ("dataset=aplaca", "dataset=aplaca: unknown dataset. Did you mean alpaca?"),
    ("dataset=zzz", "and more. Or set dataset= to a file, a folder or a hub id."),
    ("model=ORG/A,ORG/B", "several values make a sweep; add -m: finetune train -m model="),
    ("recipe=loar", "recipe=loar: unknown recipe. Did you mean lora?"),
    ("modl=llama", "Unknown setting modl. Did you mean model=bert|bert_large|folder|gemma3_"),
    ("sed=1", "Unknown setting sed. Did you mean seed?"),
    ("training.max_stps=1", "Unknown setting training.max_stps. Did you mean training.max_steps?"),
    ("model.suggest.lr_ful=1", "Unknown setting model.suggest.lr_ful. Did you mean model.suggest.lr_full?"),
    ("++trning.clip=1", "Unknown setting trning.clip. Did you mean training.clip?"),
    ("output=runs/a", "Unknown setting output. Did you mean output_dir or dataset.columns.output?"),
    ("lr=1e-3", "Unknown setting lr. Did you mean optimizer.lr?"),
    ("dataset={pth: a}", "Unknown setting dataset.pth. Did you mean dataset.path?"),
    ("seed=1,2", "seed=1,2: several values make a sweep; add -m: finetune train -m seed=..."),
    ("seed=range(1,3)", "several values make a sweep"),
    ("dataset.path=a,b", "For text with a comma write 'dataset.path=\"a,b\"'."),
    ("adapter.targets=a,b", "For a list write adapter.targets=[a,b]."),
    ("hydra.mode=MULTIRUN", "Unknown setting hydra.mode."),
    ("hydra/launcher=basic", "Unknown setting hydra/launcher."),
    ("seed=${sed}", "seed: Interpolation key 'sed' not found."),
    ("seed=${oc.env:NO_SUCH_NAME}", "seed: Environment variable 'NO_SUCH_NAME' not found."),
    ("model.suggest=3", "model.suggest=3: model.suggest is a section."),
    ("launch=slurm", "Submit a job: sbatch scripts/cluster/slurm.sh output_dir=DIR ...; see docs/clusters.md."),
    ("launch=ray", "ray job submit -- python scripts/cluster/ray_job.py"),
    ("launch.nodes=2", "Unknown setting launch.nodes. A run on several machines is started by their launcher"),
    ("nnodes=2", "skypilot.yaml, dstack.yaml or ray_job.py; see docs/clusters.md."),
    ("checkpoint.mirror=/backup", "checkpoint.mirror=/backup: expected a URL like s3://bucket/runs"),
    ("checkpoint.mirror=ftp://host/runs", "checkpoint.mirror=ftp://host/runs: expected a URL like s3://"),
    ("model.architecture.hidden_size=64", "has no effect with model.weights=pretrained, which reads"),
    (f"seed={'[' * 200}{']' * 200}", "cannot be read: the key is too long or the brackets are nested too deeply."),
    (f"model.architecture={'{a: ' * 200}1{'}' * 200}", "nested too deeply"),
    (f"model.architecture.{'.'.join('a' * 500)}=1", "the key is too long"),
    (f"seed={'9' * 5000}", "cannot be read: Exceeds the limit"),
]  # fmt: skip

IN_YAML = [
    ("config.yaml", "seed: 0", "sed: 0", "Unknown setting sed. Did you mean seed?"),
    ("config.yaml", "\ntraining:\n", "\ntrning:\n", "Unknown setting trning. Did you mean training?"),
    ("model/tiny.yaml", "\nsuggest:\n", "\nsuggst:\n", "Unknown setting model.suggst. Did you mean model.suggest?"),
    ("adapter/lora.yaml", "\nr: 32", "\nrank: 32", "Unknown setting adapter.rank."),
    ("recipe/lora.yaml", "lr_adapter}", "lr_adaptor}", "optimizer.lr: Interpolation key 'model.suggest.lr_adaptor'"),
    ("recipe/lora.yaml", "/adapter: lora", "/adapter: lorra", "adapter/lorra"),
    ("optimizer/adamw.yaml", "kind: adamw", "kind: adamwx", "Did you mean adamw?"),
    ("schedule/cosine.yaml", "final_fraction: 0.1", "final_fraction: [", "schedule/cosine.yaml"),
]  # fmt: skip


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of conf/ that is in use."""
    copy = tmp_path / "conf"
    shutil.copytree(conf_files.CONF, copy)
    monkeypatch.setattr(conf_files, "CONF", copy)
    return copy


def replace(file: Path, right: str, wrong: str) -> None:
    text = file.read_text()
    assert text.count(right) == 1, f"{right!r} in {file}"
    file.write_text(text.replace(right, wrong))


@pytest.mark.parametrize(("given", "message"), REFUSED, ids=[given[:60] for given, _ in REFUSED])
def test_overrides_invalid_one_problem_each(given: str, message: str) -> None:
    (problem,) = refusal_of(given)
    assert message in problem


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ("model=Qwen/Qwen3-0.6B", ["model=folder", "model.path=Qwen/Qwen3-0.6B"]),
        ("model=mine", ["model=folder", "model.path=mine"]),
        ("model=llama", ["model=llama"]),  # a choice, though there is a folder of that name
        ("dataset=tatsu-lab/alpaca", ["dataset=auto", "dataset.path=tatsu-lab/alpaca"]),
        ("dataset='my rows.csv'", ["dataset=auto", "dataset.path='my rows.csv'"]),
    ],
)
def test_place_typed_for_choice_is_path(
    short: str, long: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "llama"):
        (tmp_path / name).mkdir()
    (tmp_path / "my rows.csv").touch()
    assert check_overrides([short]) == check_overrides(long)
    if short == "model=mine":
        assert compose_run(["output_dir=a", short]) == check_config(["output_dir=a", short]).run


@pytest.mark.parametrize(
    ("name", "right", "wrong", "message"), IN_YAML, ids=[f"{n} {w.strip()}" for n, _, w, _ in IN_YAML]
)
def test_conf_file_with_mistake_reported(conf: Path, name: str, right: str, wrong: str, message: str) -> None:
    replace(conf / name, right, wrong)
    assert any(message in problem for problem in refusal_of())


def test_overrides_several_mistakes_reported_together(conf: Path) -> None:
    words = ("sed=1", "model=lllama", "training.max_stps=3", "~seed", "x", "+adapter.rr=2")
    assert len(refusal_of(*words)) == 6
    replace(conf / "adapter/lora.yaml", "\nr: 32", "\nrank: 32")
    replace(conf / "config.yaml", "clip: 1.0", "clip: big")
    replace(conf / "optimizer/adamw.yaml", "beta1:", "bta1:")
    assert len(refusal_of()) == 3


def test_overrides_misspelt_key_and_wrong_value_both_reported() -> None:
    assert refusal_of("optimizer.lrr=3", "optimizer.lr=-1", "adapter.r=x", "training.clip=1") == [
        "Unknown setting optimizer.lrr. Did you mean optimizer.lr?",
        "adapter.r=x: expected a whole number.",
        "optimizer.lr=-1.0 must be above 0.",
    ]
    # what may follow from a misspelt word is not told
    problems = refusal_of("dataset=messages", "dataset.pth=rows.jsonl", "batching.tokns=64")
    assert [problem.split()[2].rstrip(".") for problem in problems] == ["dataset.pth", "batching.tokns"]


SLIPS: list[Callable[[str, int], str]] = [
    lambda key, at: key[:at] + key[at + 1 : at + 2] + key[at] + key[at + 2 :],
    lambda key, at: key[:at] + key[at + 1 :],
    lambda key, at: key[:at] + key[at] + key[at:],
    lambda key, at: f"{key[:at]}e{key[at + 1 :]}",
]


def test_did_you_mean_single_typo_finds_key() -> None:
    keys, dice = leaf_keys(RunConfig), random.Random(0)
    understood = tried = 0
    while tried < 200:
        key = dice.choice(keys)
        slip = dice.choice(SLIPS)(key, dice.randrange(len(key)))
        if slip in field_types(RunConfig) or not all(slip.split(".")):
            continue
        with pytest.raises(ConfigError) as refusal:
            check_overrides([f"{slip}=1"])
        tried += 1
        understood += key in str(refusal.value)
    assert understood >= 0.9 * tried, f"{understood} of {tried}"


@given(st.lists(st.text(max_size=12) | st.sampled_from(["seed", "=", "model", "${", "'", "[", "~", "+", ","])))
def test_overrides_any_text_read_or_refused(parts: list[str]) -> None:
    with suppress(ConfigError):
        check_overrides(split_arguments(["".join(parts)])[0])


# ---- what reaches the run

TAKEN: list[list[tuple[str, str, Any]]] = [
    [
        ("model.weights=random", "model.weights", "random"),
        ("model.architecture.hidden_size=64", "model.architecture.hidden_size", 64),
        ("model.architecture.rope_scaling={type: linear}", "model.architecture.rope_scaling.type", "linear"),
        ("+model.architecture.another=3", "model.architecture.another", 3),
        ("++seed=5", "seed", 5),
        ("adapter.targets=[q_proj,v_proj]", "adapter.targets", ["q_proj", "v_proj"]),
        ("dataset.columns={messages: talk}", "dataset.columns.messages", "talk"),
        ("dataset={max_rows: 3}", "dataset.max_rows", 3),
        ("eval={every: 7}", "eval.every", 7),
        ("training.max_steps=null", "training.max_steps", None),
        ('dataset.path="a=b,c.jsonl"', "dataset.path", "a=b,c.jsonl"),
        ("dataset.eval_path=null", "dataset.eval_path", None),
        ("output_dir=~/my runs", "output_dir", "~/my runs"),
        ("model.revision=12e4567", "model.revision", "12e4567"),
    ],
    [
        ("dataset.path=a=b.jsonl", "dataset.path", "a=b.jsonl"),
        ("dataset.eval_path=held.jsonl", "dataset.eval_path", "held.jsonl"),
        ("output_dir=a(b)", "output_dir", "a(b)"),
        ("+seed=6", "seed", 6),
        ("model.revision=007", "model.revision", "007"),
        ("tracker=wandb", "tracker.name", None),
        ("tracker.project=1.50", "tracker.project", "1.50"),
        ("+model=llama", "model.architecture.num_hidden_layers", 32),
        ("cache_dir=${seed}", "cache_dir", "6"),
        ("experiment=null", "training.max_steps", None),
        ("debug=null", "record.every", 5),
        ("schedule.warmup_steps=50", "schedule.warmup_fraction", None),
    ],
    [
        ("++model=qwen", "model.architecture.num_hidden_layers", 36),
        ("+experiment=first_run", "seed", 0),
        ("++debug=fast", "record.every", 1),
        ("schedule.warmup_steps=null", "schedule.warmup_steps", None),
        ("schedule={warmup_fraction: 0.5}", "schedule.warmup_fraction", 0.5),
    ],
]


@pytest.mark.parametrize("taken", TAKEN)
def test_overrides_reach_run(taken: list[tuple[str, str, Any]]) -> None:
    run = compose_run([word for word, _, _ in taken])
    for word, key, value in taken:
        place: Any = run
        for name in key.split("."):
            place = place[name] if isinstance(place, dict) else getattr(place, name)
        assert (place, type(place)) == (value, type(value)), word


def test_overrides_last_one_wins() -> None:
    run = compose_run(["seed=1", "model=llama", "debug=fast", "seed=2", "model=qwen", "~debug"])
    assert (run.seed, run.model.path, run.training.max_steps) == (2, "Qwen/Qwen3-8B", None)
    run = compose_run(["recipe=lora", "adapter.r=4", "optimizer=sgd", "experiment=first_run", "model=llama"])
    assert (run.adapter.r, run.optimizer.kind, run.model.path.partition("/")[0]) == (4, "sgd", "meta-llama")


def test_overrides_key_inside_list_refused() -> None:
    words = ["model.weights=random", "model=llama", "model.architecture.eos_token_id.x=3"]
    with pytest.raises(ConfigError, match=r"model\.architecture\.eos_token_id\.x is inside a list"):
        compose_run(words)


@pytest.mark.parametrize(
    ("given", "weights", "length"),
    [
        (["model.path=some/folder"], "pretrained", 2048),
        (["++model.path='some/folder'"], "pretrained", 2048),
        (["model=llama", "model.path=some/folder"], "pretrained", 2048),
        (["model.path=asset:tiny", "model.weights=random"], "random", 256),
        ([], "pretrained", 256),
    ],
)
def test_model_path_alone_chooses_folder_model(given: list[str], weights: str, length: int) -> None:
    run = compose_run(given)
    assert (run.model.weights, run.dataset.max_length) == (weights, length)


# ---- switches


def test_split_arguments_mixed_switches_and_overrides() -> None:
    words = ["seed=1", "--cfg", "job", "adapter.r=3"]
    assert split_arguments(words) == (["seed=1", "adapter.r=3"], ["--cfg job"], [])


WRONG_SWITCHES = [
    (["-m", "seed=1,2"], False, "-m starts a sweep, but this command takes one run."),
    (["--multirun"], False, "-m starts a sweep, but this command takes one run."),
    (["--output-dir=runs"], False, "Settings are written without dashes: output_dir=runs"),
    (["--resume", "auto"], False, "Unknown option --resume"),
    (["--cfg", "jobb"], False, "--cfg jobb: only --cfg job is supported."),
    (["--config-name=mine"], False, "--config-name is not supported: configs live in conf/"),
    (["--config-dir", "here"], False, "--config-dir is not supported: configs live in conf/"),
    (["--experimental-rerun", "a.pickle"], False, "Unknown option --experimental-rerun."),
    (["--cfg", "job", "-m"], True, "--cfg job applies to one run and cannot be combined with -m."),
    (["-m", "--help", "seed=1,2"], True, "--help applies to one run and cannot be combined with -m"),
    (["-m", "--resume", "auto"], True, "Unknown option --resume"),
    (["-m", "--config-name=mine"], True, "--config-name is not supported: configs live in conf/"),
]


@pytest.mark.parametrize(("words", "sweep", "message"), WRONG_SWITCHES)
def test_split_arguments_unknown_switch_refused(words: list[str], sweep: bool, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        split_arguments(words, sweep=sweep)
    (problem,) = refusal.value.problems
    assert message in problem


@pytest.mark.parametrize(
    ("words", "sweep"),
    [
        *((["-m", "seed=1,2"], True), (["seed=1,2", "--multirun"], True), (["-m"], True)),
        *(([], False), (["seed=1,2"], False), (["--cfg", "job"], False), (["dataset.path=-m"], False)),
    ],
)
def test_is_sweep_by_switch(words: list[str], sweep: bool) -> None:
    assert is_sweep(words) is sweep
    settings = [word for word in words if word[:1] != "-" and word != "job"]
    assert split_arguments(words, sweep=sweep)[0] == settings


OTHERS = {"model": "model=tiny", "dataset": "dataset=sample"}  # sections without a kind

SETTINGS = r"""
recipe: lora
optimizer: {lr: 1e-4}
optimizer.weight_decay: 0.1
schedule.warmup_steps: 10
adapter:
  r: 8
  targets: [q_proj, v_proj]
training: {max_steps: 3, epochs: 2}
tracker: mlflow
tracker.name: "say \"it\" for ${HOME} \\ 'x'\nagain"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "my.yaml"
    file.write_text(SETTINGS)
    return file


def run_of(*arguments: str) -> RunConfig:
    return compose_run(split_arguments(arguments)[0])


def refusal(*arguments: str) -> str:
    with pytest.raises(AppError) as refused:
        run_of(*arguments)
    return str(refused.value)


def test_settings_file_equals_its_settings_typed(file: Path) -> None:
    config = run_of(f"from={file}", "tracker.name=x")
    typed = (
        "recipe=lora",
        "optimizer.lr=1e-4",
        "optimizer.weight_decay=0.1",
        "schedule.warmup_steps=10",
        "adapter.r=8",
    )
    more = ("adapter.targets=[q_proj,v_proj]", "training.max_steps=3", "tracker=mlflow", "tracker.name=x")
    wanted = run_of(*typed, *more, "training.epochs=2")
    config.output_dir = wanted.output_dir  # has the time
    assert config == wanted
    assert run_of(f"from={file}").tracker.name == "say \"it\" for ${HOME} \\ 'x'\nagain"


def test_settings_file_typed_words_win(file: Path) -> None:
    config = run_of(f"from={file}", "optimizer=sgd", "optimizer.lr=1", "schedule.warmup_fraction=0.1")
    assert (config.optimizer.kind, config.optimizer.lr, config.optimizer.weight_decay) == ("sgd", 1.0, 0.0)
    assert (config.schedule.warmup_steps, config.schedule.warmup_fraction) == (None, 0.1)
    file.write_text("model: org/name\ndataset: data/a.jsonl\nmodel.suggest.length: 100")
    config = run_of(f"from={file}")
    assert (config.model.path, config.dataset.path) == ("org/name", "data/a.jsonl")
    assert run_of(f"from={file}", "dataset=data/b.jsonl").dataset.path == "data/b.jsonl"
    file.write_text("optimizer: sgd\noptimizer.weight_decay: 0.1\noptimizer.momentum: 0.5")
    optimizer = run_of(f"from={file}", "optimizer={weight_decay: 0.2}").optimizer
    assert (optimizer.kind, optimizer.weight_decay, optimizer.momentum) == ("sgd", 0.2, 0.5), "a mapping is its keys"


def test_settings_file_typed_group_replaces_its_section(file: Path) -> None:
    usual, settings, words = composed(), dict[str, Any](), dict[str, str]()
    for group in (each for each in choices_by_group() if each in RunConfig.__dataclass_fields__):
        keys = [key for key in leaf_keys(RunConfig) if key.startswith(f"{group}.") and key != RATE]
        keys = [key for key in keys if not typed_only(RunConfig, key)]
        section = {group: "nosuch", **{key: ["nosuch"] for key in keys}}
        file.write_text(json.dumps(section))
        settings |= section
        word = words[group] = OTHERS.get(group) or f"{group}={getattr(usual, group).kind}"
        assert split_arguments([f"from={file}", word]).notes == [
            f"note    from={file}: {word} replaces {', '.join(keys)}"
        ]
        assert not split_arguments([f"from={file}", "seed=1"]).notes
    file.write_text(json.dumps(settings))
    found, expected = run_of(f"from={file}", *words.values()), run_of(*words.values())
    assert [getattr(found, group) for group in words] == [getattr(expected, group) for group in words]
    problems = refusal(f"from={file}")
    assert [group for group in words if f"{group}=nosuch" not in problems] == []


def test_settings_file_typed_place_replaces_the_file_model(file: Path) -> None:
    file.write_text("model.path: org/base\nmodel.revision: old\nmodel.suggest.length: 100\noptimizer.lr: 3e-4")
    assert run_of(f"from={file}", "model=llama3_2_1b").model == run_of("model=llama3_2_1b").model
    given = [f"from={file}", "model=Qwen/Qwen3-1.7B", "optimizer=sgd"]
    config = run_of(*given)
    assert (config.model.path, config.model.revision) == ("Qwen/Qwen3-1.7B", None)
    assert config.optimizer.lr == 3e-4, "the rate is not the optimizer's"
    (note,) = split_arguments(given).notes
    assert note.endswith(": model=Qwen/Qwen3-1.7B replaces model.revision, model.suggest.length")
    assert plan_sweep(["-m", *given, "seed=1,2"], lambda _run: None).notes[0] == note


@pytest.mark.parametrize(
    ("settings", "typed", "held_out"),
    [
        ("dataset: text", "dataset.eval_path=b.txt", ("b.txt", 0.0)),
        ("dataset.eval_fraction: 0.1", "dataset.eval_path=b.txt", ("b.txt", 0.0)),
        ("dataset.eval_path: b.txt", "dataset.eval_fraction=0.1", (None, 0.1)),
        ("dataset.eval_path: b.txt", "dataset.eval_fraction=0", ("b.txt", 0.0)),
        ("dataset: text", "dataset.eval_fraction=0.3", (None, 0.3)),
    ],
)
def test_settings_file_typed_eval_rows_replace_the_others(
    file: Path, settings: str, typed: str, held_out: tuple[str | None, float]
) -> None:
    file.write_text(f"dataset: text\ndataset.path: a.txt\n{settings.removeprefix('dataset: text')}")
    dataset = run_of(f"from={file}", typed).dataset
    assert (dataset.eval_path, dataset.eval_fraction) == held_out


def test_settings_file_serves_sweeps_and_checks(file: Path) -> None:
    runs = plan_sweep(["-m", f"from={file}", "optimizer.lr=1e-3,1e-5"], lambda _run: None).runs
    assert [(run.optimizer.lr, run.adapter.r) for run in runs] == [(1e-3, 8), (1e-5, 8)]
    assert check_config(["memory", f"from={file}"]).run.adapter.r == 8


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("optimizer: {lrr: 1}", "Unknown setting optimizer.lrr. Did you mean optimizer.lr?"),
        ("recipe: full\nadapter.r: 4", "adapter.r=4: recipe=full trains no adapter"),
        ("model.trust_remote_code: true", "model.trust_remote_code in"),
        ("hydra: {callbacks: {a: {_target_: os.system}}}", "Unknown setting hydra.callbacks.a._target_."),
        (
            "cache_dir: /tmp/x",
            "is not accepted because it decides which code runs. If you trust the source, type cache_dir=/tmp/x",
        ),
        ("launch: {num_processes: 500}", "type launch.num_processes=500 on the command line."),
        ("launch.threads: 9", "launch.threads in"),
        ("+seed: 1", "my.yaml: invalid setting name. Write section.key or group, without + ~ @ or /."),
        ("varied_from: other.yaml", "no run.yaml found"),
        ("recipe: [", "settings cannot be read"),
        ("- recipe", "the file has no settings"),
        ("a: &a [1]\nb: *a", "it has an alias"),
        ("training.max_steps: three", "training.max_steps=three"),
    ],
)
def test_settings_file_that_is_wrong_is_refused(file: Path, settings: str, message: str) -> None:
    file.write_text(settings)
    assert message in refusal(f"from={file}")


def test_settings_file_that_is_none_is_refused(tmp_path: Path) -> None:
    assert "no such file" in refusal(f"from={tmp_path / 'no.yaml'}")
    (tmp_path / "manifest.json").write_text("{}")
    (tmp_path / "run.yaml").write_text("seed: 1")
    assert f"Use its folder: from={tmp_path}" in refusal(f"from={tmp_path / 'run.yaml'}")


def test_settings_file_of_another_program_is_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("axolotl.yaml").write_text(
        "base_model: org/name\nadapter: lora\nlora_r: 8\nlora_dropout: 0.1\ndatasets: [{path: a.jsonl}]\n"
        "trust_remote_code: true\nmodel: {trust_remote_code: true}\ndataset_prepared_path: /tmp/x\nhydra: {x: 1}\n"
    )
    run = run_of("from=axolotl.yaml", "adapter.r=4")
    assert (run.model.path, run.adapter.r, run.adapter.dropout) == ("org/name", 4, 0.1)
    assert not run.model.trust_remote_code
    assert run.cache_dir == run_of().cache_dir
    lines = split_arguments(["from=axolotl.yaml", "dataset=b.jsonl"]).notes
    assert "converted     lora_r: 8 -> adapter.r=8" in lines
    assert "not converted hydra.x  no equivalent setting; see docs/keys.md" in lines
    assert lines[-2] == "Axolotl: 5 settings converted, 1 not needed, 3 not converted"
    assert lines[-1].startswith("note    from=axolotl.yaml: dataset=b.jsonl replaces dataset.path")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("base_model: a\nrl: grpo\n", "rl: grpo: this training objective is not supported."),
        ("a: 1\nb: 2\nc: 3\n", "none of its 3 settings is one of this program, and it is not a config of Axolotl,"),
    ],
)
def test_settings_file_that_cannot_be_converted_has_one_error(text: str, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refusal:
        split_arguments([f"from={file}"])
    assert [message[: len(f"from={file}: {problem}")] for message in refusal.value.problems] == [
        f"from={file}: {problem}"
    ]


def test_missing_data_file_names_similar_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chat210.jsonl").touch()
    assert refusal_of("dataset=chat.jsonl") == [
        f"dataset=chat.jsonl: no such file in {tmp_path}. Similar: dataset=chat210.jsonl."
    ]
