"""Rules on combinations of keys, and keys that nothing in the run reads."""

from pathlib import Path
from typing import Any

import pytest

from app.config.load import compose_run
from app.config.rules import RULES, problems_of
from tests.config.small import refusal_of, run_with

NO_EVAL = {"dataset.eval_path": None}
FULL = {"adapter.kind": "none"}
TEXT = {"dataset.format": "text"}
BACKWARD = {"optimizer.in_backward": True, **FULL}
PAIRS = {
    "task.kind": "preference", "dataset.format": "preference", "preference.kind": "dpo", "dataset.max_length": 128
}  # fmt: skip
LABELS = {"dataset.format": "labelled_text", "task.kind": "classification"}

BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"dataset.max_length": 1000, "batching.tokens": 1000, "model.weights": "random"},
     "dataset.max_length=1000 exceeds the model's 512 positions"),
    ({"task.kind": "masked", "task.mask_share": 0.15}, "dataset.format=messages: task=masked needs plain text"),
    ({"task.kind": "masked", **TEXT}, "task.mask_share=0 masks nothing"),
    ({"dataset.train_on": "completion"}, "train_on=completion is not supported for dataset.format=messages"),
    ({"dataset.train_on": "last", **TEXT}, "dataset.format=text. Choose auto or all"),
    ({"dataset.thinking": "drop", **TEXT}, "dataset.thinking=drop has no effect: rows"),
    ({"dataset.thinking": "mask", "dataset.train_on": "all"}, "dataset.thinking=mask with dataset.train_on=all"),
    ({"task.kind": "classification"}, "dataset.format=messages: task=classification needs labels"),
    ({"dataset.format": "labelled_text"},
     "task=causal cannot train on labels"),
    ({"task.labels": ["a", "b"]}, "task.labels=[a, b] has no effect with task=causal. Set task=classification"),
    ({**LABELS, "task.labels": ["a"]}, "task.labels=[a]: at least two labels"),
    (
        {**LABELS, "task.problem": "regression", "task.class_weights": "balanced"},
        "task.class_weights=balanced with task.problem=regression: regression has no classes",
    ),
    ({**LABELS, "task.class_weights": [1.0, 0.0]}, "task.class_weights=[1.0, 0.0]: weights must be above 0 and finite"),
    (
        {**LABELS, "task.labels": ["a", "b"], "task.class_weights": [1.0]},
        "task.class_weights=[1.0] has 1 numbers for 2 labels of task.labels",
    ),
    ({"model.rope": "yarn"}, "model.rope=yarn needs model.rope_factor. Set model.rope_factor=4"),
    ({"model.add_tokens": ["<a>"]}, "model.add_tokens=[<a>]: adapters do not train the new embeddings. Set adapter.tr"),
    ({"model.add_tokens": ["<a>", "<a>"]}, "model.add_tokens=[<a>, <a>]: duplicate or empty token. Give"),
    ({"adapter.train_tokens": "new"}, "adapter.train_tokens=new without new tokens"),
    ({"eval.also": "x.jsonl", **NO_EVAL}, "eval.also=x.jsonl needs an eval set"),
    ({"eval.objective": "exact_match", **NO_EVAL}, "eval.objective=exact_match needs an eval set"),
    ({**LABELS, "task.labels": ["a", "b", "a"]}, "task.labels=[a, b, a]: duplicate label a"),
    ({**LABELS, "dataset.train_on": "all"},
     "train_on=all is not supported for dataset.format=labelled_text. Choose auto"),
    ({**LABELS, "dataset.on_overflow": "split"}, "dataset.on_overflow=split is not supported for dataset.format=label"),
    ({"dataset.columns.output": "*.output"}, "dataset.columns.output=*.output: use * for each element"),
    ({"dataset.columns.input": "a.*.input", "dataset.columns.output": "b.*.output"},
     "dataset.columns.input=a.*.input dataset.columns.output=b.*.output: rows come from the elements of one list"),
    ({"dataset.on_overflow": "split"}, "dataset.on_overflow=split is not supported for"),
    ({"dataset.path": None}, "dataset.path=null: no dataset"),
    ({"dataset.path": "random:", "dataset.random.length": 20}, "Set dataset.random.length=256, or dataset.ran"),
    ({"dataset.path": "random:", "dataset.random.shortest": 999}, "dataset.random.shortest=999 exceeds"),
    ({"dataset.path": "random:", "dataset.random.lengths": "zipf"}, "zipf has no effect: all rows have"),
    ({"dataset.sample": 9, "dataset.max_rows": 8}, "dataset.sample=9 and dataset.max_rows=8 both limit the rows"),
    ({"dataset.transform": "mine.py"}, "dataset.transform=mine.py: expected MODULE:FUNCTION, e.g. dataset"),
    (
        {"dataset.streaming": True, "dataset.split": "train[:9]"},
        "dataset.split=train[:9]: dataset.streaming=true reads whole splits. Set dataset.split=train and dataset.max",
    ),
    ({"dataset.workers": 2}, "dataset.workers=2 has no effect anymore: one process prepares the rows"),
    ({"dataset.eval_fraction": 0.1}, "dataset.eval_fraction=0.1 both set the eval set"),
    ({"dataset.eval_split": "test"}, "dataset.eval_split=test both set the eval set"),
    ({"checkpoint.final": "best", **NO_EVAL}, "checkpoint.final=best needs an eval set"),
    ({"eval.patience": 2, **NO_EVAL}, "eval.patience=2 needs an eval set"),
    ({"eval.at_start": True, **NO_EVAL}, "eval.at_start=true needs an eval set"),
    ({"checkpoint.final": "best", "eval.every": 0}, "needs evaluations during training. Set eval.every"),
    ({"training.freeze": ["lm_head"]}, "training.freeze=[lm_head] is for full fine-tuning; adapter.kind=lora"),
    ({"schedule.warmup_steps": 9}, "schedule.warmup_steps=9 and schedule.warmup_fraction=0.03 both set the warmup"),
    ({"adapter.r": 0}, "adapter.r=0 must be at least 1"),
    ({"adapter.alpha": 0}, "adapter.alpha=0 must be above 0"),
    ({"adapter.targets": []}, "adapter.targets is empty"),
    ({"training.recompute": 0, "training.offload": True},
     "training.offload=true needs gradient checkpointing, but training.recompute=0"),
    ({"training.tile": 64, "quantization.kind": "llm_int8"},
     "training.tile=64 is not supported with quantization.kind=llm_int8: the output of a row depends on the other"),
    ({"training.tile": 256}, "training.tile=256 is not below batching.tokens=256, so there is one tile. Set a smaller"),
    ({"quantization.kind": "nf4", "adapter.kind": "none"},
     "quantization.kind=nf4 needs adapter.kind=lora: a quantized base is frozen. Choose recipe=lora or qlora"),
    ({"quantization.group_size": 0}, "quantization.group_size=0: a byte has two weights. Set an even number (128), or"),
    ({"quantization.kind": "qat"},
     "quantization.kind=qat (quantization-aware training) is not supported with adapter.kind=lora"),
    ({"precision.trained": "bf16"},
     "precision.trained=bf16 is for full fine-tuning; with adapter.kind=lora the base"),
    ({"precision.trained": "bf16", **FULL},
     "precision.trained=bf16 needs precision=bf16, but precision.kind=auto. Set precision=bf16"),
    ({"optimizer.in_backward": True},
     "optimizer.in_backward=true is for full fine-tuning; with adapter.kind=lora"),
    ({**BACKWARD, "training.clip": 0, "optimizer.implementation": "loop"},
     "optimizer.implementation=loop steps all weights at once, but optimizer.in_backward=true steps them one by one"),
    ({"model.norm": "low"}, "model.norm=low is for full fine-tuning, but this run has adapter.kind=lora. Set rec"),
    ({"model.norm": "fp32", "precision.kind": "tf32", **FULL},
     "model.norm=fp32 is for bf16 or fp16, but precision=tf32 computes in fp32. Set precision=bf16"),
    ({"optimizer.kind": "adamw_8bit", "optimizer.embedding_states": "32bit"},
     "optimizer.embedding_states=32bit is for trained embeddings; adapter.kind=lora freezes them"),
    (BACKWARD, "does not support training.clip=1. Set training.clip=0, or optimizer.in_backward=false"),
    ({**BACKWARD, "training.clip": 0, "batching.accumulation": 4, "precision.kind": "fp16", "launch.num_processes": 2},
     "does not support batching.accumulation=4 and precision=fp16 and launch.num_processes=2. Set batching"),
    ({"model.weights": "random", "model.architecture": {}},
     "model.weights=random needs model.architecture with model_type"),
    ({"model.weights": "random", "model.path": "."}, "model.path=. has no effect with model.weights=random"),
    ({"resume": "no/such"}, "resume=no/such: no such folder"),
    ({"checkpoint.mirror": "s3://me:pass@bucket"}, "checkpoint.mirror: the URL must have no user, password, query"),
    ({"checkpoint.mirror": "s3://bucket?sig=pass"}, "checkpoint.mirror: the URL must have no user, password, query"),
    ({"checkpoint.mirror": "file:///", "output_dir": "/run"}, "checkpoint.mirror=file:///: /run is in output_dir=/run"),
    ({"checkpoint.mirror": "file:///run/copy", "output_dir": "/run"}, "/run/copy/run is in output_dir=/run"),
    ({"batching.tokens": "auto", "batching.packing": False},
     "batching.tokens=auto needs batching.packing=true: padded rows have no bins"),
    ({"batching.tokens": "auto", "training.clip": 0, **BACKWARD},
     "batching.tokens=auto needs several micro-batches per step, but optimizer.in_backward=true allows one"),
    ({"batching.tokens": "auto", "dataset.max_length": 300},
     "too few for dataset.max_length=300. Set batching.accumulation=2 or dataset.max_length=256."),
    ({"attention.kind": "own", "batching.packing": True},
     "attention=own (the model's own attention) cannot separate packed documents (batching.packing=true)"),
    ({"compile.kind": "blocks", "batching.packing": False},
     "compile=blocks: padded rows have variable shapes (batching.packing=false), which compiled"),
    ({"compile.kind": "blocks", "task.router_loss": 0.1},
     "compile=blocks: task.router_loss=0.1 reads routers inside compiled layers. Set compile=none, or task.router"),
    ({"compile.kind": "blocks", "quantization.kind": "llm_int8"},
     "compile=blocks: quantization.kind=llm_int8: the number of outlier columns differs in each layer and step. Set"),
    *(({"compile.kind": kind, "compile.graphs": True},
       f"does not support compile={kind}. Set compile=blocks, or compile.graphs=false.") for kind in ("none", "auto")),
    ({"compile.kind": "blocks", "compile.graphs": True, "training.recompute": 2, "batching.accumulation": 4,
      "parallel.kind": "fsdp"},
     "does not support training.recompute=2 and batching.accumulation=4 and parallel=fsdp. Set training"),
    ({"compile.kind": "blocks", "compile.backend": "eager", "compile.mode": "max-autotune-no-cudagraphs"},
     "compile.mode=max-autotune-no-cudagraphs needs compile.backend=inductor, not eager"),
    ({"compile.kind": "blocks", "compile.graphs": True, "training.profile_step": 3},
     "does not support training.profile_step=3. Set training.profile_step=null, or compile.graphs=false."),
    ({"compile.kind": "blocks", "compile.backend": "aot_eager", "compile.graphs": True},
     "compile.graphs=true is not supported with compile.backend=aot_eager, which runs kernels one by one"),
    ({"compile.kind": "blocks", "compile.backend": "cudagraphs"},
     "compile.backend=cudagraphs needs compile.graphs=true. Set compile.graphs=true"),
    *(({"compile.kind": "blocks", "compile.mode": mode},
       f"compile.mode={mode} records CUDA graphs and needs compile.graphs=true. Set compile.graphs=true")
      for mode in ("reduce-overhead", "max-autotune")),
    ({"parallel.tensor": 2}, "parallel.tensor=2: tensor parallelism is not supported"),
    ({"parallel.context": 2, "batching.packing": False, "training.neftune": 5},
     "parallel.context=2 slices packed rows and does not support batching.packing=false and training.neftune=5. Set "
     "batching.packing=true training.neftune=0, or parallel.context=1."),
    ({"parallel.context": 2, "quantization.kind": "llm_int8"}, "quantization.kind=llm_int8. Set quantization=int8, or"),
    ({"parallel.context": 2, "adapter.init": "eva"}, "does not support adapter.init=eva. Set adapter.init=default, or"),
    ({"parallel.context": 2, "parallel.overlap": True}, "does not support parallel.overlap=true"),
    ({"parallel.context": 2, "task.router_loss": 0.1}, "does not support task.router_loss=0.1. Set task.router_loss=0"),
    ({"parallel.context": 2, "launch.num_processes": 3},
     "launch.num_processes=3 is not a multiple of parallel.context=2. Set launch.num_processes=4, or parallel.context"),
    ({"parallel.context": 2, "compile.kind": "blocks"},
     "compile=blocks: parallel.context=2 exchanges heads between processes inside layers. Set compile=none, or"),
    ({"parallel.kind": "ddp", "parallel.offload": True},
     "parallel.offload=true keeps shards in CPU RAM, but parallel=ddp does not shard"),
    ({"parallel.kind": "fsdp", "parallel.overlap": True},
     "parallel.overlap=true is for parallel=ddp; parallel=fsdp always overlaps communication"),
    ({"parallel.kind": "fsdp", "optimizer.kind": "adafactor", **FULL},
     "optimizer=adafactor needs whole tensors, but parallel=fsdp shards them"),
    ({"batching.tokens": 100}, "dataset.max_length=256 exceeds the bin size (batching.tokens=100)"),
    ({**PAIRS, "preference.kind": "none"}, "preference=none does not match task=preference"),
    ({**PAIRS, "dataset.max_length": 200}, "a chosen/rejected pair has up to twice as many tokens"),
    ({**PAIRS, "adapter.dropout": 0.1}, "the reference model runs without it"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), BROKEN, ids=[str(changes) for changes, _ in BROKEN])
