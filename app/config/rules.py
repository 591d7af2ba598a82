"""Rules on combinations of keys, as pure functions from a run to its problems, and detection of unused keys."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from app.config import conf_files
from app.config.adapters import ADAPTER_KINDS
from app.config.dataset import DATA_RULES, RANDOM, RANDOM_ROWS, has_held_out_rows, paths_read
from app.config.kinds import OWN, PREFERENCE_KINDS, QUANTIZATION_KINDS, recipes_of
from app.config.schema import RunConfig
from app.config.tasks import TASKS
from app.config.validate import format_value

AUTO, BLOCKS, NONE = "auto", "blocks", "none"


class Obstacle(NamedTuple):
    """Reason why layers cannot be compiled, and the fix if compile=blocks is set."""

    reason: str
    remedy: str


def compile_refusals(obstacles: Iterable[Obstacle]) -> Iterator[str]:
    """Yield the problems of compile=blocks."""
    for obstacle in obstacles:
        yield f"compile=blocks: {obstacle.reason}. {obstacle.remedy}"


def settings_obstacles(run: RunConfig) -> Iterator[Obstacle]:
    """Yield the obstacles that follow from settings alone."""
    if run.task.router_loss not in ("auto", 0):
        yield Obstacle(
            f"task.router_loss={run.task.router_loss:g} reads routers inside compiled layers",
            "Set compile=none, or task.router_loss=0.",
        )
    if not run.batching.packing:
        yield Obstacle(
            "padded rows have variable shapes (batching.packing=false), which compiled layers do not support",
            "Set batching.packing=true, or compile=none.",
        )
    if run.parallel.context > 1:
        yield Obstacle(
            f"parallel.context={run.parallel.context} exchanges heads between processes inside layers",
            "Set compile=none, or parallel.context=1.",
        )
    if reason := QUANTIZATION_KINDS[run.quantization.kind].uncompilable:
        yield Obstacle(
            f"quantization.kind={run.quantization.kind}: {reason}", "Set compile=none, or quantization=int8."
        )


def compile_problems(run: RunConfig) -> Iterator[str]:
    """Yield conflicts of the compile settings."""
    backend, mode, graphs = run.compile.backend, run.compile.mode, run.compile.graphs
    if run.compile.kind == BLOCKS:
        yield from compile_refusals(settings_obstacles(run))
    if mode != "default" and backend != "inductor":
        yield (
            f"compile.mode={mode} needs compile.backend=inductor, not {backend}. "
            "Set compile.backend=inductor, or compile.mode=default."
        )
    if graphs and backend in {"aot_eager", "eager"}:
        yield (
            f"compile.graphs=true is not supported with compile.backend={backend}, which runs kernels one by one. "
            "Set compile.backend=inductor or cudagraphs, or compile.graphs=false."
        )
    if not graphs and backend == "cudagraphs":
        yield (
            "compile.backend=cudagraphs needs compile.graphs=true. "
            "Set compile.graphs=true, or compile.backend=inductor."
        )
    if not graphs and mode in {"reduce-overhead", "max-autotune"}:
        yield (
            f"compile.mode={mode} records CUDA graphs and needs compile.graphs=true. "
            "Set compile.graphs=true, or compile.mode=default or max-autotune-no-cudagraphs."
        )


# ---- unread keys


_SECTIONS = ("adapter", "compile", "optimizer", "preference", "quantization", "schedule", "task", "tracker")


def readers_of(key: str) -> Collection[str]:
    """Return the kinds of a section that read a key; empty if all or none of them do."""
    section, _, leaf = key.partition(".")
    if section not in _SECTIONS or not leaf:
        return ()
    keys = _keys_by_kind(conf_files.CONF / section)
    readers = [kind for kind, names in keys.items() if leaf.partition(".")[0] in names]
    return readers if len(readers) < len(keys) else ()


@cache
def _keys_by_kind(folder: Path) -> dict[str, Collection[str]]:
    return {file.stem: yaml.safe_load(file.read_text("utf-8")).keys() for file in sorted(folder.glob("*.yaml"))}


def is_unread(run: RunConfig, key: str) -> bool:
    """Return whether the run's kind of the section, or its dataset, ignores the key."""
    if key.startswith(RANDOM_ROWS):
        return RANDOM not in paths_read(run.dataset)
    readers = readers_of(key)
    return bool(readers) and getattr(run, key.partition(".")[0]).kind not in readers


