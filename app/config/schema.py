"""Typed schema of a run: names, types and limits of its keys. Values live in conf/, one owner per key.

`MISSING` means that conf/ must give a value. Every section exists; those that can be off have `kind: none`. A `kind`
must be the name of a file in the group's folder.
"""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

CHOICES = "choices"  # keys of a field's metadata
LIMITS = "limits"
SECTIONS = "sections"


def choice(*names: str, default: str = MISSING) -> Any:
    """A text field that takes one of `names`."""
    return field(default=default, metadata={CHOICES: names})


def number(default: Any = MISSING, **limits: float) -> Any:
    """A number field within `limits`: at_least, at_most, above, below."""
    return field(default=default, metadata={LIMITS: limits})


@dataclass(kw_only=True, slots=True)
class Suggest:
    """Settings that suit this model; recipes refer to them."""

    lr_full: float = number(above=0)
    lr_full_by_task: dict[str, Any] = field(default_factory=dict)
    lr_adapter: float = number(above=0)
    tokens: int = number(at_least=8)
    rows: int = number(at_least=1)
    length: int = number(at_least=2)
    recompute: bool | int = number(at_least=0)


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """Facts about a model. `architecture` has the numbers of its config.json, so that they need no hub."""

    path: str = MISSING
    revision: str | None = None
    weights: str = choice("pretrained", "random")
    tokenizer: str | None = None
    chat_template: str | None = None
    trust_remote_code: bool = False
    licence_page: str | None = None
    architecture: dict[str, Any] = MISSING
    suggest: Suggest = field(default_factory=Suggest)


@dataclass(kw_only=True, slots=True)
class Columns:
    """Names of the columns; only those of the chosen format are read, and none for null."""

    messages: str = MISSING
    conversations: str = MISSING
    tools: str | None = MISSING
    system: str | None = MISSING
    instruction: str = MISSING
    input: str | None = MISSING
    output: str = MISSING
    history: str | None = MISSING
    question: str = MISSING
    answer: str = MISSING
    prompt: str = MISSING
    completion: str = MISSING
    text: str = MISSING
    sentence1: str = MISSING
    sentence2: str = MISSING
    label: str = MISSING


@dataclass(kw_only=True, slots=True)
class MixSource:
    """One source of a mix. `weight` is how often an epoch has each of its rows; null takes the key of the dataset."""

    path: str = MISSING
    weight: float = number(1.0, at_least=0, at_most=1000)
    max_rows: int | None = number(None, at_least=1)
    format: str | None = None
    columns: dict[str, Any] = field(default_factory=dict)
    split: str | None = None
    hub_config: str | None = None
    revision: str | None = None


@dataclass(kw_only=True, slots=True)
class DatasetConfig:
    """Where the rows are, their format, and which tokens are trained. `mix` has named sources in place of `path`."""

    path: str | None = MISSING
    # sections by the user's names; untyped because Hydra refuses to add keys to a typed mapping
    mix: dict[str, Any] = field(default_factory=dict, metadata={SECTIONS: MixSource})
    format: str = choice(
        *("auto", "messages", "sharegpt", "instruction", "question_answer"),
        *("prompt_completion", "chat_completion", "text", "labelled_text", "text_pair"),
    )
    split: str = MISSING
    hub_config: str | None = None
    revision: str | None = None
    columns: Columns = field(default_factory=Columns)
    max_length: int = number(at_least=2)
    train_on: str = choice("auto", "assistant", "last", "completion", "all")
    on_overflow: str = choice("auto", "error", "truncate", "drop", "split")
    on_bad_row: str = choice("error", "skip")
    on_unstable_template: str = choice("expand", "last", "error")
    max_rows: int | None = number(at_least=1)
    deduplicate: bool = False
    eval_path: str | None = None
    eval_split: str | None = None
    eval_fraction: float = number(at_least=0, below=1)
    eval_max_rows: int | None = number(at_least=1)
    workers: int | None = number(at_least=1)


@dataclass(kw_only=True, slots=True)
class TaskConfig:
    """What the model learns to predict.

    `mask_share` is the fraction of tokens that are masked; `labels` are the names of all classes in their order, by
    default those of the training rows, which run.yaml then has.
    """

    kind: str = MISSING
    mask_share: float = number(0.0, at_least=0, at_most=1)
    labels: list[str] = field(default_factory=list)


@dataclass(kw_only=True, slots=True)
class BatchingConfig:
    """How rows become micro-batches and micro-batches become optimizer steps."""

    packing: bool = MISSING
    tokens: int | str = number(at_least=8)
    rows: int = number(at_least=1)
    accumulation: int = number(at_least=1)

    @property
    def bin_tokens(self) -> int:
        """Tokens of a bin, once `auto` is resolved."""
        assert isinstance(self.tokens, int), "batching.tokens=auto is not resolved yet"
        return self.tokens


@dataclass(kw_only=True, slots=True)
class AdapterConfig:
    """The adapter on a frozen base; `none` trains the whole model."""

    kind: str = MISSING
    r: int = number(0, at_least=0)
    alpha: float = number(0.0, at_least=0)
    dropout: float = number(0.0, at_least=0, below=1)
    targets: list[str] = field(default_factory=list)
    fused: bool = False


