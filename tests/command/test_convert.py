"""Files of settings of other programs: what becomes of each setting, and that a run accepts the rest."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.config.overrides import split_arguments
from app.config.setting_table import Conversion
from app.config.settings_conversion import converted
from app.config.settings_file import as_override
from app.config.yaml_files import literal
from app.convert import as_file, convert
from app.errors import ConfigError
from app.tracking.console import Console

# name: the file, words of the result, settings that are lost
FILES: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "axolotl_qlora": (
        """
base_model: org/base-8b
model_type: LlamaForCausalLM
load_in_8bit: false
load_in_4bit: true
datasets: [{path: org/rows, type: alpaca}]
val_set_size: 0.05
sequence_len: 4096
sample_packing: true
adapter: qlora
lora_r: 32
lora_target_linear: true
micro_batch_size: 2
gradient_accumulation_steps: 4
optimizer: paged_adamw_32bit
lr_scheduler: cosine
learning_rate: 2.0e-4
bf16: auto
tf32: false
gradient_checkpointing: true
flash_attention: true
evals_per_epoch: 4
wandb_project:
special_tokens: {pad_token: "<|end|>"}
""",
        {
            "recipe": "qlora",
            "optimizer": "paged_adamw_32bit",
            "batching.tokens": 8192,
            "eval.every": "0.25epoch",
            "adapter.targets": ["all-linear"],
            "dataset.path": "org/rows",
        },
        set(),
    ),
    "axolotl_full": (
        """
base_model: org/base-1b
datasets: [{path: data/a.jsonl, type: chat_template, field_messages: turns, roles_to_train: [assistant]}]
sequence_len: 2048
sample_packing: false
micro_batch_size: 4
num_epochs: 2
optimizer: adamw_torch_fused
warmup_steps: 10
max_grad_norm: 0.5
deepspeed: deepspeed_configs/zero3.json
hub_model_id: me/mine
fp8: true
load_in_4bit: true
""",
        {
            "recipe": "full",
            "batching.packing": False,
            "batching.rows": 4,
            "dataset.columns.messages": "turns",
            "schedule.warmup_steps": 10,
            "parallel": "zero3",
        },
        {"datasets[0].roles_to_train", "hub_model_id", "fp8", "load_in_4bit"},
    ),
    "axolotl_dpo": (
        """
base_model: org/base-8b
rl: dpo
adapter: qlora
load_in_4bit: true
datasets: [{path: pairs.jsonl, type: chatml.intel, split: train}]
sequence_len: 1024
rl_beta: 0.2
""",
        {"recipe": "dpo", "quantization": "nf4", "preference.beta": 0.2},
        set(),
    ),
    "llama_factory_lora": (
        """
model_name_or_path: org/base-8b
trust_remote_code: true
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: identity,alpaca_en_demo
template: llama3
cutoff_len: 2048
max_samples: 1000
preprocessing_num_workers: 16
output_dir: saves/sft
logging_steps: 10
save_steps: 500
plot_loss: true
report_to: none
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
resume_from_checkpoint: null
""",
        {"recipe": "lora", "precision": "bf16", "checkpoint.every": 500, "batching.tokens": 2048},
        {"trust_remote_code", "dataset", "template"},
    ),
    "llama_factory_full": (
        """
model_name_or_path: org/base-8b
stage: pt
finetuning_type: full
dataset: c4_demo
cutoff_len: 4096
packing: true
optim: adamw_torch
lr_scheduler_type: polynomial
val_size: 0.1
eval_strategy: steps
eval_steps: 200
""",
        {"recipe": "full", "batching.packing": True, "optimizer": "adamw", "eval.every": 200},
        {"dataset", "lr_scheduler_type"},
    ),
    "llama_factory_4_bits": (
        """
model_name_or_path: org/base-8b
stage: sft
finetuning_type: lora
quantization_bit: 4
quantization_method: bnb
lora_target: q_proj,v_proj
use_dora: false
cutoff_len: 1024
per_device_train_batch_size: 4
neftune_noise_alpha: 5
""",
        {"recipe": "qlora", "adapter.targets": ["q_proj", "v_proj"], "batching.tokens": 4096, "training.neftune": 5},
        set(),
    ),
    "trl_full": (
        """