def unread_problems(run: RunConfig, typed: Mapping[str, Any]) -> Iterator[str]:
    """Yield problems with `typed` keys that have no effect; unused values in YAML files are allowed."""
    for key, value in typed.items():
        setting, section = f"{key}={format_value(value)}", key.partition(".")[0]
        if key.startswith("model.architecture") and run.model.weights == "pretrained":
            yield (
                f"{setting} has no effect with model.weights=pretrained, which reads the architecture from config.json."
                " Add model.weights=random for a randomly initialized model."
            )
        elif key in ("model.rope_factor", "model.rope_original") and value is not None and run.model.rope == OWN:
            yield f"{setting} has no effect with model.rope=own. Leave it out, or set model.rope=yarn."
        elif key.startswith(RANDOM_ROWS) and is_unread(run, key):
            yield f"{setting} has no effect without dataset=random. Leave it out, or choose dataset=random."
        elif is_unread(run, key):
            kind = f"{section}={getattr(run, section).kind}"
            cause, remedy = f"{kind} ignores it", f"{section}={' or '.join(readers_of(key))}"
            if section == "adapter" and typed.get("recipe") == "full" and "adapter" not in typed:
                cause, remedy = "recipe=full trains no adapter", "recipe=lora"
            yield f"{setting}: {cause}. Leave it out, or choose {remedy}."


# ---- rules


Rule = Callable[[RunConfig], Iterator[str]]

_TASKS_OF_ANSWERS = {loss.task for loss in PREFERENCE_KINDS.values()}


def problems_of(run: RunConfig) -> list[str]:
    """Return the problems of all broken rules, in the order of RULES."""
    return [problem for rule in RULES for problem in rule(run)]


def _position_problems(run: RunConfig) -> Iterator[str]:
    positions = run.model.architecture.get("max_position_embeddings")
    if positions and run.model.rope != OWN:
        positions = run.model.scaled_positions(positions)
    if run.model.weights == "random" and positions and run.dataset.max_length > positions:
        yield (
            f"dataset.max_length={run.dataset.max_length} exceeds the model's {positions} positions. "
            f"Set dataset.max_length={positions} or less."
        )


def _rope_problems(run: RunConfig) -> Iterator[str]:
    if run.model.rope != OWN and run.model.rope_factor is None:
        yield (
            f"model.rope={run.model.rope} needs model.rope_factor. Set model.rope_factor=4 for four times the "
            "positions of the base."
        )


def _bin_problems(run: RunConfig) -> Iterator[str]:
    batching, longest = run.batching, run.dataset.max_length
    if batching.tokens != "auto":
        if batching.packing and longest > batching.bin_tokens:
            yield (
                f"dataset.max_length={longest} exceeds the bin size (batching.tokens={batching.tokens}). "
                f"Set batching.tokens={longest} or more, or dataset.max_length={batching.tokens} or less."
            )
        return
    whole = run.model.suggest.tokens * batching.accumulation
    if not batching.packing:
        yield (
            "batching.tokens=auto needs batching.packing=true: padded rows have no bins. "
            "Set batching.packing=true, or batching.tokens to a number and batching.rows."
        )
    elif run.optimizer.in_backward:
        yield (
            "batching.tokens=auto needs several micro-batches per step, but optimizer.in_backward=true allows one. "
            "Set optimizer.in_backward=false, or batching.tokens to a number."
        )
    elif whole < longest:
        yield (
            f"batching.tokens=auto: a step has model.suggest.tokens={run.model.suggest.tokens} x "
            f"batching.accumulation={batching.accumulation} tokens, too few for dataset.max_length={longest}. "
            f"Set batching.accumulation={-(-longest // run.model.suggest.tokens)} or dataset.max_length={whole}."
        )


