"""Typed schema of a run: key names, types and limits. Values are in conf/, each set in one place.

`MISSING` means that conf/ must set a value. Every section exists; optional ones have `kind: none`. A `kind` must be
the name of a file in the group's folder. The comment of a field is its description in docs/keys.md.
"""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from app.config.kinds import METRICS, PREFERENCE_KINDS, PROBLEMS, ROW_FORMATS
from app.config.validate import (
    RUNS_CODE,
    SECTIONS,
    SENDS_FILES,
    STARTS_PROCESSES,
    TYPE,
    TYPED_ONLY,
    Balanced,
    Epochs,
    TokenChoice,
    choice,
    number,
)


@dataclass(kw_only=True, slots=True)
class Columns:
    """Column names; only those of the row format are read, and null columns are ignored."""

    messages: str = MISSING  # list of messages with role and content
    conversations: str = MISSING  # list of ShareGPT turns
    tools: str | None = MISSING  # list of tool definitions; null: ignored
    system: str | None = MISSING  # system message of a conversation; null: ignored
    reasoning: str | None = None  # reasoning before the last answer; also thinking, rationale, cot; null: ignored
    chat_template_kwargs: str | None = None  # object with chat template options for the row; null: ignored
    instruction: str = MISSING  # instruction
    input: str | None = MISSING  # additional input of an instruction; null: ignored
    output: str = MISSING  # response to an instruction
    history: str | None = MISSING  # earlier turns of an instruction; null: ignored
    question: str = MISSING  # question
    answer: str = MISSING  # answer to a question
    prompt: str = MISSING  # prompt of a completion, as text or messages
    completion: str = MISSING  # completion, as text or messages
    text: str = MISSING  # plain or labeled text
    sentence1: str = MISSING  # first text of a pair
    sentence2: str = MISSING  # second text of a pair
    # label of a text or pair, a word or an integer; of an answer: true if it is good
    label: str = MISSING
    tokens: str = "tokens"  # list of words
    tags: str = "tags"  # list with one tag per word: names like B-PER, or integers
    chosen: str = "chosen"  # chosen answer, as text or messages
    rejected: str = "rejected"  # rejected answer, as text or messages
    input_ids: str = "input_ids"  # list of token IDs
    # list with each token ID again, or -100 for tokens that are not trained; null: all tokens are trained
    labels: str | None = "labels"
    attention_mask: str | None = "attention_mask"  # list of 1, and of 0 for padding, which is removed; null: ignored


@dataclass(kw_only=True, slots=True)
class MixSource:
    """One dataset of a mixture."""

    path: str = MISSING  # file, folder, glob, hub ID or asset:NAME
    weight: float = number(1.0, at_least=0, at_most=1000)  # number of times each row of the source appears per epoch
    max_rows: int | None = number(None, at_least=1)  # use only the first N rows; null: dataset.max_rows
    sample: int | None = number(None, at_least=1)  # use only N rows of the whole source; null: dataset.sample
    format: str | None = None  # row format; null: dataset.format
    columns: dict[str, Any] = field(default_factory=dict)  # column names that differ from dataset.columns
    split: str | None = None  # split of a hub dataset; null: dataset.split
    hub_config: str | None = None  # configuration of a hub dataset
    revision: str | None = None  # branch, tag or commit of a hub dataset


@dataclass(kw_only=True, slots=True)
class RandomRowsConfig:
    """Synthetic rows from a seed, for `dataset.path=random:`."""

    rows: int = number(512, at_least=1)  # number of rows made by dataset=random
    # words per row, which is also its length in tokens if dataset.max_length is the same
    length: int = number(512, at_least=2)
    # draw lengths between this and random.length; null: all rows have random.length
    shortest: int | None = number(None, at_least=2)
    # distribution of these lengths; zipf: many short rows and few long ones, the k-th shortest length in a share of 1/k
    lengths: str = choice("uniform", "zipf", default="uniform")
    classes: int = number(2, at_least=2)  # number of labels; the first word of a row is its label
    seed: int = number(0, at_least=0)  # seed of the words and rows