model_name_or_path: org/base-0.5b
dataset_name: org/chats
learning_rate: 2.0e-5
num_train_epochs: 1
packing: true
max_length: 1024
per_device_train_batch_size: 2
gradient_checkpointing: true
eval_strategy: "no"
report_to: [wandb]
""",
        {"recipe": "full", "dataset": "auto", "dataset.path": "org/chats", "batching.tokens": 2048, "tracker": "wandb"},
        set(),
    ),
    "trl_lora": (
        """
model_name_or_path: org/base-0.5b
dataset_name: org/chats
use_peft: true
lora_r: 32
lora_alpha: 16
lora_target_modules: all-linear
max_length: 512
max_steps: -1
load_in_4bit: false
assistant_only_loss: true
""",
        {"recipe": "lora", "adapter.r": 32, "adapter.targets": ["all-linear"], "dataset.train_on": "assistant"},
        set(),
    ),
    "unsloth": (
        """
model: org/base-4b
data: {dataset: org/rows, format_type: auto}
training:
  training_type: lora
  max_seq_length: 2048
  load_in_4bit: true
  num_epochs: 2
  learning_rate: 2.0e-4
  batch_size: 2
  gradient_accumulation_steps: 4
  warmup_steps: 5
  max_steps: 0
  packing: false
  gradient_checkpointing: unsloth
  random_seed: 3407
  save_strategy: epoch
  bf16: true
lora: {lora_r: 64, lora_alpha: 16, target_modules: "q_proj,k_proj", use_rslora: false}
logging: {enable_wandb: false, wandb_project: null}
""",
        {
            "recipe": "qlora",
            "batching.rows": 2,
            "training.offload": True,
            "seed": 3407,
            "checkpoint.every": "1epoch",
            "precision": "bf16",
        },
        set(),
    ),
    "torchtune_lora": (
        """
output_dir: out
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, path: base/tokenizer.model, max_seq_len: 1024}
model:
  _component_: torchtune.models.llama3_1.lora_llama3_1_8b
  lora_attn_modules: [q_proj, output_proj]
  apply_lora_to_mlp: true
  lora_rank: 8
  lora_alpha: 16
checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer, checkpoint_dir: base/8b}
dataset: {_component_: torchtune.datasets.alpaca_cleaned_dataset, packed: true}
optimizer: {_component_: torch.optim.AdamW, fused: true, weight_decay: 0.01, lr: 3.0e-4}
lr_scheduler: {_component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup, num_warmup_steps: 100}
loss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss}
batch_size: 2
epochs: 1
max_steps_per_epoch: null
gradient_accumulation_steps: 8
clip_grad_norm: null
compile: false
device: cuda
dtype: bf16
enable_activation_checkpointing: true
seed: null
""",
        {
            "recipe": "lora",
            "adapter.targets": ["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
            "optimizer": "adamw",
            "schedule": "cosine",
            "precision": "bf16",
            "model.path": "base/8b",
        },
        {"dataset._component_"},
    ),
    "axolotl_several": (
        """
base_model: org/base-8b
load_in_8bit: true
adapter: lora
datasets:
  - {path: a.jsonl, type: chat_template, field_messages: turns}
  - {path: b.jsonl, type: completion, field: body}
  - {path: json, data_files: c.jsonl, ds_type: json, type: {field_instruction: q, field_output: a}}
test_datasets: [{path: held.jsonl, type: alpaca}]
dataset_prepared_path: last_run_prepared
lora_target_linear: true
lora_target_modules: [q_proj]
peft_use_rslora: false
train_on_inputs: true
lora_r: 8
lora_alpha: 16
bf16: auto
tf32: true
save_strategy: epoch
save_steps: 500
warmup_steps: 0
warmup_ratio: 0.1
deepspeed: deepspeed_configs/zero2.json
tensor_parallel_size: 1
quantize_moe_experts: true
excess_length_strategy: raise
output_dir: "${HOME}/x"
""",
        {
            "recipe": "lora",
            "quantization": "int8",
            "dataset": "mix",
            "dataset.train_on": "all",
            "dataset.mix.source1.columns.messages": "turns",
            "dataset.mix.source2.columns.text": "body",
            "dataset.mix.source2.format": "text",
            "dataset.mix.source3.path": "c.jsonl",
            "dataset.eval_path": "held.jsonl",
            "dataset.columns.messages": None,
            "cache_dir": None,
            "adapter.targets": ["all-linear"],
            "adapter.experts": None,
            "precision": "auto",
            "checkpoint.every": "1epoch",
            "schedule.warmup_fraction": 0.1,
            "schedule.final_fraction": 0.0,
            "parallel": "zero2",
            "dataset.on_overflow": "error",
            "output_dir": "${HOME}/x",
        },
        set(),
    ),
    "llama_factory_8_bits": (
        """