def _attention_problems(run: RunConfig) -> Iterator[str]:
    if run.attention.kind == OWN and run.batching.packing is True:
        yield (
            "attention=own (the model's own attention) cannot separate packed documents (batching.packing=true). "
            "Set batching.packing=auto, or attention=auto."
        )


def _preference_problems(run: RunConfig) -> Iterator[str]:
    kind, task = run.preference.kind, run.task.kind
    if PREFERENCE_KINDS[kind].task == task or (kind == "none" and task not in _TASKS_OF_ANSWERS):
        return
    yield (
        f"preference={kind} does not match task={task}. "
        f"Choose {' or '.join(recipes_of('preference'))} for chosen/rejected pairs (task=preference), "
        f"{' or '.join(recipes_of('preference_label'))} for single labeled answers (task=preference_label), "
        "or preference=none with another task."
    )


def _pair_length_problems(run: RunConfig) -> Iterator[str]:
    batching, longest = run.batching, run.dataset.max_length
    learns_pairs = TASKS[run.task.kind].documents > 1
    if learns_pairs and batching.packing and batching.tokens != "auto" and (2 * longest > batching.bin_tokens):
        yield (
            f"dataset.max_length={longest}: a chosen/rejected pair has up to twice as many tokens, more than a bin "
            f"(batching.tokens={batching.tokens}). Set batching.tokens={2 * longest} or more, or "
            f"dataset.max_length={batching.bin_tokens // 2} or less."
        )


def _reference_noise_problems(run: RunConfig) -> Iterator[str]:
    for key, value in (("adapter.dropout", run.adapter.dropout), ("training.neftune", run.training.neftune)):
        if run.preference.has_reference and value:
            yield (
                f"{key}={value:g} with preference={run.preference.kind}: the reference model runs without it, so "
                f"rewards would be noisy from the first step. Set {key}=0."
            )


def _best_checkpoint_problems(run: RunConfig) -> Iterator[str]:
    settings = ["checkpoint.final=best"] if run.checkpoint.final == "best" else []
    settings += [f"eval.patience={run.eval.patience}"] if run.eval.patience else []
    objective = [f"eval.objective={run.eval.objective}"] if run.eval.objective != "eval_loss" else []
    options = [*settings, *objective, *(["eval.at_start=true"] if run.eval.at_start is True else [])]
    if options and not (run.dataset.eval_path or run.dataset.eval_split or run.dataset.eval_fraction):
        yield f"{' and '.join(options)} needs an eval set. Set dataset.eval_path=FILE or dataset.eval_fraction=0.02."
    elif settings and run.eval.every == 0:
        yield f"{' and '.join(settings)} needs evaluations during training. Set eval.every=100."


def _new_token_problems(run: RunConfig) -> Iterator[str]:
    texts, trained = run.model.add_tokens, run.adapter.train_tokens
    setting = f"model.add_tokens=[{', '.join(texts)}]"
    if any(not text.strip() for text in texts) or len(set(texts)) < len(texts):
        yield f"{setting}: duplicate or empty token. Give each text once."
    elif texts and run.adapter.kind != "none" and not trained:
        other = "adapter=lora " if run.adapter.kind == "peft" else ""
        yield (
            f"{setting}: adapters do not train the new embeddings. Set {other}adapter.train_tokens=new, or recipe=full."
        )
    elif trained == "new" and not texts:
        yield "adapter.train_tokens=new without new tokens. Set model.add_tokens=[...], or list token IDs."


def _eval_also_problems(run: RunConfig) -> Iterator[str]:
    if run.eval.also is None:
        return
    if run.preference.kind != "none":
        yield (
            f"eval.also={run.eval.also} is not supported with preference={run.preference.kind}: a preference loss "
            "cannot score general rows. Leave it out."
        )
    if not has_held_out_rows(run.dataset):
        yield (
            f"eval.also={run.eval.also} needs an eval set. Set dataset.eval_path=FILE or dataset.eval_fraction=0.02."
        )


def _offload_problems(run: RunConfig) -> Iterator[str]:
    if run.training.offload and run.training.recompute in (False, 0):
        yield (
            "training.offload=true needs gradient checkpointing, but training.recompute="
            f"{str(run.training.recompute).lower()}. Set training.recompute=true or training.offload=false."
        )