@dataclass(kw_only=True, slots=True)
class DatasetConfig:
    """Location and format of the rows, and the tokens in the loss."""

    path: str | None = MISSING  # file, folder, glob, hub ID or asset:NAME with the rows, or random:
    # sections named by the user; untyped because Hydra rejects new keys in a typed mapping
    # mixture of datasets by name, instead of dataset.path
    mix: dict[str, Any] = field(default_factory=dict, metadata={SECTIONS: MixSource})
    random: RandomRowsConfig = field(default_factory=RandomRowsConfig)
    format: str = choice("auto", *ROW_FORMATS)  # row format; auto: detected
    # Python function that returns each row changed, or None to drop it, as MODULE:FUNCTION; null: none
    transform: str | None = field(default=None, metadata={TYPED_ONLY: RUNS_CODE})
    split: str = MISSING  # split of a hub dataset, or of a folder with the same layout
    hub_config: str | None = None  # configuration of a hub dataset, or of a folder with the same layout
    revision: str | None = None  # branch, tag or commit of a hub dataset
    streaming: bool = False  # read hub datasets over the network, without a local copy of their rows
    columns: Columns = field(default_factory=Columns)
    # columns to ignore on purpose, such as rejected answers or image paths
    leave_out: list[str] = field(default_factory=list)
    max_length: int = number(at_least=2)  # maximum tokens per sample
    # tokens in the loss; auto: assistant turns, the completion, or the whole plain text
    train_on: str = choice("auto", "assistant", "last", "completion", "all")
    # reasoning of an assistant before its answer; mask: input only, no loss; drop: removed from the rows
    thinking: str = choice("train", "mask", "drop", default="train")
    # how to handle longer samples; auto: split text, truncate labeled text, drop others
    on_overflow: str = choice("auto", "error", "truncate", "drop", "split")
    on_bad_row: str = choice("error", "skip")  # error: stop at an unreadable row; skip: count and list bad rows
    # for chat templates that rewrite earlier turns; expand: one sample per trained turn; join: one sample for all turns
    on_unstable_template: str = choice("expand", "join", "last", "error")
    max_rows: int | None = number(at_least=1)  # use only the first N rows, in a mixture of each source
    # use only N training rows, selected by content from the whole source, with equal shares of all classes
    sample: int | None = number(None, at_least=1)
    deduplicate: bool = False  # train only on the first of identical samples
    eval_path: str | None = None  # file with eval rows
    eval_split: str | None = None  # split with eval rows
    eval_fraction: float = number(at_least=0, below=1)  # fraction of rows to hold out, selected by content
    eval_max_rows: int | None = number(at_least=1)  # use only the first N eval rows
    workers: int | None = number(at_least=1)  # deprecated and without effect; leave it out


# ---- schema


@dataclass(kw_only=True, slots=True)
class Suggest:
    """Suggested settings for this model, used by recipes."""

    lr_full: float = number(above=0)  # learning rate of full fine-tuning
    lr_full_by_task: dict[str, Any] = field(default_factory=dict)  # learning rates of full fine-tuning by task
    lr_adapter: float = number(above=0)  # learning rate of an adapter
    lr_preference: float = number(2e-5, above=0)  # learning rate of an adapter in preference tuning
    tokens: int = number(at_least=8)  # tokens per micro-batch with packing
    rows: int = number(at_least=1)  # rows per micro-batch without packing
    length: int = number(at_least=2)  # maximum tokens per sample
    recompute: bool | int | str = number(at_least=0)  # layers with gradient checkpointing


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """Model, tokenizer and chat template."""

    path: str = MISSING  # hub ID, folder, or asset:NAME
    revision: str | None = None  # branch, tag or commit on the hub
    # pretrained, or random: build the model from model.architecture, without a network
    weights: str = choice("pretrained", "random")
    tokenizer: str | None = None  # folder or hub ID of another tokenizer; null: the model's own
    add_tokens: list[str] = field(default_factory=list)  # strings to add as single tokens
    vocab_size: int | None = number(None, at_least=1)  # embedding rows; null: as many as the tokens need
    chat_template: str | None = None  # file, or name of a built-in template; null: the tokenizer's own
    template_options: dict[str, Any] = field(default_factory=dict)  # chat template variables, such as enable_thinking
    norm: str = choice("own", "low", "fp32", default="own")  # LayerNorm dtype under autocast; low: bf16 or fp16
    rope: str = choice("own", "linear", "yarn", default="own")  # scaling of RoPE, for rows longer than the base allows
    rope_factor: float | None = number(None, above=1)  # positions after scaling RoPE, divided by those before
    # positions before scaling RoPE; null: as in config.json, unless the base is already scaled
    rope_original: int | None = number(None, at_least=1)
    # run Python code from the model repository
    trust_remote_code: bool = field(default=False, metadata={TYPED_ONLY: RUNS_CODE})
    licence_page: str | None = None  # page with the license, for the model card
    architecture: dict[str, Any] = MISSING  # config.json values for weights=random, such as hidden_size
    suggest: Suggest = field(default_factory=Suggest)

    def scaled_positions(self, original: int) -> int:
        """Return the positions with a scaled RoPE; `original`: those before, as far as config.json shows."""
        return int((self.rope_original or original) * (self.rope_factor or 1))


