"""Files of settings of other programs: what becomes of each setting, and that a run accepts the rest."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.assets import template_text
from app.config.arguments import split_arguments
from app.config.conf_files import literal
from app.config.converted_settings import Conversion
from app.config.dataset import formats_for
from app.config.load import compose_run
from app.config.other_files import read_config
from app.config.overrides import as_override
from app.config.settings_conversion import converted
from app.convert import as_file, convert
from app.data.detect_format import detect_formats
from app.data.prepare import prepare
from app.errors import ConfigError
from app.tracking.console import Console
from tests.data.small import tokenizer, write_jsonl

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
        {"recipe": "lora", "checkpoint.every": 500, "batching.tokens": 2048, "model.chat_template": "llama3"},
        {"trust_remote_code", "dataset"},
    ),
    "llama_factory_full": (
        """
model_name_or_path: org/base-8b
stage: pt
finetuning_type: full
fp8: true
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
        {"dataset", "lr_scheduler_type", "fp8"},
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
            "quantization": "llm_int8",
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
            "quantization": "llm_int8",
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
pref_loss: ipo
finetuning_type: freeze
freeze_trainable_modules: all
""",
        {"recipe": "dpo", "preference": "ipo", "adapter": "none", "training.freeze": None},
        {"freeze_trainable_modules"},
    ),
    "llama_factory_pairs_one_at_a_time": (
        """
model_name_or_path: org/base-0.6b
stage: dpo
finetuning_type: lora
pref_loss: sigmoid
cutoff_len: 2048
per_device_train_batch_size: 1
""",
        {"recipe": "dpo", "dataset.max_length": 2048, "batching.tokens": 4096},
        set(),
    ),
    "llama_factory_loss_of_another_stage": (
        "{model_name_or_path: org/base, stage: sft, pref_loss: simpo, use_dft_loss: true}",
        {"recipe": "lora", "preference": None, "task.loss": "dft"},
        set(),
    ),
    "trl_pairs_one_at_a_time": (
        """
model_name_or_path: org/base
loss_type: sigmoid
per_device_train_batch_size: 1
max_length: 1024
optim: adamw_torch_8bit
""",
        {"recipe": "dpo", "dataset.max_length": 1024, "batching.tokens": 2048, "optimizer": "adamw_8bit"},
        set(),
    ),
    "trl_pairs_without_loss_type": (
        """
model_name_or_path: org/base
dataset_name: org/pairs
beta: 0.01
max_length: 1024
max_prompt_length: 512
per_device_train_batch_size: 8
lora_task_type: CAUSAL_LM
sync_ref_model: false
""",
        {"recipe": "dpo", "adapter": "none", "preference.beta": 0.01, "batching.tokens": 16384},
        {"max_prompt_length"},
    ),
    "trl_labels_without_loss_type": (
        """
model_name_or_path: org/base
dataset_name: org/labels
use_peft: true
beta: 0.2
desirable_weight: 1.5
per_device_train_batch_size: 2
max_length: 1024
optim: rmsprop
""",
        {"recipe": "kto", "preference.beta": 0.2, "preference.desirable": 1.5, "batching.tokens": 2048},
        {"optim"},
    ),
    "trl_loss_of_tokens": (
        "{model_name_or_path: org/base, loss_type: nll}",
        {"recipe": "full", "task.loss": "nll"},
        set(),
    ),
    "torchtune_dpo": (
        """
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, max_seq_len: 1024}
model: {_component_: torchtune.models.llama3_1.lora_llama3_1_8b, lora_rank: 8}
dataset: {_component_: torchtune.datasets.preference_dataset, source: org/pairs}
loss: {_component_: torchtune.rlhf.loss.DPOLoss, beta: 0.2, label_smoothing: 0}
batch_size: 4
""",
        {"recipe": "dpo", "preference.beta": 0.2, "batching.tokens": 8192},
        set(),
    ),
    "axolotl_pairs_with_messages": (
        """
base_model: org/base-8b
rl: dpo
adapter: lora
datasets:
  - path: org/pairs
    type: chat_template.default
    field_messages: conversation
    field_chosen: chosen
    field_rejected: rejected
    message_property_mappings: {role: role, content: content}
    roles: {system: [system], user: [user], assistant: [assistant]}