def _tile_problems(run: RunConfig) -> Iterator[str]:
    tile, quantization, batching = run.training.tile, run.quantization.kind, run.batching
    if tile in (0, "auto"):
        return
    if QUANTIZATION_KINDS[quantization].mixes_rows:
        yield (
            f"training.tile={tile} is not supported with quantization.kind={quantization}: the output of a row depends "
            "on the other rows. Set training.tile=0, or quantization=int8."
        )
    if batching.packing is not False and isinstance(batching.tokens, int) and int(tile) >= batching.tokens:
        yield (
            f"training.tile={tile} is not below batching.tokens={batching.tokens}, so there is one tile. "
            "Set a smaller training.tile, or 0."
        )


def _quantization_problems(run: RunConfig) -> Iterator[str]:
    trains = QUANTIZATION_KINDS[run.quantization.kind].trains
    if trains and run.adapter.kind != "none":
        yield (
            f"quantization.kind={run.quantization.kind} (quantization-aware training) is not supported with "
            f"adapter.kind={run.adapter.kind}: merging the adapter changes the rounded weights. Set recipe=full, or "
            "quantization=none."
        )
    if run.quantization.kind != "none" and run.adapter.kind == "none" and not trains:
        yield (
            f"quantization.kind={run.quantization.kind} needs adapter.kind=lora: a quantized base is frozen. "
            "Choose recipe=lora or qlora, or set quantization=none."
        )
    size = run.quantization.group_size
    if size != -1 and (size < 1 or size % 2):
        yield f"quantization.group_size={size}: a byte has two weights. Set an even number (128), or -1 for a row."


def _precision_problems(run: RunConfig) -> Iterator[str]:
    trained, norm, precision = run.precision.trained, run.model.norm, run.precision.kind
    if trained != "fp32" and run.adapter.kind == "none" and precision != "bf16":
        yield (
            f"precision.trained={trained} needs precision=bf16, but precision.kind={precision}. "
            "Set precision=bf16, or precision.trained=fp32."
        )
    if norm != "own" and precision in {"fp32", "tf32"}:
        yield (
            f"model.norm={norm} is for bf16 or fp16, but precision={precision} computes in fp32. "
            "Set precision=bf16, or model.norm=own."
        )


def _full_fine_tuning_problems(run: RunConfig) -> Iterator[str]:
    has_adapter = f"adapter.kind={run.adapter.kind}"
    trained, norm, states = run.precision.trained, run.model.norm, run.optimizer.embedding_states
    if run.adapter.kind == "none":
        return
    if trained != "fp32":
        yield (
            f"precision.trained={trained} is for full fine-tuning; with {has_adapter} the base is already in 16 bits. "
            "Set recipe=full, or precision.trained=fp32."
        )
    if norm != "own":
        yield (
            f"model.norm={norm} is for full fine-tuning, but this run has {has_adapter}. Set recipe=full, or "
            "model.norm=own."
        )
    if states != "same":
        yield (
            f"optimizer.embedding_states={states} is for trained embeddings; {has_adapter} freezes them. "
            "Set recipe=full, or optimizer.embedding_states=same."
        )
    if run.training.freeze:
        yield (
            f"training.freeze=[{','.join(run.training.freeze)}] is for full fine-tuning; {has_adapter} freezes the "
            "whole base. Leave it out and set adapter.targets, or set recipe=full."
        )
    if run.optimizer.in_backward:
        yield (
            f"optimizer.in_backward=true is for full fine-tuning; with {has_adapter} gradients are small. "
            "Set recipe=full, or optimizer.in_backward=false."
        )


def _conflicts(key: str, reason: str, faults: list[tuple[bool, str, str]]) -> Iterator[str]:
    """Yield one message about all settings that conflict with `key=true`.

    A fault is whether there is a conflict, the current setting, and its replacement.
    """
    conflicts = [(setting, remedy) for broken, setting, remedy in faults if broken]
    if conflicts:
        yield (
            f"{key}=true {reason.format(' and '.join(setting for setting, _ in conflicts))}. "
            f"Set {' '.join(remedy for _, remedy in conflicts)}, or {key}=false."
        )


