"""Typed schema of a run: names, types and limits of its keys. Values live in conf/, one owner per key.

`MISSING` means that conf/ must give a value. Every section exists; those that can be off have `kind: none`. A `kind`
must be the name of a file in the group's folder. The comment of a field is its meaning in docs/keys.md.
"""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from app.config.kinds import METRICS, PREFERENCE_KINDS, PROBLEMS, ROW_FORMATS
from app.config.validate import (
    RUNS_CODE,
    SECTIONS,
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
    """Names of the columns; only those of the chosen format are read, and none for null."""

    messages: str = MISSING  # list of messages with role and content
    conversations: str = MISSING  # list of turns of ShareGPT
    tools: str | None = MISSING  # list of tool definitions; null: not read
    system: str | None = MISSING  # system message of a conversation; null: not read
    reasoning: str | None = None  # thought before the last answer; also thinking, rationale, cot; null: not read
    chat_template_kwargs: str | None = None  # object with options of the chat template for the row; null: not read
    instruction: str = MISSING  # instruction
    input: str | None = MISSING  # further input of an instruction; null: not read
    output: str = MISSING  # answer to an instruction
    history: str | None = MISSING  # earlier turns of an instruction; null: not read
    question: str = MISSING  # question
    answer: str = MISSING  # answer to a question
    prompt: str = MISSING  # prompt of a completion, as text or messages
    completion: str = MISSING  # completion, as text or messages
    text: str = MISSING  # plain or labelled text
    sentence1: str = MISSING  # first text of a pair
    sentence2: str = MISSING  # second text of a pair
    # label of a text or a pair, a word or a whole number; of an answer, true where it is wanted
    label: str = MISSING
    tokens: str = "tokens"  # list of words
    tags: str = "tags"  # list of a tag for each word: names like B-PER, or whole numbers
    chosen: str = "chosen"  # wanted answer, as text or messages
    rejected: str = "rejected"  # unwanted answer, as text or messages


@dataclass(kw_only=True, slots=True)
class MixSource:
    """One source of a mix."""

    path: str = MISSING  # file, folder, glob, hub id or asset:NAME
    weight: float = number(1.0, at_least=0, at_most=1000)  # how often an epoch has each row of the source
    max_rows: int | None = number(None, at_least=1)  # first rows to take; null: that of the dataset
    format: str | None = None  # format of the rows; null: that of the dataset
    columns: dict[str, Any] = field(default_factory=dict)  # names of columns that differ from dataset.columns
    split: str | None = None  # split of a hub dataset; null: that of the dataset
    hub_config: str | None = None  # configuration of a hub dataset
    revision: str | None = None  # branch, tag or commit of a hub dataset


@dataclass(kw_only=True, slots=True)
class RandomRowsConfig:
    """Rows made from a seed, for `dataset.path=random:`."""

    rows: int = number(512, at_least=1)  # rows that dataset=random makes
    length: int = number(512, at_least=2)  # words of a row, and so its tokens with dataset.max_length of the same size
    shortest: int | None = number(None, at_least=2)  # lengths are drawn between it and random.length; null: all alike
    classes: int = number(2, at_least=2)  # labels; the first word of a row is its label
    seed: int = number(0, at_least=0)  # another seed makes other words and rows


@dataclass(kw_only=True, slots=True)
class DatasetConfig:
    """Where the rows are, their format, and which tokens are trained."""

    path: str | None = MISSING  # file, folder, glob, hub id or asset:NAME with the rows, or random:
    # sections by the user's names; untyped because Hydra refuses to add keys to a typed mapping
    # several sources by name, in place of dataset.path
    mix: dict[str, Any] = field(default_factory=dict, metadata={SECTIONS: MixSource})
    random: RandomRowsConfig = field(default_factory=RandomRowsConfig)
    format: str = choice("auto", *ROW_FORMATS)  # format of the rows
    split: str = MISSING  # split of a dataset of the hub, or of a folder as the hub has them
    hub_config: str | None = None  # configuration of a dataset of the hub, or of such a folder
    revision: str | None = None  # branch, tag or commit of a hub dataset
    columns: Columns = field(default_factory=Columns)
    leave_out: list[str] = field(default_factory=list)  # columns not read on purpose: rejected answers, paths of images
    max_length: int = number(at_least=2)  # largest number of tokens of a sample
    # trained tokens; auto: assistant turns, the completion, or all of a plain text
    train_on: str = choice("auto", "assistant", "last", "completion", "all")
    # what an assistant thought before its answer; mask: read, but not trained; drop: taken out of the rows
    thinking: str = choice("train", "mask", "drop", default="train")
    # what happens to longer samples; auto splits text, cuts labelled text, drops others
    on_overflow: str = choice("auto", "error", "truncate", "drop", "split")
    on_bad_row: str = choice("error", "skip")  # error stops at an unreadable row; skip counts and lists them
    # chat templates that rewrite earlier turns; expand: one sample per trained turn; join: one sample with all of them
    on_unstable_template: str = choice("expand", "join", "last", "error")
    max_rows: int | None = number(at_least=1)  # first rows to take, of a mix from each source
    deduplicate: bool = False  # train on the first of equal samples only
    eval_path: str | None = None  # file with held-out rows
    eval_split: str | None = None  # split with held-out rows
    eval_fraction: float = number(at_least=0, below=1)  # fraction of rows to hold out, chosen by their content
    eval_max_rows: int | None = number(at_least=1)  # first held-out rows to take
    workers: int | None = number(at_least=1)  # no longer has a meaning; leave it out


# ---- schema


@dataclass(kw_only=True, slots=True)
class Suggest:
    """Settings that suit this model; recipes refer to them."""

    lr_full: float = number(above=0)  # learning rate of full fine-tuning
    lr_full_by_task: dict[str, Any] = field(default_factory=dict)  # other rates of full fine-tuning, by task
    lr_adapter: float = number(above=0)  # learning rate of an adapter
    lr_preference: float = number(2e-5, above=0)  # learning rate of an adapter that learns from compared answers
    tokens: int = number(at_least=8)  # tokens of a micro-batch with packing
    rows: int = number(at_least=1)  # rows of a micro-batch without packing
    length: int = number(at_least=2)  # largest number of tokens of a sample
    recompute: bool | int | str = number(at_least=0)  # layers to recompute in backward


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """Facts about a model."""

    path: str = MISSING  # hub id, folder, or asset:NAME
    revision: str | None = None  # branch, tag or commit of the hub
    weights: str = choice("pretrained", "random")  # random builds the model from model.architecture, without a network
    tokenizer: str | None = None  # folder or hub id of another tokenizer; null: that of the model
    add_tokens: list[str] = field(default_factory=list)  # texts that become one token each
    vocab_size: int | None = number(None, at_least=1)  # rows of the embedding; null: as many as the tokens need
    chat_template: str | None = None  # file, or name of a template that ships; null: the tokenizer's
    template_options: dict[str, Any] = field(default_factory=dict)  # what the template reads: enable_thinking, say
    norm: str = choice("own", "low", "fp32", default="own")  # LayerNorms under autocast: low is in bf16 or fp16
    # run Python code of the model repository
    trust_remote_code: bool = field(default=False, metadata={TYPED_ONLY: RUNS_CODE})
    licence_page: str | None = None  # page with the licence, for the model card
    architecture: dict[str, Any] = MISSING  # numbers of config.json for weights=random, such as hidden_size
    suggest: Suggest = field(default_factory=Suggest)


@dataclass(kw_only=True, slots=True)
class TaskConfig:
    """What the model learns to predict. run.yaml has the `labels` of the training rows if none were given."""

    kind: str = MISSING  # what the model learns
    mask_share: float = number(0.0, at_least=0, at_most=1)  # fraction of tokens to mask
    loss: str = choice("nll", "dft", default="nll")  # dft weights each token's loss by its probability, held constant
    # times the load-balancing loss of a mixture's routers; auto: that of config.json where experts or routers train
    router_loss: float | str = number(0.0, at_least=0)
    whole_words: bool = False  # mask all tokens of a word together; the tokenizer is WordPiece
    problem: str = choice(*PROBLEMS, default="single")  # one label a row, any number of labels, or numbers
    labels: list[str] = field(default_factory=list)  # names of all classes in order; empty: those of the training rows
    # how much each label counts in the loss, in their order; balanced: the rarer, the more; null: all alike
    class_weights: Any = field(default=None, metadata={TYPE: list[float] | Balanced | None})


@dataclass(kw_only=True, slots=True)
class PreferenceConfig:
    """The loss over wanted and unwanted answers; each kind reads the keys that its YAML sets."""

    kind: str = "none"  # loss over answers: pairs of a wanted and an unwanted one, of kto single ones with a label
    beta: float = number(0.1, above=0)  # scale of the rewards
    label_smoothing: float = number(0.0, at_least=0, below=0.5)  # share of pairs whose sides are taken to be swapped
    gamma: float = number(0.0, at_least=0)  # margin that the reward of the wanted answer is to have
    sft: float = number(0.0, at_least=0)  # weight of the loss of the wanted answer, a mean over its tokens
    desirable: float = number(1.0, above=0)  # weight of wanted answers
    undesirable: float = number(1.0, above=0)  # weight of unwanted answers

    @property
    def has_reference(self) -> bool:
        """Whether rewards are relative to the model as it was before step 1."""
        return PREFERENCE_KINDS[self.kind].has_reference


@dataclass(kw_only=True, slots=True)
class BatchingConfig:
    """How rows become micro-batches and micro-batches become optimizer steps."""

    # pack rows into bins, in which each row attends to itself only; false pads rows; auto: where that is proven
    packing: bool | str = MISSING
    tokens: int | str = number(at_least=8)  # tokens of a micro-batch with packing; auto: as many as fit into memory
    rows: int = number(at_least=1)  # rows of a micro-batch without packing
    order: str = choice(
        "random", "sequential", default="random"
    )  # order of the rows in each epoch; sequential: that of the files
    # micro-batches of an optimizer step, on each process: the more, the larger the step and the fewer of them
    accumulation: int = number(at_least=1)

    @property
    def bin_tokens(self) -> int:
        """Tokens of a bin, once `auto` is resolved."""
        assert isinstance(self.tokens, int), "batching.tokens=auto is not resolved yet"
        return self.tokens


@dataclass(kw_only=True, slots=True)
class AdapterConfig:
    """The adapter on a frozen base; `none` trains the whole model."""

    kind: str = MISSING  # kind of adapter
    method: str = ""  # another method of PEFT, by its name there, in any case
    fields: dict[str, Any] = field(default_factory=dict)  # settings of that method, by PEFT's names
    r: int = number(0, at_least=0)  # rank
    alpha: float = number(0.0, at_least=0)  # scale of the update, divided by the rank
    dropout: float = number(0.0, at_least=0, below=1)  # dropout before the adapter
    rslora: bool = False  # divide alpha by the square root of the rank (rsLoRA)
    dora: bool = False  # train the length of each output's weights apart from their direction (DoRA)
    # how A and B begin: default, gaussian, orthogonal, pissa, pissa_niter_N, olora, eva, corda, loftq
    init: str = "default"
    rank_pattern: dict[str, Any] = field(default_factory=dict)  # other ranks, by names of layers or their ends
    alpha_pattern: dict[str, Any] = field(default_factory=dict)  # other alphas, by names of layers or their ends
    layers: list[int] = field(default_factory=list)  # numbers of the layers with adapters, from 0; empty: all
    train_whole: list[str] = field(default_factory=list)  # layers that are trained and saved as a whole: lm_head, say
    # tokens whose rows of the embedding and of an untied head are trained: their ids, or all
    train_tokens: Any = field(default_factory=list, metadata={TYPE: list[int] | TokenChoice})
    lr_ratio: float = number(1.0, above=0)  # learning rate of B over that of A, which is optimizer.lr (LoRA+)
    start: str | None = None  # run, folder or hub id of the adapter that this one goes on from; null: a new one
    targets: list[str] = field(default_factory=list)  # all-linear, or names of layers; empty: PEFT's for the kind
    experts: bool = False  # adapt the stacked experts of a mixture too; adapter.dropout is 0


@dataclass(kw_only=True, slots=True)
class QuantizationConfig:
    """How the frozen base is stored, or how trained weights are rounded."""

    kind: str = MISSING  # how the frozen base is stored, or how trained weights are rounded
    double_quant: bool = False  # quantise the scales too, which saves half a bit a weight
    scheme: str = choice("int4", "int8da_int4", default="int4")  # numbers that quantisation-aware training rounds to


@dataclass(kw_only=True, slots=True)
class OptimizerConfig:
    """The optimizer; each kind reads the keys that its YAML sets, and the recipe sets `lr`."""

    kind: str = MISSING  # optimizer
    lr: float = number(above=0)  # peak learning rate
    weight_decay: float = number(at_least=0)  # weight decay
    beta1: float = number(0.0, at_least=0, below=1)  # decay rate of the first moment
    beta2: float = number(0.0, at_least=0, below=1)  # decay rate of the second moment
    eps: float = number(0.0, at_least=0)  # term added to the denominator
    momentum: float = number(0.0, at_least=0, below=1)  # momentum
    implementation: str = choice("fused", "foreach", "loop", default="fused")  # how torch steps the weights
    embedding_states: str = choice("same", "32bit", default="same")  # states of embeddings: as all others, or wider
    in_backward: bool = False  # step each weight during the backward pass, which saves the gradients


@dataclass(kw_only=True, slots=True)
class ScheduleConfig:
    """The learning rate over the run."""

    kind: str = MISSING  # shape of the learning rate schedule
    warmup_fraction: float | None = number(at_least=0, below=1)  # fraction of the steps for warm-up
    warmup_steps: int | None = number(None, at_least=0)  # steps for warm-up, in place of schedule.warmup_fraction
    final_fraction: float = number(0.0, at_least=0, at_most=1)  # last learning rate as a fraction of the peak
    decay_fraction: float = number(0.0, at_least=0, at_most=1)  # fraction of the steps for the decay


@dataclass(kw_only=True, slots=True)
class AttentionConfig:
    """Which kernel computes attention."""

    kind: str = MISSING  # attention kernel


@dataclass(kw_only=True, slots=True)
class PrecisionConfig:
    """Data types of the arithmetic and, in full fine-tuning, of the weights."""

    kind: str = MISSING  # data type of the arithmetic; auto: by the machine
    trained: str = choice("fp32", "bf16", default="fp32")  # data type of the weights in full fine-tuning


@dataclass(kw_only=True, slots=True)
class CompileConfig:
    """Use of torch.compile."""

    kind: str = MISSING  # what torch.compile compiles
    graphs: bool = False  # launch kernels as one recorded CUDA graph
    backend: str = choice("inductor", "aot_eager", "eager", "cudagraphs", default="inductor")  # what runs the graphs
    # what inductor optimises for
    mode: str = choice("default", "max-autotune-no-cudagraphs", "reduce-overhead", "max-autotune", default="default")
    # share of the activations that compiled layers save for the backward pass; auto: 0.6, or less where that fits
    memory_budget: float | str = number(0.6, above=0, at_most=1)

    @property
    def partitions(self) -> bool:
        """Whether inductor partitions the layers' graphs by the memory budget."""
        return self.kind == "blocks" and self.backend == "inductor"


@dataclass(kw_only=True, slots=True)
class ParallelConfig:
    """How several processes share the work: each of `replicate` copies of the model is sharded over `shard`."""

    kind: str = choice("auto", "ddp", "fsdp", "hsdp")  # how processes share the work; auto: ddp if it fits, else fsdp
    shard: int | str = number(at_least=1)  # processes that share one copy of the model
    replicate: int | str = number(at_least=1)  # copies of the model
    reshard: bool = MISSING  # free gathered weights after each layer, as ZeRO-3 does; false: as ZeRO-2
    sync: str = choice("each", "last")  # when gradients are reduced: with each micro-batch or the last one of a step
    overlap: bool = MISSING  # reduce gradients of ddp during the last backward pass
    offload: bool = MISSING  # keep weights and optimizer states on the host
    tensor: int = number(at_least=1)  # tensor parallelism, which is not offered: 1
    context: int = number(at_least=1)  # context parallelism, which is not offered: 1

    @property
    def divides(self) -> bool:
        """Whether each process has only a shard of the model."""
        return self.kind in {"fsdp", "hsdp"}


@dataclass(kw_only=True, slots=True)
class TrackerConfig:
    """Where metrics go besides metrics.jsonl."""

    kind: str = MISSING  # tracker that gets the metrics besides metrics.jsonl
    project: str = ""  # project or experiment of the tracker
    name: str | None = None  # name of the run; null: that of the output folder


@dataclass(kw_only=True, slots=True)
class TrainingConfig:
    """Length of the training, clipping, and activation checkpointing."""

    epochs: float = number(above=0)  # passes over the rows
    max_steps: int | None = number(at_least=1)  # largest number of steps; null: by epochs alone
    stop_after: int | None = number(None, at_least=1)  # save and stop after this step of the whole run's schedule
    freeze: list[str] = field(default_factory=list)  # weights that full fine-tuning leaves: parts of their names
    neftune: float = number(0.0, at_least=0)  # uniform noise on embeddings, times 1/sqrt(tokens x width); 0: none
    clip: float = number(at_least=0)  # largest global norm of the gradient; 0 switches clipping off
    # activation checkpointing: true, a number of layers, or auto for as few as fit
    recompute: bool | int | str = number(at_least=0)
    rehearse: bool | str = MISSING  # run the largest micro-batch once before step 1; auto: on a GPU
    offload: bool = MISSING  # keep the inputs of recomputed layers on the host
    profile_step: int | None = number(None, at_least=1)  # step to profile: its time by kind of operation; null: none
    max_bad_steps: int = number(at_least=1)  # non-finite gradients in a row before the run stops


@dataclass(kw_only=True, slots=True)
class EvalConfig:
    """Evaluations on held-out rows."""

    every: int | str = number(kind=int | Epochs, at_least=0)  # steps between evaluations; 0: only at the end
    # evaluate before the first step too, which counts for neither best nor patience; auto: unless eval.every is 0
    at_start: bool | str = False
    rows: int = number(at_least=1)  # rows of an evaluation micro-batch; does not change the result
    samples: int = number(at_least=0)  # held-out prompts to answer at each evaluation
    sample_tokens: int = number(at_least=1)  # largest number of tokens of an answer
    also: str | None = None  # file, folder, hub id or asset:NAME of general rows, scored beside the held-out ones
    objective: str = choice(*METRICS, default="eval_loss")  # metric by which best, patience and sweeps judge
    patience: int = number(at_least=0)  # evaluations without improvement before the run stops; 0: never
    min_delta: float = number(at_least=0)  # smallest change of the objective that counts as improvement


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """Checkpoints, and the weights of final/."""

    every: int | str = number(kind=int | Epochs, at_least=0)  # steps between checkpoints; 0: only at the end
    keep: int = number(at_least=1)  # newest checkpoints to keep, besides the best one
    final: str = choice("last", "best")  # weights of final/
    save_random_base: bool = MISSING  # write a base of random weights too, which an adapter needs


@dataclass(kw_only=True, slots=True)
class RecordConfig:
    """The lines of metrics.jsonl."""

    every: int = number(at_least=1)  # steps between lines of metrics


@dataclass(kw_only=True, slots=True)
class LaunchConfig:
    """Processes and threads on this machine."""

    num_processes: int | str = number(at_least=1)  # processes on this machine; auto: one per GPU
    threads: int | None = number(at_least=1, at_most=1024)  # CPU threads of each process; null: a share of the cores


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """All keys of `python -m app.train`."""

    output_dir: str = MISSING  # folder of the run
    seed: int = number(at_least=0, at_most=2**32 - 1)  # order of rows, initial adapter, dropout
    resume: str | None = MISSING  # auto: the newest good checkpoint of output_dir, or a new start; a path: that one
    varied_from: str | None = None  # folder of the run that gave the settings; typed as from=RUN
    dry_run: bool = MISSING  # show the plan without loading weights
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
