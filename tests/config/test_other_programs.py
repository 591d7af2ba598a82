"""Settings of other programs in error messages for unknown keys and values."""

from collections import Counter

import pytest

from app.config.arguments import split_arguments
from app.config.conf_files import choices_by_group
from app.config.load import compose_run
from app.config.overrides import partition_overrides
from app.config.schema import RunConfig
from app.config.validate import PROGRAMS, is_key, of_other_program, other_programs
from app.errors import ConfigError

ROWS = other_programs()
NAMES = {name: row for row in ROWS for program in PROGRAMS for name in row.get(program, ())}

TOLD = [
    ("--learning_rate 2e-4", "Unknown option --learning_rate. Did you mean optimizer.lr=2e-4?"),
    ("--learning-rate=2e-4", "Unknown option --learning-rate=2e-4. Did you mean optimizer.lr=2e-4?"),
    ("learning_rate=2e-4", "Unknown setting learning_rate. Did you mean optimizer.lr=2e-4?"),
    ("training.learning_rate=2e-4", "Unknown setting training.learning_rate. Did you mean optimizer.lr=2e-4?"),
    ("training.optim=adamw_bnb_8bit", "Unknown setting training.optim. Did you mean optimizer=adamw_8bit?"),
    ("--load_in_4bit", "Unknown option --load_in_4bit. Did you mean recipe=qlora?"),
    ("+load_in_4bit=True", "Unknown setting load_in_4bit. Did you mean recipe=qlora?"),
    ("adapter=qlora", "adapter=qlora: unknown adapter. Did you mean recipe=qlora?"),
    ("lora_r=16", "Did you mean adapter.r=16?"),
    ("gradient_accumulation_steps=4", "Did you mean batching.accumulation=4?"),
    ("num_epochs=3", "Did you mean training.epochs=3?"),
    ("val_set_size=0.02", "Did you mean dataset.eval_fraction=0.02?"),
    ("per_device_train_batch_size=2", "Did you mean batching.rows=2? With batching.packing=false; packed"),
    ("sample_packing=true", "Did you mean batching.packing=true?"),
    ("save_steps=100", "Did you mean checkpoint.every=100?"),
    ("template=qwen", "Did you mean model.chat_template=qwen?"),
    ("cutoff_len=2048", "Did you mean dataset.max_length=2048?"),
    ("report_to=wandb", "Did you mean tracker=wandb?"),
    ("lr_scheduler_type=polynomial", "Did you mean schedule=constant|cosine|linear|wsd?"),
    ("warmup_steps=10", "Did you mean schedule.warmup_steps=10?"),
    ("use_dora=true", "Unknown setting use_dora. Did you mean adapter.dora=true?"),
    ("--config my.yaml", "Unknown option --config. Did you mean from=FILE.yaml? A settings file uses"),
    ("my.yaml", "Unrecognized argument 'my.yaml'. Settings are key=value. Did you mean from=my.yaml?"),
    (
        "parallel=deepspeed",
        "Did you mean parallel=zero3? Uses torch's FSDP2; parallel=zero2 for stage 2. DeepSpeed is not",
    ),
    ("parallel=megatron", "Did you mean parallel=fsdp? Megatron is not supported because it needs models written"),
    ("parallel=nvme", "Did you mean parallel=fsdp parallel.offload=true? Offloading to CPU RAM is supported, to disk"),
    (
        "optimizer=galore_adamw",
        "GaLore and APOLLO are not supported because their states cannot be saved as safetensors.",
    ),
    ("precision=fp8", "Did you mean recipe=lora quantization=fp8? The frozen base is computed in fp8"),
    (
        "compile.backend=nvfuser",
        "compile.backend=nvfuser: expected one of inductor, aot_eager, eager, cudagraphs. Did you mean",
    ),
    ("task=distillation", "task=distillation: unknown task. Distillation is not supported. Train on the answers"),
    ("optimizer=adamw_torch_fused", "unknown optimizer. Did you mean optimizer=adamw?"),
    ("optimizer=galore", "unknown optimizer. GaLore and APOLLO are not supported because their"),
    ("optimizer.foreach=true", "Unknown setting optimizer.foreach. Did you mean optimizer.implementation=foreach?"),
    ("attention=eager", "Did you mean attention=sdpa? Same results as eager attention, without storing its"),
    ("parallel=tensor", "Did you mean parallel=fsdp? Tensor parallelism is not supported because PEFT shards lora_A"),
    ("parallel=cp", "Did you mean parallel.context=2? Rows are split over processes by heads (Ulysses)"),
    ("precision=high", "Did you mean precision=tf32?"),
    ("torch_compile_mode=default", "Did you mean compile.mode=default?"),
    ("dataloader_pin_memory=true", "Batches are prepared while the GPU is busy, in pinned memory. Leave it out."),
    ("--unheard-of 3", "Unknown option --unheard-of. Settings are written without dashes: unheard_of=3"),
    ("adapter.fused=true", "Unknown setting adapter.fused. Did you mean compile=auto? Fused layers were removed"),
]


@pytest.mark.parametrize(("line", "message"), TOLD, ids=[line for line, _ in TOLD])
def test_setting_of_other_program_suggests_equivalent(line: str, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        compose_run(split_arguments(line.split())[0])
    (problem,) = refusal.value.problems
    assert message in problem


@pytest.mark.parametrize("here", sorted({row["here"] for row in ROWS if "here" in row}))
def test_setting_here_exists(here: str) -> None:
    for word in here.split(" "):
        key, _, value = word.partition("=")
        if word == "from=FILE.yaml":  # tests/config/test_overrides.py
            continue
        if key in choices_by_group():
            assert value in ("", "NAME", *choices_by_group()[key]), word
        else:
            assert is_key(RunConfig, key.replace(".NAME", "")), word
            assert not value or value == "NAME" or partition_overrides([word])[1] == []


def test_every_name_is_of_one_row_and_finds_it() -> None:
    assert len(NAMES) > 120
    per_row = [{name for program in PROGRAMS for name in row.get(program, ())} for row in ROWS]
    assert [name for name, count in Counter(name for names in per_row for name in names).items() if count > 1] == []
    for name, row in NAMES.items():
        key, _, value = name.partition("=")
        with pytest.raises(ConfigError) as refusal:
            compose_run([f"{key}={value or 1}"])
        (problem,) = refusal.value.problems
        assert row.get("here", row.get("remark", "?")).partition("=")[0] in problem, name
        assert set(row) <= {"here", "remark", *PROGRAMS}


def test_table_is_read_at_a_mistake_only() -> None:
    other_programs.cache_clear()
    compose_run(["optimizer.lr=1e-3", "recipe=full"])
    assert other_programs.cache_info().currsize == 0
    assert of_other_program("learning_rate") == " Did you mean optimizer.lr?"