def _optimizer_step_problems(run: RunConfig) -> Iterator[str]:
    optimizer, setting, remedy = run.optimizer, "optimizer=adamw_apex", "optimizer=adamw"
    if optimizer.kind != "adamw_apex":
        setting, remedy = f"optimizer.implementation={optimizer.implementation}", "optimizer.implementation=fused"
    singly = {
        "optimizer.in_backward=true": optimizer.in_backward,
        "precision.trained=bf16": run.precision.trained == "bf16",
    }
    if setting != remedy and any(singly.values()):
        names = " and ".join(name for name, is_set in singly.items() if is_set)
        yield f"{setting} steps all weights at once, but {names} steps them one by one. Set {remedy}."


def _in_backward_problems(run: RunConfig) -> Iterator[str]:
    if not run.optimizer.in_backward or run.adapter.kind != "none":
        return
    accumulation, processes = run.batching.accumulation, run.launch.num_processes
    yield from _conflicts(
        "optimizer.in_backward",
        "steps each weight during the backward pass and does not support {}",
        [
            (run.training.clip != 0, f"training.clip={run.training.clip:g}", "training.clip=0"),
            (accumulation != 1, f"batching.accumulation={accumulation}", "batching.accumulation=1"),
            (run.precision.kind == "fp16", "precision=fp16", "precision=bf16 or fp32"),
            (processes not in (1, "auto"), f"launch.num_processes={processes}", "launch.num_processes=1"),
        ],
    )


def _cuda_graph_problems(run: RunConfig) -> Iterator[str]:
    recompute, accumulation = run.training.recompute, run.batching.accumulation
    profile_step = run.training.profile_step  # operations inside a recorded graph have no names
    faults = [
        (run.compile.kind != BLOCKS, f"compile={run.compile.kind}", "compile=blocks"),
        (recompute not in (False, 0), f"training.recompute={recompute}", "training.recompute=0"),
        (run.training.tile not in (0, "auto"), f"training.tile={run.training.tile}", "training.tile=0"),
        (accumulation > 1, f"batching.accumulation={accumulation}", "batching.accumulation=1"),
        (run.parallel.divides, f"parallel={run.parallel.kind}", "parallel=auto"),
        (profile_step is not None, f"training.profile_step={profile_step}", "training.profile_step=null"),
    ]
    if run.compile.graphs:
        reason = "does not support {}"
        yield from _conflicts("compile.graphs", reason, faults)


def _parallel_problems(run: RunConfig) -> Iterator[str]:
    if run.parallel.tensor > 1:
        yield (
            f"parallel.tensor={run.parallel.tensor}: tensor parallelism is not supported because PEFT shards lora_A "
            "of row-parallel layers twice. Set parallel.tensor=1, and parallel=fsdp if the model does not fit."
        )
    if run.parallel.kind == "ddp" and run.parallel.offload:
        yield (
            "parallel.offload=true keeps shards in CPU RAM, but parallel=ddp does not shard the model. "
            "Set parallel=fsdp, or parallel.offload=false."
        )
    if run.parallel.divides and run.parallel.overlap:
        yield (
            f"parallel.overlap=true is for parallel=ddp; parallel={run.parallel.kind} always overlaps communication. "
            "Set parallel.overlap=false, or parallel=ddp."
        )
    if run.parallel.divides and run.optimizer.kind == "adafactor":
        yield (
            f"optimizer=adafactor needs whole tensors, but parallel={run.parallel.kind} shards them. "
            "Set optimizer=adamw_8bit, or parallel=ddp."
        )