def test_rule_broken_one_problem(changes: dict[str, Any], message: str) -> None:
    (problem,) = problems_of(run_with(changes))
    assert message in problem


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rules_all_tested(rule: Any) -> None:
    assert any(list(rule(run_with(changes))) for changes, _ in BROKEN)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dataset.on_overflow": "split", **TEXT},
        {"dataset.format": "auto", "dataset.on_overflow": "split", "dataset.train_on": "completion"},
        {"dataset.columns.input": "a.*.input", "dataset.columns.output": "a.*.output"},
        {"dataset.eval_fraction": 0.1, **NO_EVAL},
        {"checkpoint.final": "best", "eval.patience": 3},
        {"adapter.kind": "none", "adapter.r": 0, "adapter.targets": []},
        {"model.weights": "pretrained", "model.path": ".", "model.architecture": {}},
        {"dataset.max_length": 512, "batching.tokens": 512},
        {"resume": "auto"},
        {"precision.trained": "bf16", "precision.kind": "bf16", **FULL},
        {"training.clip": 0, **BACKWARD},
        {"model.norm": "low", **FULL},
    ],
    ids=str,
)
def test_rules_valid_run_no_problem(changes: dict[str, Any]) -> None:
    assert problems_of(run_with(changes)) == []


def test_resume_folder_with_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "runs").mkdir()
    assert problems_of(run_with({"resume": "~/runs"})) == []