@dataclass(kw_only=True, slots=True)
class TaskConfig:
    """Training task. If `labels` is empty, run.yaml lists those of the training rows."""

    kind: str = MISSING  # training task
    mask_share: float = number(0.0, at_least=0, at_most=1)  # fraction of tokens to mask
    loss: str = choice("nll", "dft", default="nll")  # dft: weight the loss of each token by its probability (detached)
    # weight of the load-balancing loss of an MoE model; auto: that of config.json if experts or routers train
    router_loss: float | str = number(0.0, at_least=0)
    whole_words: bool = False  # mask all tokens of a word together; needs a WordPiece tokenizer
    problem: str = choice(*PROBLEMS, default="single")  # one label per row, any number of labels, or numbers
    labels: list[str] = field(default_factory=list)  # names of all classes in order; empty: those of the training rows
    # loss weight of each label, in order; balanced: rarer labels weigh more; null: equal
    class_weights: Any = field(default=None, metadata={TYPE: list[float] | Balanced | None})


@dataclass(kw_only=True, slots=True)
class PreferenceConfig:
    """Preference loss; each kind reads the keys set in its YAML file."""

    kind: str = "none"  # preference loss: on chosen/rejected pairs, or for kto on single labeled answers
    beta: float = number(0.1, above=0)  # scale of the rewards
    label_smoothing: float = number(0.0, at_least=0, below=0.5)  # assumed fraction of swapped pairs
    gamma: float = number(0.0, at_least=0)  # target reward margin of chosen over rejected answers
    sft: float = number(0.0, at_least=0)  # weight of the loss on chosen answers, averaged over tokens
    desirable: float = number(1.0, above=0)  # weight of good answers
    undesirable: float = number(1.0, above=0)  # weight of bad answers

    @property
    def has_reference(self) -> bool:
        """Whether rewards are relative to a frozen reference model."""
        return PREFERENCE_KINDS[self.kind].has_reference


@dataclass(kw_only=True, slots=True)
class BatchingConfig:
    """Micro-batches and optimizer steps."""

    # pack rows into bins, without attention across rows; false: pad rows; auto: pack if verified for the model
    packing: bool | str = MISSING
    tokens: int | str = number(at_least=8)  # tokens per micro-batch with packing; auto: as many as fit in memory
    rows: int = number(at_least=1)  # rows per micro-batch without packing
    order: str = choice("random", "sequential", default="random")  # row order in each epoch; sequential: file order
    # micro-batches per optimizer step and process; more make larger and fewer steps
    accumulation: int = number(at_least=1)

    @property
    def bin_tokens(self) -> int:
        """Tokens per bin, after `auto` is resolved."""
        assert isinstance(self.tokens, int), "batching.tokens=auto is not resolved yet"
        return self.tokens


@dataclass(kw_only=True, slots=True)
class AdapterConfig:
    """Adapter on a frozen base; `none` trains the whole model."""

    kind: str = MISSING  # adapter type
    method: str = ""  # another PEFT method, by its PEFT name, case-insensitive
    fields: dict[str, Any] = field(default_factory=dict)  # settings of that method, by PEFT name
    r: int = number(0, at_least=0)  # LoRA rank
    alpha: float = number(0.0, at_least=0)  # scale of the update, divided by the rank
    dropout: float = number(0.0, at_least=0, below=1)  # dropout before the adapter
    rslora: bool = False  # divide alpha by the square root of the rank (rsLoRA)
    dora: bool = False  # train magnitude and direction of the weights separately (DoRA)
    # initialization of A and B: default, gaussian, orthogonal, pissa, pissa_niter_N, olora, eva, corda, loftq
    init: str = "default"
    rank_pattern: dict[str, Any] = field(default_factory=dict)  # ranks by layer name or suffix
    alpha_pattern: dict[str, Any] = field(default_factory=dict)  # alphas by layer name or suffix
    layers: list[int] = field(default_factory=list)  # indices of the layers to adapt, from 0; empty: all
    train_whole: list[str] = field(default_factory=list)  # layers to train and save in full, such as lm_head
    # token IDs to train in the embedding and in an untied LM head; all: every token; new: those of model.add_tokens
    train_tokens: Any = field(default_factory=list, metadata={TYPE: list[int] | TokenChoice})
    lr_ratio: float = number(1.0, above=0)  # learning rate of B divided by that of A, which is optimizer.lr (LoRA+)
    start: str | None = None  # run, folder or hub ID of an adapter to continue from; null: a new adapter
    # all-linear, or layer names; empty: PEFT's default for the model type
    targets: list[str] = field(default_factory=list)
    experts: bool = False  # also adapt the stacked experts of an MoE model; needs adapter.dropout=0