model_name_or_path: org/base-8b
pref_loss: orpo
stage: dpo
finetuning_type: lora
quantization_bit: 8
lora_rank: 8
additional_target: embed_tokens,lm_head
eval_dataset: held
interleave_probs: 0.5,0.5
per_device_train_batch_size: auto
report_to: [tensorboard]
device_map: auto
""",
        {
            "recipe": "orpo",
            "quantization": "int8",
            "adapter.alpha": 16,
            "schedule": "linear",
            "schedule.warmup_steps": 0,
            "training.epochs": 3,
            "adapter.train_whole": ["embed_tokens", "lm_head"],
            "tracker": "tensorboard",
            "parallel": None,
        },
        {"eval_dataset", "interleave_probs", "per_device_train_batch_size"},
    ),
    "llama_factory_frozen": (
        """
model_name_or_path: org/base-8b
stage: dpo
pref_loss: hinge
finetuning_type: freeze
freeze_trainable_modules: all
""",
        {"recipe": "dpo", "adapter": "none", "training.freeze": None},
        {"pref_loss", "freeze_trainable_modules"},
    ),
    "trl_4_bits_off": (
        """
model_name_or_path: org/base-0.5b
dataset_name: org/chats
dataset_test_split: test
use_peft: true
load_in_4bit: false
bnb_4bit_quant_type: nf4
torch_dtype: bfloat16
assistant_only_loss: false
chat_template_kwargs: {enable_thinking: false}
rank_pattern: {q_proj: 8}
max_steps: 100
warmup_steps: 0.1
config: other.yaml
""",
        {
            "recipe": "lora",
            "optimizer.lr": 2e-5,
            "adapter.r": 16,
            "precision": "bf16",
            "dataset.train_on": "all",
            "dataset.eval_split": "test",
            "model.template_options.enable_thinking": False,
            "adapter.rank_pattern.q_proj": 8,
            "schedule.warmup_fraction": 0.1,
        },
        {"config"},
    ),
    "torchtune_steps_of_an_epoch": (
        """
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer}
model: {_component_: torchtune.models.llama3.lora_llama3_8b, lora_rank: 4, apply_lora_to_output: true}
quantize_base: true
dataset: {_component_: torchtune.datasets.chat_dataset, source: org/chats}
metric_logger: {_component_: torchtune.training.metric_logging.DiskLogger, log_dir: logs}
epochs: 3
max_steps_per_epoch: 10
tensor_parallel_dim: 2
""",
        {"recipe": "qlora", "training.max_steps": 30, "schedule": "constant", "adapter.alpha": 16, "parallel": None},
        {"model.apply_lora_to_output", "tensor_parallel_dim"},
    ),
    "axolotl_simpo": (
        "{base_model: org/base, adapter: lora, rl: simpo, datasets: [{path: pairs.jsonl}], simpo_gamma: 1.5}",
        {
            "recipe": "simpo",
            "preference.beta": 0.1,
            "preference.sft": 1.0,
            "preference.gamma": 1.5,
            "dataset.max_length": 512,
        },
        set(),
    ),
    "odd_values": (
        """
base_model: org/base
adapter: lora
1: x
max_steps: abc
evals_per_epoch: [1]
lora_target_modules: 5
micro_batch_size: true
unfrozen_parameters: [lm_head]
rl: dpo
load_in_8bit: true
""",
        {"recipe": "dpo", "training.freeze": None, "quantization": "int8"},
        {"1", "max_steps", "evals_per_epoch", "lora_target_modules", "micro_batch_size", "unfrozen_parameters"},
    ),
    "torchtune_qlora": (
        """