test_datasets: [{path: held.jsonl, type: chat_template.default, field_messages: conversation}]
sample_packing: false
micro_batch_size: 2
optimizer: adamw_torch_8bit
""",
        {
            "dataset.columns.prompt": "conversation",
            "dataset.columns.messages": None,
            "dataset.columns.chosen": None,
            "batching.rows": 2,
            "optimizer": "adamw_8bit",
        },
        set(),
    ),
    "axolotl_pairs_with_usual_columns": (
        "{base_model: org/base, rl: orpo, datasets: [{path: org/pairs, type: chat_template.default}]}",
        {"recipe": "orpo", "dataset.columns.prompt": "messages"},
        set(),
    ),
    "axolotl_turns": (
        """
base_model: org/base
use_dft: true
datasets:
  - path: org/turns
    type: chat_template
    field_messages: conversations
    message_property_mappings: {role: from, content: value}
    roles: {assistant: [bot]}
""",
        {"dataset.columns.messages": "conversations", "task.loss": "dft"},
        {"datasets[0].roles"},
    ),
    "axolotl_vision": (
        r"""
base_model: org/vision
adapter: qlora
load_in_4bit: true
lora_target_modules: 'model.language_model.layers.[\d]+.(mlp|cross_attn|self_attn).(up|down|gate|q|k|v|o)_proj'
optimizer: adamw_torch_4bit
lr_scheduler: polynomial
""",
        {
            "recipe": "qlora",
            "adapter.targets": ["up_proj", "down_proj", "gate_proj", "q_proj", "k_proj", "v_proj", "o_proj"],
            "optimizer": None,
        },
        {"optimizer", "lr_scheduler"},
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
num_processes: 4
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
        {"config", "num_processes"},
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
    "axolotl_words_of_today": (
        r"""
base_model: Qwen/Qwen3-8B
plugins: [axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin, axolotl.integrations.liger.LigerPlugin]
liger_rms_norm: true
trust_remote_code: true
chat_template: qwen3
eot_tokens: ["<|im_end|>"]
datasets:
  - path: org/turns
    type: chat_template
    split: train[:20%]
    field_messages: conversations
    message_property_mappings: {role: from, content: value}
sample_packing: true
sequence_len: 1024
lora_mlp_kernel: true
lora_qkv_kernel: false
optimizer: adamw_torch_8bit
gradient_checkpointing: true
gradient_checkpointing_kwargs: {use_reentrant: true}
loss_watchdog_threshold: 5.0
loss_watchdog_patience: 3
max_steps: 500
num_epochs: 2
special_tokens: {eos_token: "<|im_end|>", pad_token: "<|endoftext|>"}
tokens: ["<tool>"]
fsdp: [full_shard, auto_wrap]
fsdp_config:
  fsdp_version: 2
  offload_params: true
  auto_wrap_policy: TRANSFORMER_BASED_WRAP
  transformer_layer_cls_to_wrap: Qwen3DecoderLayer
  state_dict_type: FULL_STATE_DICT
  sharding_strategy: FULL_SHARD
  reshard_after_forward: true
  activation_checkpointing: true
""",
        {
            "model.chat_template": None,
            "dataset.columns.messages": "conversations",
            "dataset.eval_fraction": 0.0,
            "optimizer": "adamw_8bit",
            "model.add_tokens": ["<tool>"],
            "training.max_steps": 500,
            "training.epochs": 500,
            "training.recompute": True,
            "parallel": "fsdp",
            "parallel.offload": True,
            "parallel.reshard": True,
        },
        set(),
    ),
    "axolotl_unlike_the_model": (
        """
base_model: NousResearch/Llama-2-7b-hf
chat_template: chatml
datasets: [{path: a.jsonl, type: chat_template}, {path: b.jsonl, type: pygmalion}]
special_tokens: {bos_token: "<s>", eos_token: "<|im_end|>"}
trust_remote_code: true
plugins: [axolotl.integrations.spectrum.SpectrumPlugin]
fsdp_config: {sharding_strategy: SHARD_GRAD_OP}
qat: {weight_dtype: int4, activation_dtype: int8, group_size: 32}
""",
        {
            "model.chat_template": "chatml",
            "parallel": "zero2",
            "quantization": "qat",
            "quantization.scheme": "int8da_int4",
        },
        {"datasets[1].type", "special_tokens.eos_token", "plugins"},
    ),
    "llama_factory_templates": (
        """