UNREAD = [
    ("recipe=full adapter.r=8", ["adapter.r=8: recipe=full trains no adapter. Leave it out, or choose recipe=lora."]),
    ("adapter=none adapter={r: 8}", ["adapter.r=8: adapter=none ignores it. Leave it out, or choose adapter=lora."]),
    ("optimizer=sgd optimizer.beta1=0.8 optimizer.eps=1e-6", ["optimizer.beta1=0.8: opt", "optimizer.eps=1e-06: opt"]),
    ("optimizer=lion_8bit optimizer.momentum=0.5", ["choose optimizer=muon or sgd."]),
    ("schedule.decay_fraction=0.1", ["schedule.decay_fraction=0.1: schedule=cosine ignores it"]),
    ("schedule=constant schedule.final_fraction=0.1", ["choose schedule=cosine or linear or wsd."]),
    ("task.mask_share=0.1", ["task.mask_share=0.1: task=causal ignores it"]),
    ("quantization.double_quant=true", ["Leave it out, or choose quantization=fp4 or nf4."]),
    ("quantization=fp8 quantization.double_quant=true", ["quantization=fp8 ignores it"]),
    (
        "compile.graphs=false tracker.project=a",
        ["compile.graphs=false: compile=auto", "tracker.project=a: tracker=none"],
    ),
    ("task.labels=[a,b]", ["task.labels=[a, b] has no effect with task=causal."]),  # of a rule, once
    ("optimizer.momentum=0.5 batching.tokens=9", ["dataset.max_length=256 exceeds", "optimizer.momentum=0.5: opt"]),
]
READ = (
    "recipe=qlora adapter.r=8 quantization.double_quant=false optimizer.eps=1e-6",
    "optimizer=muon optimizer.momentum=0.8 optimizer.beta2=0.95 optimizer.in_backward=false",
    "schedule=wsd schedule.decay_fraction=0.1 schedule.final_fraction=0.1",
    "experiment=llama_70b_small recipe=full quantization=none optimizer=adamw dataset=text dataset.path=a",  # its r=16
)


def words_of(line: str) -> list[str]:
    return line.replace("{r: 8}", "{r:8}").split()


@pytest.mark.parametrize(("line", "parts"), UNREAD, ids=[line for line, _ in UNREAD])
def test_typed_key_that_nothing_reads_refused(line: str, parts: list[str]) -> None:
    problems = refusal_of(*words_of(line))
    assert len(problems) == len(parts)
    for problem, part in zip(problems, parts, strict=True):
        assert part in problem


@pytest.mark.parametrize("line", READ)
def test_typed_key_that_is_read_and_key_of_yaml_taken(line: str) -> None:
    assert compose_run(words_of(line))