@dataclass(kw_only=True, slots=True)
class QuantizationConfig:
    """How the frozen base is stored. `double_quant` quantises its scales too, which saves half a bit a weight."""

    kind: str = MISSING
    double_quant: bool = False


@dataclass(kw_only=True, slots=True)
class OptimizerConfig:
    """The optimizer; each kind reads the keys that its YAML sets, and the recipe sets `lr`."""

    kind: str = MISSING
    lr: float = number(above=0)
    weight_decay: float = number(at_least=0)
    beta1: float = number(0.0, at_least=0, below=1)
    beta2: float = number(0.0, at_least=0, below=1)
    eps: float = number(0.0, at_least=0)
    momentum: float = number(0.0, at_least=0, below=1)
    in_backward: bool = False


@dataclass(kw_only=True, slots=True)
class ScheduleConfig:
    """The learning rate over the run, as fractions of its steps and of the peak."""

    kind: str = MISSING
    warmup_fraction: float = number(at_least=0, below=1)
    final_fraction: float = number(0.0, at_least=0, at_most=1)
    decay_fraction: float = number(0.0, at_least=0, at_most=1)


@dataclass(kw_only=True, slots=True)
class AttentionConfig:
    """Which kernel computes attention."""

    kind: str = MISSING


@dataclass(kw_only=True, slots=True)
class PrecisionConfig:
    """Data types of the arithmetic and, in full fine-tuning, of the weights."""

    kind: str = MISSING
    trained: str = choice("fp32", "bf16", default="fp32")


@dataclass(kw_only=True, slots=True)
class CompileConfig:
    """Use of torch.compile. `graphs` launches the kernels of a GPU as one recorded CUDA graph."""

    kind: str = MISSING
    graphs: bool = False


@dataclass(kw_only=True, slots=True)
class ParallelConfig:
    """How several processes share the work: each of `replicate` copies of the model is sharded over `shard`."""

    kind: str = choice("auto", "ddp", "fsdp", "hsdp")
    shard: int | str = number(at_least=1)
    replicate: int | str = number(at_least=1)
    reshard: bool = MISSING
    sync: str = choice("each", "last")
    overlap: bool = MISSING
    offload: bool = MISSING
    tensor: int = number(at_least=1)
    context: int = number(at_least=1)

    @property
    def divides(self) -> bool:
        """Whether each process has only a shard of the model."""
        return self.kind in {"fsdp", "hsdp"}


@dataclass(kw_only=True, slots=True)
class TrackerConfig:
    """Where metrics go besides metrics.jsonl."""

    kind: str = MISSING
    project: str = ""
    name: str | None = None


@dataclass(kw_only=True, slots=True)
class TrainingConfig:
    """Length of the training, clipping, and activation checkpointing.

    `recompute`: all layers, none, the first so many, or auto. `offload` keeps the inputs of recomputed layers on the
    host. `rehearse` runs the largest micro-batch once before the first step; `auto` does on a GPU.
    """

    epochs: float = number(above=0)
    max_steps: int | None = number(at_least=1)
    stop_after: int | None = number(None, at_least=1)
    clip: float = number(at_least=0)
    recompute: bool | int | str = number(at_least=0)
    rehearse: bool | str = MISSING
    offload: bool = MISSING
    max_bad_steps: int = number(at_least=1)


@dataclass(kw_only=True, slots=True)
class EvalConfig:
    """Evaluations on held-out rows; `every: 0` means only at the end. `patience` counts evaluations, 0 is off."""

    every: int = number(at_least=0)
    rows: int = number(at_least=1)
    samples: int = number(at_least=0)
    sample_tokens: int = number(at_least=1)
    patience: int = number(at_least=0)
    min_delta: float = number(at_least=0)


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """Checkpoints: how often, how many are kept, and the weights of final/."""

    every: int = number(at_least=0)
    keep: int = number(at_least=1)
    final: str = choice("last", "best")
    save_random_base: bool = MISSING


@dataclass(kw_only=True, slots=True)
class RecordConfig:
    """How often a line of metrics is written."""

    every: int = number(at_least=1)


@dataclass(kw_only=True, slots=True)
class LaunchConfig:
    """Processes on this machine (`auto`: one per GPU) and their threads (null: an equal share of the cores)."""

    num_processes: int | str = number(at_least=1)
    threads: int | None = number(at_least=1, at_most=1024)


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """All keys of `python -m app.train`."""

    output_dir: str = MISSING
    seed: int = number(at_least=0, at_most=2**32 - 1)
    resume: str | None = MISSING
    dry_run: bool = MISSING
    cache_dir: str = MISSING
    model: ModelConfig = field(default_factory=ModelConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    batching: BatchingConfig = field(default_factory=BatchingConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    quantization: QuantizationConfig = field(default_factory=QuantizationConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    record: RecordConfig = field(default_factory=RecordConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