tokenizer: {_component_: torchtune.models.qwen2_5.qwen2_5_tokenizer, max_seq_len: null}
model: {_component_: torchtune.models.qwen2_5.qlora_qwen2_5_7b, lora_rank: 16}
checkpointer: {checkpoint_dir: base/7b}
dataset: {_component_: torchtune.datasets.chat_dataset, source: org/chats}
optimizer: {_component_: bitsandbytes.optim.PagedAdamW8bit, lr: 1.0e-4}
batch_size: 2
""",
        {"recipe": "qlora", "optimizer": "paged_adamw_8bit", "dataset": "auto", "dataset.path": "org/chats"},
        {"batch_size"},
    ),
    "axolotl_files": (
        """
base_model: org/base
adapter: lora
datasets: [{path: json, data_files: [a.jsonl, b.jsonl]}]
test_datasets:
warmup_steps: 20
warmup_ratio: 0.1
use_wandb: false
wandb_project: tries
lora_target_modules: [[a]]
deepspeed: configs/baz2/zero3.json
""",
        {
            "dataset": "mix",
            "dataset.mix.source2.path": "b.jsonl",
            "schedule.warmup_steps": 20,
            "schedule.warmup_fraction": None,
            "tracker": None,
            "parallel": "zero3",
        },
        {"lora_target_modules"},
    ),
    "trl_lists": (
        """
model_name_or_path: org/base
dataset_name: [a, b]
use_peft: true
loss_type: [sigmoid]
max_length: null
dtype: float32
""",
        {"recipe": "dpo", "dataset.max_length": None, "precision": None},
        {"dataset_name", "max_length"},
    ),
    "unsloth_short": (
        """
model: org/base
data: {dataset: org/rows}
training: {training_type: lora}
logging: {enable_wandb: true, wandb_project: tries}
""",
        {"recipe": "qlora", "adapter.r": 64, "adapter.alpha": 16, "training.epochs": 3, "tracker": "wandb"},
        set(),
    ),
}


@cache
def conversion(name: str) -> Conversion:
    return converted(yaml.safe_load(FILES[name][0]))


@pytest.mark.parametrize("name", FILES)
def test_every_setting_is_carried_needless_or_lost(name: str, tmp_path: Path) -> None:
    found, (_, wanted, lost) = conversion(name), FILES[name]
    assert {key: found.words.get(key) for key in wanted} == wanted
    assert {*found.lost} == lost, found.lost
    told = {*found.carried, *found.needless, *{each.partition("[")[0] for each in found.lost}}
    assert {*found.settings} <= told
    (tmp_path / "mine.yaml").write_text(as_file(found, name))
    words = split_arguments([f"from={tmp_path / 'mine.yaml'}"])[0]  # which a run has accepted
    assert sorted(words) == sorted(f"{key}={as_override(literal(value))}" for key, value in found.words.items())


def test_meaning_that_changes_is_told() -> None:
    told, default = conversion("axolotl_qlora").changed
    assert [each[:23] for each in conversion("torchtune_qlora").changed] == ["the file leaves these t"]
    assert told.startswith("micro_batch_size: 2: rows are packed, so a micro-batch is a bin of 2 x 4096 = 8192 tokens")
    assert default.endswith("so they are written out: schedule.final_fraction=0.0")
    assert [each[:23] for each in conversion("trl_4_bits_off").changed] == [
        "max_steps: 100: a run a",
        "the file leaves these t",
    ]
    assert conversion("trl_full").changed[-1].endswith("dataset.train_on=all trains as before")


@pytest.mark.parametrize(
    ("text", "message"),
    [("a: 1", "no file of settings of Axolotl"), ("[1]", "has no settings"), ("a: [", "cannot be read")],
)
def test_file_of_no_program_is_refused(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "x.yml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        convert(file, None, Console(enabled=False))


def test_existing_file_is_kept(tmp_path: Path) -> None:
    source, target = tmp_path / "config.yml", tmp_path / "mine.yaml"
    source.write_text(FILES["trl_lora"][0])
    assert convert(source, tmp_path / "new.yaml", Console(enabled=False)) == 0
    assert (tmp_path / "new.yaml").read_text().startswith("# From config.yml of TRL.\ndataset: auto\nrecipe: lora\n")
    target.write_text("mine")
    with pytest.raises(ConfigError, match="it exists"):
        convert(source, target, Console(enabled=False))
    assert target.read_text() == "mine"