@dataclass(kw_only=True, slots=True)
class QuantizationConfig:
    """Quantization of the frozen base, or rounding of trained weights (QAT)."""

    kind: str = MISSING  # storage of the frozen base, or rounding of trained weights
    double_quant: bool = False  # quantize the scales too, which saves half a bit per weight
    group_size: int = number(128, at_least=-1)  # weights that share a scale (int4); -1: a row
    scheme: str = choice("int4", "int8da_int4", default="int4")  # number format of quantization-aware training


@dataclass(kw_only=True, slots=True)
class OptimizerConfig:
    """Optimizer; each kind reads the keys set in its YAML file, and the recipe sets `lr`."""

    kind: str = MISSING  # optimizer
    lr: float = number(above=0)  # peak learning rate
    weight_decay: float = number(at_least=0)  # weight decay
    beta1: float = number(0.0, at_least=0, below=1)  # decay rate of the first moment
    beta2: float = number(0.0, at_least=0, below=1)  # decay rate of the second moment
    eps: float = number(0.0, at_least=0)  # term added to the denominator
    momentum: float = number(0.0, at_least=0, below=1)  # momentum
    # torch implementation of the optimizer step
    implementation: str = choice("fused", "foreach", "loop", default="fused")
    # optimizer states of embeddings: as for other weights, or 32-bit
    embedding_states: str = choice("same", "32bit", default="same")
    in_backward: bool = False  # step each weight during the backward pass, which saves gradient memory


@dataclass(kw_only=True, slots=True)
class ScheduleConfig:
    """Learning rate schedule."""

    kind: str = MISSING  # shape of the learning rate schedule
    warmup_fraction: float | None = number(at_least=0, below=1)  # fraction of the steps used for warmup
    warmup_steps: int | None = number(None, at_least=0)  # warmup steps, instead of schedule.warmup_fraction
    final_fraction: float = number(0.0, at_least=0, at_most=1)  # final learning rate as a fraction of the peak
    decay_fraction: float = number(0.0, at_least=0, at_most=1)  # fraction of the steps used for decay


@dataclass(kw_only=True, slots=True)
class AttentionConfig:
    """Attention backend."""

    kind: str = MISSING  # attention backend


@dataclass(kw_only=True, slots=True)
class PrecisionConfig:
    """Dtypes of the compute and, in full fine-tuning, of the weights."""

    kind: str = MISSING  # dtype of the compute; auto: chosen for the hardware
    trained: str = choice("fp32", "bf16", default="fp32")  # dtype of the weights in full fine-tuning


@dataclass(kw_only=True, slots=True)
class CompileConfig:
    """Settings of torch.compile."""

    kind: str = MISSING  # layers to compile with torch.compile
    graphs: bool = False  # launch kernels as one recorded CUDA graph
    backend: str = choice("inductor", "aot_eager", "eager", "cudagraphs", default="inductor")  # torch.compile backend
    # torch.compile mode, for inductor
    mode: str = choice("default", "max-autotune-no-cudagraphs", "reduce-overhead", "max-autotune", default="default")
    # fraction of activations that compiled layers save for the backward pass; auto: 0.6, or less to fit in memory
    memory_budget: float | str = number(0.6, above=0, at_most=1)

    @property
    def partitions(self) -> bool:
        """Whether inductor partitions the layer graphs by the memory budget."""
        return self.kind == "blocks" and self.backend == "inductor"


@dataclass(kw_only=True, slots=True)
class ParallelConfig:
    """Parallelism over processes: `replicate` model copies, each sharded over `shard` processes."""

    kind: str = choice("auto", "ddp", "fsdp", "hsdp")  # parallelism over processes; auto: ddp if it fits, else fsdp
    shard: int | str = number(at_least=1)  # processes that share one copy of the model
    replicate: int | str = number(at_least=1)  # copies of the model
    reshard: bool = MISSING  # free gathered weights after each layer, as in ZeRO-3; false: keep them, as in ZeRO-2
    sync: str = choice("each", "last")  # reduce gradients after each micro-batch, or only after the last one of a step
    overlap: bool = MISSING  # reduce ddp gradients during the last backward pass
    offload: bool = MISSING  # keep weights and optimizer states in CPU RAM
    tensor: int = number(at_least=1)  # tensor parallelism; not supported, must be 1
    # processes that share each row, with a slice of its tokens (Ulysses); the number of processes is a multiple of it
    context: int = number(at_least=1)

    @property
    def divides(self) -> bool:
        """Whether each process holds only a shard of the model."""
        return self.kind in {"fsdp", "hsdp"}