model_name_or_path: Qwen/Qwen3-8B
trust_remote_code: true
stage: sft
finetuning_type: oft
oft_target: q_proj,v_proj
template: qwen3_nothink
quantization_method: bnb
use_v1_kernels: true
""",
        {"model.chat_template": "chatml", "adapter.targets": ["q_proj", "v_proj"], "adapter.method": "OFT"},
        set(),
    ),
    "llama_factory_v1": (
        """
model: Qwen/Qwen3-4B
model_class: llm
template: qwen3_nothink
peft_config: {name: lora, r: 16, lora_alpha: 32, lora_dropout: 0.05, target_modules: all}
kernel_config: {name: auto, include_kernels: auto}
quant_config: {name: bnb, quantization_bit: 4}
dist_config: {name: fsdp2, dcp_path: null}
train_dataset: rows.jsonl
micro_batch_size: 1
global_batch_size: 4
cutoff_len: 1024
max_steps: 10
""",
        {
            "recipe": "qlora",
            "model.path": "Qwen/Qwen3-4B",
            "model.chat_template": "chatml",
            "adapter.r": 16,
            "parallel": "fsdp",
            "dataset.path": "rows.jsonl",
            "batching.accumulation": 4,
            "training.epochs": 10,
            "schedule": "constant",
        },
        set(),
    ),
    "llama_factory_v1_full": (
        """
model: org/base
train_dataset: missing.yaml
dist_config: {name: deepspeed, config_file: configs/ds_z3_config.json}
""",
        {"recipe": "full", "parallel": "zero3"},
        {"train_dataset"},
    ),
    "swift_yaml": (
        """