def _context_problems(run: RunConfig) -> Iterator[str]:
    context, processes = run.parallel.context, run.launch.num_processes
    quantization, init = run.quantization.kind, run.adapter.init
    faults = [
        (run.task.kind != "causal", f"task={run.task.kind}", "task=causal"),
        (run.batching.packing is False, "batching.packing=false", "batching.packing=true"),
        (run.attention.kind == OWN, "attention=own", "attention=auto"),
        (run.training.neftune > 0, f"training.neftune={run.training.neftune:g}", "training.neftune=0"),
        (run.task.router_loss not in (AUTO, 0), f"task.router_loss={run.task.router_loss}", "task.router_loss=0"),
        (run.parallel.overlap, "parallel.overlap=true", "parallel.overlap=false"),
        (init in {"eva", "corda"}, f"adapter.init={init}", "adapter.init=default"),
        (QUANTIZATION_KINDS[quantization].mixes_rows, f"quantization.kind={quantization}", "quantization=int8"),
    ]
    broken = [(setting, remedy) for is_broken, setting, remedy in faults if is_broken]
    if context > 1 and broken:
        yield (
            f"parallel.context={context} slices packed rows and does not support "
            f"{' and '.join(setting for setting, _ in broken)}. Set {' '.join(remedy for _, remedy in broken)}, or "
            "parallel.context=1."
        )
    if isinstance(processes, int) and processes > 1 and processes % context:
        yield (
            f"launch.num_processes={processes} is not a multiple of parallel.context={context}. Set "
            f"launch.num_processes={-(-processes // context) * context}, or parallel.context=1."
        )


def _random_weight_problems(run: RunConfig) -> Iterator[str]:
    if run.model.weights == "random" and "model_type" not in run.model.architecture:
        yield "model.weights=random needs model.architecture with model_type and the other config.json values."
    if run.model.weights == "random" and Path(run.model.path).expanduser().is_dir():
        yield (
            f"model.path={run.model.path} has no effect with model.weights=random. "
            "Choose model=folder, or a similar model=NAME with model.weights=pretrained."
        )


def _warmup_problems(run: RunConfig) -> Iterator[str]:
    steps, fraction = run.schedule.warmup_steps, run.schedule.warmup_fraction
    if steps is not None and fraction is not None:
        yield (
            f"schedule.warmup_steps={steps} and schedule.warmup_fraction={fraction:g} both set the warmup. "
            "Keep one; set the other to null."
        )


def _resume_problems(run: RunConfig) -> Iterator[str]:
    if run.resume in (None, "auto"):
        return
    path = Path(run.resume).expanduser()
    if not path.is_dir():
        yield (f"resume={run.resume}: no such folder. Set resume=auto or a folder like RUN/checkpoints/step-000100.")


_MIRROR = re.compile(r"(s3|gs|hf|file|memory)://([^?#@\s]+)")


def _mirror_problems(run: RunConfig) -> Iterator[str]:
    """Yield the problem of a mirror; a URL that may have a password or signature is not shown."""
    url = run.checkpoint.mirror
    if url is None:
        return
    match = _MIRROR.fullmatch(url)
    if set(url) & set("?#@"):
        yield (
            "checkpoint.mirror: the URL must have no user, password, query or fragment. Give credentials in the "
            "environment, e.g. AWS_ACCESS_KEY_ID."
        )
    elif match is None:
        yield (
            f"checkpoint.mirror={url}: expected a URL like s3://bucket/runs, gs://bucket/runs, "
            "hf://buckets/ORG/NAME/runs or file:///backup/runs."
        )
    elif match[1] == "file":
        folder = Path(run.output_dir).expanduser().resolve()
        mirror = Path(match[2]).resolve() / folder.name
        if mirror.is_relative_to(folder) or folder.is_relative_to(mirror):
            yield f"checkpoint.mirror={url}: {mirror} is in output_dir={run.output_dir}. Choose another folder."


RULES: tuple[Rule, ...] = (
    *DATA_RULES,
    compile_problems,
    _position_problems,
    _rope_problems,
    _bin_problems,
    _attention_problems,
    _preference_problems,
    _pair_length_problems,
    _reference_noise_problems,
    _best_checkpoint_problems,
    _eval_also_problems,
    _new_token_problems,
    lambda run: ADAPTER_KINDS[run.adapter.kind].problems(run),
    _offload_problems,
    _tile_problems,
    _quantization_problems,
    _precision_problems,
    _full_fine_tuning_problems,
    _optimizer_step_problems,
    _in_backward_problems,
    _parallel_problems,
    _context_problems,
    _cuda_graph_problems,
    _random_weight_problems,
    _warmup_problems,
    _resume_problems,
    _mirror_problems,
)