@dataclass(kw_only=True, slots=True)
class TrackerConfig:
    """Experiment tracker, in addition to metrics.jsonl."""

    kind: str = MISSING  # experiment tracker, in addition to metrics.jsonl
    project: str = ""  # project or experiment in the tracker
    name: str | None = None  # run name; null: name of the output folder


@dataclass(kw_only=True, slots=True)
class TrainingConfig:
    """Training length, gradient clipping, and gradient checkpointing."""

    epochs: float = number(above=0)  # passes over the training rows
    max_steps: int | None = number(at_least=1)  # maximum number of steps; null: set by training.epochs
    # save and stop after this step; the schedule still covers the whole run
    stop_after: int | None = number(None, at_least=1)
    freeze: list[str] = field(default_factory=list)  # weights to freeze in full fine-tuning, by parts of their names
    neftune: float = number(0.0, at_least=0)  # uniform noise on embeddings, times 1/sqrt(tokens x width); 0: none
    clip: float = number(at_least=0)  # maximum global gradient norm; 0: no clipping
    # gradient checkpointing: true, a number of layers, or auto for as few as fit
    recompute: bool | int | str = number(at_least=0)
    rehearse: bool | str = MISSING  # run the largest micro-batch once before step 1; auto: on a GPU
    offload: bool = MISSING  # keep the inputs of checkpointed layers in CPU RAM
    # tokens per tile of gated MLPs; 0: no tiles; auto: only if gradient checkpointing is not enough
    tile: int | str = number(0, at_least=0)
    # step to profile, with its time by kind of operation; null: none
    profile_step: int | None = number(None, at_least=1)
    max_bad_steps: int = number(at_least=1)  # consecutive non-finite gradients before the run stops


@dataclass(kw_only=True, slots=True)
class EvalConfig:
    """Evaluation on held-out rows."""

    every: int | str = number(kind=int | Epochs, at_least=0)  # steps between evaluations; 0: only at the end
    # also evaluate before step 1, ignored for the best checkpoint and patience; auto: unless eval.every is 0
    at_start: bool | str = False
    rows: int = number(at_least=1)  # eval micro-batch size; does not change the result
    samples: int = number(at_least=0)  # eval prompts to answer at each evaluation
    sample_tokens: int = number(at_least=1)  # maximum tokens per answer
    also: str | None = None  # file, folder, hub ID or asset:NAME of general rows to score in addition to the eval set
    objective: str = choice(*METRICS, default="eval_loss")  # metric for the best checkpoint, patience and sweeps
    patience: int = number(at_least=0)  # evaluations without improvement before the run stops; 0: off
    min_delta: float = number(at_least=0)  # minimum change of the objective that counts as an improvement


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """Checkpoints, and the weights saved in final/."""

    every: int | str = number(kind=int | Epochs, at_least=0)  # steps between checkpoints; 0: only at the end
    keep: int = number(at_least=1)  # newest checkpoints to keep, in addition to the best one
    final: str = choice("last", "best")  # weights saved in final/
    save_random_base: bool = MISSING  # also save a randomly initialized base, which an adapter needs
    # also copy the run to a folder of its name in this URL of an object store or disk: s3, gs, hf or file
    mirror: str | None = field(default=None, metadata={TYPED_ONLY: SENDS_FILES})


@dataclass(kw_only=True, slots=True)
class RecordConfig:
    """Lines of metrics.jsonl."""

    every: int = number(at_least=1)  # steps between metrics lines


@dataclass(kw_only=True, slots=True)
class LaunchConfig:
    """Processes and threads on this machine."""

    num_processes: int | str = number(at_least=1)  # processes on this machine; auto: one per GPU
    threads: int | None = number(at_least=1, at_most=1024)  # CPU threads per process; null: a share of the cores


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """All keys of `finetune train`."""

    output_dir: str = MISSING  # output folder of the run
    seed: int = number(at_least=0, at_most=2**32 - 1)  # seed of row order, adapter initialization and dropout
    resume: str | None = MISSING  # auto: newest valid checkpoint of output_dir, or a new start; a path: that checkpoint
    varied_from: str | None = None  # run folder that provides the settings; set with from=RUN
    dry_run: bool = MISSING  # print the plan without loading weights
    # folder of prepared rows and compiled kernels
    cache_dir: str = field(default=MISSING, metadata={TYPED_ONLY: RUNS_CODE})
    model: ModelConfig = field(default_factory=ModelConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
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
    launch: LaunchConfig = field(default_factory=LaunchConfig, metadata={TYPED_ONLY: STARTS_PROCESSES})