model: Qwen/Qwen2.5-7B-Instruct
tuner_type: full
dataset: [swift/self-cognition#1000, "org/rows:en#200"]
val_dataset: held.jsonl
torch_dtype: bfloat16
attn_impl: flash_attn
per_device_train_batch_size: 2
max_length: 1024
truncation_strategy: delete
packing: true
system: Be short.
model_author: me
deepspeed: zero2
""",
        {
            "recipe": "full",
            "dataset.path": "org/rows",
            "dataset.hub_config": "en",
            "dataset.sample": 200,
            "dataset.eval_path": "held.jsonl",
            "optimizer.lr": 1e-5,
            "batching.accumulation": 8,
            "batching.tokens": 2048,
            "parallel": "zero2",
        },
        {"dataset[swift/self-cognition#1000]", "system"},
    ),
    "automodel": (
        """
recipe: TrainFinetuneRecipeForNextTokenPrediction
step_scheduler: {global_batch_size: 32, local_batch_size: 4, ckpt_every_steps: 50, max_steps: 100, num_epochs: 2}
rng: {_target_: nemo_automodel.components.training.rng.StatefulRNG, seed: 11, ranked: true}
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: org/base
  torch_dtype: bf16
peft: {_target_: nemo_automodel.components._peft.lora.PeftConfig, match_all_linear: true, dim: 16, use_triton: true}
distributed: {strategy: fsdp2, tp_size: 1}
dataset:
  _target_: nemo_automodel.components.datasets.llm.chat_dataset.ChatDataset
  path_or_dataset_id: train.jsonl
  seq_length: 1024
validation_dataset:
  _target_: nemo_automodel.components.datasets.llm.chat_dataset.ChatDataset
  path_or_dataset_id: held.jsonl
packed_sequence: {packed_sequence_size: 0}
dataloader: {_target_: torchdata.stateful_dataloader.StatefulDataLoader, shuffle: false}
optimizer: {_target_: torch.optim.AdamW, betas: [0.9, 0.95], eps: 1.0e-8, lr: 2.0e-4, weight_decay: 0.0}
lr_scheduler: {lr_decay_style: cosine, min_lr: 1.0e-6}
clip_grad_norm: {max_norm: 0.5}
""",
        {
            "recipe": "lora",
            "adapter.r": 16,
            "adapter.alpha": 32,
            "batching.accumulation": 8,
            "batching.rows": 4,
            "batching.order": "sequential",
            "training.epochs": 2,
            "training.clip": 0.5,
            "dataset.eval_path": "held.jsonl",
            "optimizer.beta2": 0.95,
            "schedule": "cosine",
            "schedule.warmup_fraction": 0.1,
            "schedule.final_fraction": 0.005,
        },
        set(),
    ),
    "automodel_rows_by_code": (
        """
step_scheduler: {global_batch_size: 10, local_batch_size: 4}
model: {pretrained_model_name_or_path: org/base}
dataset: {_target_: nemo_automodel.components.datasets.llm.squad.make_squad_dataset, dataset_name: org/squad}
optimizer: {_target_: torch.optim.Adam, weight_decay: 0.1}
packed_sequence: {packed_sequence_size: 512}
""",
        {"recipe": "full", "dataset.path": None, "dataset.max_length": 512, "schedule": "constant"},
        {"step_scheduler.global_batch_size", "dataset._target_", "optimizer._target_"},
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
        {"recipe": "dpo", "training.freeze": None, "quantization": "llm_int8"},
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


DATASET_INFO = {
    "plain": {"file_name": "plain.json", "columns": {"prompt": "question", "response": "output"}},
    "chat": {
        "hf_hub_url": "org/chats",
        "ms_hub_url": "other/chats",
        "subset": "en",
        "num_samples": 100,
        "formatting": "sharegpt",
        "columns": {"messages": "messages"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
    },
    "texts": {"file_name": "texts.jsonl", "columns": {"prompt": "body"}},
    "pairs": {
        "file_name": "pairs.json",
        "ranking": True,
        "formatting": "sharegpt",
        "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"},
    },
    "images": {
        "file_name": "images.json",
        "formatting": "sharegpt",
        "columns": {"messages": "messages", "images": "images"},
        "tags": {"role_tag": "who", "content_tag": "what"},
    },
}
OTHER_OBJECTIVES = {
    "{base_model: a, reward_model: true, num_labels: 1}": ["reward_model: true"],
    "{base_model: a, process_reward_model: true}": ["process_reward_model: true"],
    "{base_model: a, rl: gdpo, trl: {num_generations: 4}}": ["rl: gdpo"],
    "{base_model: a, rl: ebft}": ["rl: ebft"],
    "{base_model: a, rl: dpo, dpo_loss_type: [hinge], dpo_norm_loss: true}": [
        "dpo_loss_type: [hinge]",
        "dpo_norm_loss",
    ],
    "{base_model: a, plugins: [axolotl.integrations.diffusion.DiffusionPlugin]}": ["plugins: [axolotl.integrations."],
    "{base_model: a, plugins: [axolotl.integrations.kd.KDPlugin], kd_trainer: true}": ["kd_trainer: true"],
    "{stage: rm}": ["stage: rm"],
    "{stage: ppo, reward_model: a}": ["stage: ppo"],
    "{stage: dpo, pref_loss: hinge}": ["pref_loss: hinge"],
    "{stage: sft, use_eaft_loss: true}": ["use_eaft_loss: true"],
    "{model_name_or_path: a, beta: 0.05, loss_type: apo_zero}": ["loss_type: apo_zero"],
    "{model_name_or_path: a, loss_type: [sigmoid, sft]}": ["loss_type: [sigmoid, sft]"],
    "{model_name_or_path: a, beta: 0.1, f_divergence_type: js_divergence}": ["f_divergence_type: js_divergence"],
    "{model_name_or_path: a, beta: 0.04, num_generations: 8}": ["num_generations: 8"],
    "{model_name_or_path: a, use_peft: true, lora_task_type: SEQ_CLS}": ["lora_task_type: SEQ_CLS"],
    "{tokenizer: {_component_: a}, loss: {_component_: torchtune.rlhf.loss.PPOLoss}}": ["loss._component_: torchtune"],
    "{tokenizer: {_component_: a}, kd_loss: {_component_: torchtune.modules.loss.ForwardKLLoss}}": [
        "kd_loss._component"
    ],
}


@cache
def conversion(name: str) -> Conversion:
    return converted(yaml.safe_load(FILES[name][0]))


@pytest.mark.parametrize("name", FILES)
def test_every_setting_is_converted_not_needed_or_not_converted(name: str, tmp_path: Path) -> None:
    found, (_, wanted, lost) = conversion(name), FILES[name]
    assert {key: found.words.get(key) for key in wanted} == wanted
    assert {*found.not_converted} == lost, found.not_converted
    told = {*found.converted, *found.not_needed, *{each.partition("[")[0] for each in found.not_converted}}
    assert {*found.settings} <= told
    (tmp_path / "mine.yaml").write_text(as_file(found, name))
    words = split_arguments([f"from={tmp_path / 'mine.yaml'}"])[0]  # which a run has accepted
    assert sorted(words) == sorted(f"{key}={as_override(literal(value))}" for key, value in found.words.items())


def test_meaning_that_changes_is_told() -> None:
    prompts, told, default = conversion("axolotl_qlora").changed
    assert prompts.startswith("datasets: type: alpaca: model.chat_template=alpaca writes the same prompts")
    assert [each[:23] for each in conversion("torchtune_qlora").changed] == ["torchtune defaults made"]
    assert told.startswith("micro_batch_size: 2: rows are packed, so a micro-batch is a bin of 2 x 4096 = 8192 tokens")
    assert default.endswith("defaults made explicit: schedule.final_fraction=0.0")
    assert [each[:23] for each in conversion("trl_4_bits_off").changed] == [
        "max_steps: 100: rows ar",
        "TRL defaults made expli",
    ]
    assert conversion("trl_full").changed[-1].endswith("dataset.train_on=all does the same")


def test_conversion_lost_choice_names_the_one_used() -> None:
    lost = conversion("axolotl_vision").not_converted
    assert lost["optimizer"].startswith("4-bit optimizer states are not supported.")
    assert lost["optimizer"].endswith(" optimizer=paged_adamw_8bit is used")
    assert lost["lr_scheduler"].endswith(" schedule=cosine is used")
    pattern = {"base_model": "org/base", "adapter": "lora", "lora_target_modules": "(a|b)+_proj"}
    assert "regular expressions are not supported" in converted(pattern).not_converted["lora_target_modules"]


def test_own_template_token_and_code_are_read_from_the_model_folder(tmp_path: Path) -> None:
    config = {"bos_token": {"content": "<s>"}, "chat_template": template_text("llama3")}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text("{}")
    file = {
        "base_model": str(tmp_path),
        "trust_remote_code": True,
        "chat_template": "llama3",
        "special_tokens": {"bos_token": "<s>"},
    }
    assert not converted(file).not_converted
    assert "model.chat_template" not in converted(file).words
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (tmp_path / "config.json").write_text('{"auto_map": {}}')
    other = converted({**file, "special_tokens": {"bos_token": "<b>"}})
    assert {*other.not_converted} == {"trust_remote_code", "special_tokens.bos_token"}
    assert other.words["model.chat_template"] == "llama3"


def test_names_of_dataset_info_are_converted(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(DATASET_INFO))
    (tmp_path / "configs").mkdir()

    def of(names: str, **settings: str) -> Conversion:
        return converted({"stage": "sft", "dataset": names, **settings}, tmp_path / "configs")

    both = of("plain,chat")
    mixed = both.words
    assert not both.not_converted
    assert mixed["dataset.mix.source1.path"] == str(tmp_path / "data" / "plain.json")
    assert mixed["dataset.mix.source1.columns.instruction"] == "question"
    assert mixed["dataset.mix.source1.columns.input"] is None
    assert mixed["dataset.mix.source2.path"] == "org/chats"
    assert mixed["dataset.mix.source2.hub_config"] == "en"
    assert mixed["dataset.mix.source2.sample"] == 100
    texts = of("texts", stage="pt").words
    assert (texts["dataset"], texts["dataset.columns.text"]) == ("text", "body")
    assert of("pairs", stage="dpo", pref_loss="sigmoid").words["dataset.columns.prompt"] == "conversations"
    assert {*of("images").not_converted} == {"dataset[images].columns.images", "dataset[images].tags"}
    assert "other not in" in of("other").not_converted["dataset"]


SWIFT = """
nproc_per_node=2  # it's the number of GPUs
CUDA_VISIBLE_DEVICES=0,1 NPROC_PER_NODE=$nproc_per_node \\
swift sft \\
    --model Qwen/Qwen2.5-7B-Instruct \\
    --dataset 'org/zh#500' \\
              org/en#500 \\
    --num_train_epochs=2 \\
    --use_rslora \\
    --learning_rate 1e-4 \\
    --gradient_accumulation_steps $(expr 16 / $nproc_per_node) \\
    --max_length 1024  # tokens
"""


def test_swift_command_in_script_is_converted(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(SWIFT)
    result = converted(read_config(tmp_path / "train.sh"), tmp_path)
    wanted = {
        "recipe": "lora",
        "dataset.mix.source2.path": "org/en",
        "dataset.mix.source2.sample": 500,
        "training.epochs": 2,
        "adapter.rslora": True,
        "adapter.r": 8,
        "dataset.max_length": 1024,
    }
    assert {key: result.words.get(key) for key in wanted} == wanted
    assert {*result.not_converted} == {"gradient_accumulation_steps"}
    (tmp_path / "train.sh").write_text("# swift sft --model a\nswift infer --model a\n")
    with pytest.raises(ConfigError, match="it has no command swift sft"):
        convert(tmp_path / "train.sh", None, Console(enabled=False))


def test_sources_of_v1_are_read_from_their_file(tmp_path: Path) -> None:
    (tmp_path / "sources.yaml").write_text(
        "one: {file_name: one.json, dataset_dir: data, num_samples: 9}\n"
        "two: {hf_hub_url: org/two, converter: sharegpt}\n"
    )
    words = converted({"model": "a/b", "model_class": "llm", "train_dataset": "sources.yaml"}, tmp_path).words
    assert words["dataset.mix.source1.path"] == str(tmp_path / "data" / "one.json")
    assert words["dataset.mix.source1.sample"] == 9
    assert words["dataset.mix.source2.path"] == "org/two"


def test_conversion_inferred_preference_is_told() -> None:
    for name, told in (("pairs", "beta: 0.01: "), ("labels", "desirable_weight: 1.5: ")):
        assert conversion(f"trl_{name}_without_loss_type").changed[0].startswith(told)


@pytest.mark.parametrize("text", OTHER_OBJECTIVES)
def test_convert_other_objective_refused_without_file(text: str, tmp_path: Path) -> None:
    source, target = tmp_path / "config.yml", tmp_path / "mine.yaml"
    source.write_text(text)
    with pytest.raises(ConfigError) as refusal:
        convert(source, target, Console(enabled=False))
    problems = refusal.value.problems
    names = OTHER_OBJECTIVES[text]
    assert [problem[: len(name)] for problem, name in zip(problems, names, strict=True)] == names
    assert all("this training objective is not supported" in problem for problem in problems)
    assert not target.exists()


def test_converted_file_pairs_with_messages_are_read(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(as_file(conversion("axolotl_pairs_with_messages"), "x"))
    answers = {side: {"role": "assistant", "content": side} for side in ("chosen", "rejected")}
    asked = [[{"role": "user", "content": f"What is {number}?"}] for number in range(40)]
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"conversation": each, **answers} for each in asked])
    words = (f"from={tmp_path / 'mine.yaml'}", f"dataset.path={rows}", f"dataset.eval_path={rows}")
    run = compose_run(split_arguments(words)[0])
    section, _ = detect_formats(run.dataset, formats_for(run.task.kind))
    assert len(prepare(section, tokenizer(), str(tmp_path / "cache")).train) == len(asked)


@pytest.mark.parametrize(
    ("text", "message"), [("a: 1", "not a config of Axolotl"), ("[1]", "has no settings"), ("a: [", "cannot be read")]
)
def test_file_of_no_program_is_refused(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "x.yml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        convert(file, None, Console(enabled=False))


def test_convert_names_schema_command_until_the_schema_exists(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, schema = tmp_path / "config.yml", tmp_path / "finetune.schema.json"
    source.write_text(FILES["trl_lora"][0])
    convert(source, tmp_path / "first.yaml", Console(enabled=True))
    assert f"schema to={schema}\n" in capsys.readouterr().out
    schema.touch()
    convert(source, tmp_path / "second.yaml", Console(enabled=True))
    assert "finetune.schema.json" not in capsys.readouterr().out


def test_existing_file_is_kept(tmp_path: Path) -> None:
    source, target = tmp_path / "config.yml", tmp_path / "mine.yaml"
    source.write_text(FILES["trl_lora"][0])
    assert convert(source, tmp_path / "new.yaml", Console(enabled=False)) == 0
    assert (
        (tmp_path / "new.yaml")
        .read_text()
        .startswith(
            "# yaml-language-server: $schema=finetune.schema.json\n"
            "# Converted from config.yml (TRL).\ndataset: auto\nrecipe: lora\n"
        )
    )
    target.write_text("mine")
    with pytest.raises(ConfigError, match="already exists"):
        convert(source, target, Console(enabled=False))
    assert target.read_text() == "mine"
