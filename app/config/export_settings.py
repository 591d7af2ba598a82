"""Configuration of an export: what app.export makes of a finished run, and the changes that it allows."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from app.config.adapter_start import adapter_folder
from app.config.adapters import ADAPTER
from app.config.command_line import Changes, Command
from app.config.fields import choice, number
from app.config.finished_run import (
    CHECKPOINT,
    FinishedRunConfig,
    checkpoint_problems,
    finished_folder,
    own_files,
    unread_model_path,
    with_recorded_precision,
)
from app.config.load import apply_changes
from app.config.tasks import task_of
from app.config.yaml_files import as_number

_EXPORT_ALLOWED = (
    *("cache_dir", "launch.threads", "model.path", "model.trust_remote_code"),
    *("dataset.path", "dataset.eval_path", "dataset.eval_fraction"),
)
_EXPORT_WHY_NOT = {"": "because an export writes down what the run made; only its files may lie elsewhere"}
# the export is verified on single held-out rows, through plain attention
_FOR_EXPORT = {"eval.rows": 1, "batching.packing": False, "attention.kind": "sdpa", "tracker.kind": "none"}


class ExportKind(NamedTuple):
    """What the command line asks of a kind of export."""

    needs_adapter: bool
    unused: Mapping[str, str] = {}  # keys that would change nothing, with the reason
    quants: tuple[str, ...] = ()  # that it writes, the first unless another is given
    by_llama_cpp: tuple[str, ...] = ()  # quants that take llama_cpp=DIR
    packages: tuple[str, ...] = ()  # beside those of the program: one that writes it, and what else the proof needs


EXPORT_KINDS = {
    "adapter": ExportKind(
        True, dict.fromkeys(("dtype", "shard_gb", "quant", "names"), "an adapter is exported as it is")
    ),
    "merged": ExportKind(needs_adapter=False, unused={"quant": "the weights of a merged model have 16 or 32 bits"}),
    "quantized": ExportKind(False, {"names": "it has the names of its base"}, quants=("nf4", "fp4", "int8")),
    "gguf": ExportKind(
        needs_adapter=False,
        unused={
            "dtype": "quant says how a GGUF file stores weights",
            "shard_gb": "a GGUF export is one file",
            "names": "a GGUF file has names of its own",
        },
        quants=("bf16", "f16", "q8_0", "q4_0"),
        by_llama_cpp=("q2_k", "q3_k_m", "q4_k_m", "q5_k_m", "q6_k"),
        packages=("gguf", "xllamacpp"),
    ),
}
_QUANTS = [quant for each in EXPORT_KINDS.values() for quant in (*each.quants, *each.by_llama_cpp)]


@dataclass(kw_only=True, slots=True)
class ExportConfig(FinishedRunConfig):
    """Options of app.export. `dtype` and `shard_gb` (of the largest file) are not for `kind=adapter`."""

    to: str
    kept_checkpoint: str | None = None  # best, or a number of steps; typed as checkpoint=N
    kind: str = choice(*EXPORT_KINDS)
    dtype: str = choice("bf16", "fp16", "fp32", default="bf16")  # with kind=quantized of what is not quantised
    quant: str = choice("auto", *_QUANTS, default="auto")  # auto: nf4 with kind=quantized, bf16 with kind=gguf
    llama_cpp: str | None = None  # folder of llama.cpp: its programs write the GGUF file
    names: str = choice("whole", "text", default="whole")  # of what reads more than text; text: its text part alone
    shard_gb: float = number(5.0, above=0)
    push: str | None = None  # USER/NAME: a repository of the hub, which gets the verified export
    private: bool = True  # the repository of `push`, where that is new
    adapters: list[str] = field(default_factory=list)  # RUN:FACTOR or FOLDER:FACTOR: adapters to sum
    combine: str = choice("auto", "cat", "svd", "linear", default="auto")  # auto: svd with rank=, else cat
    rank: int | None = number(None, at_least=1)  # of the sum by svd

    @property
    def factors(self) -> dict[str, float]:
        """The factor of each of `adapters`; NaN where there is none."""
        split = (text.rpartition(":") for text in self.adapters)
        return {given: math.nan if (read := as_number(factor)) is None else read for given, _, factor in split}

    @property
    def combination(self) -> str:
        """What `combine=auto` comes to."""
        by_rank = "cat" if self.rank is None else "svd"
        return by_rank if self.combine == "auto" else self.combine

    @property
    def target(self) -> Path:
        return Path(self.to).expanduser().absolute()

    def written(self, key: str) -> str | None:
        """The dtype or the quant that weights are converted to; None: this kind does not read the key."""
        return None if key in EXPORT_KINDS[self.kind].unused else getattr(self, key)


def export_config(arguments: Sequence[str]) -> ExportConfig:
    """Read the command line of app.export."""
    typed = EXPORT.read(arguments)
    folder = finished_folder(typed.options.get("run"), typed.options.get("kept_checkpoint"))
    run = with_recorded_precision(folder)
    over = {**own_files(folder), **_FOR_EXPORT}
    config = EXPORT.validated(apply_changes(run, typed.settings, over) | typed.data, typed.changes)
    quants = EXPORT_KINDS[config.kind].quants
    return replace(config, quant=quants[0]) if config.quant == "auto" and quants else config


def _export_problems(config: ExportConfig, changes: Changes) -> Iterator[str]:
    kind = EXPORT_KINDS[config.kind]
    if kind.needs_adapter and config.adapter.kind == "none":
        yield (
            f"kind={config.kind}: run={config.run} tuned a whole model and has no adapter. Give kind=merged: its "
            f"weights in dtype={config.dtype}."
        )
    if kind.by_llama_cpp and not task_of(config.task).writes_text:
        yield f"kind={config.kind} is for models that write text, not for task={config.task.kind}. Give kind=merged."
    for key, reason in kind.unused.items():
        if key in changes:
            other = next(name for name, each in EXPORT_KINDS.items() if key not in each.unused)
            yield f"{key}={changes[key]} would change nothing: {reason}. Leave it out, or give kind={other}."
    if config.llama_cpp is not None and not kind.by_llama_cpp:
        yield f"llama_cpp={config.llama_cpp}: llama.cpp writes GGUF files alone. Leave it out, or give kind=gguf."
    elif config.quant in kind.by_llama_cpp and config.llama_cpp is None:
        yield f"quant={config.quant}: it is llama.cpp that writes it. Give llama_cpp=DIR, its folder, or quant=q4_0."
    elif config.quant != "auto" and kind.quants and config.quant not in (*kind.quants, *kind.by_llama_cpp):
        yield f"quant={config.quant}: kind={config.kind} writes {', '.join(kind.quants)}. Give one of these."
    if "private" in changes and config.push is None:
        yield f"private={changes['private']} says who sees a repository, and there is none. Give push=USER/NAME."
    yield from unread_model_path(config, changes, needs_base=False)
    yield from checkpoint_problems(config.kept_checkpoint)
    yield from _combination_problems(config)


EXPORT = Command(
    schema=ExportConfig, rules=_export_problems, allowed=_EXPORT_ALLOWED, why_not=_EXPORT_WHY_NOT, typed_as=CHECKPOINT
)


def _combination_problems(config: ExportConfig) -> Iterator[str]:
    """Problems with `adapters`, `combine` and `rank`."""
    if not config.adapters:
        if config.combine != "auto" or config.rank is not None:
            yield 'combine and rank say how adapters are summed. Give adapters="[A:0.7,B:0.3]", or leave both out.'
        return
    given = f"adapters=[{','.join(config.adapters)}]"
    if config.adapter.kind == "none":
        yield f"{given}: run={config.run} tuned a whole model, so it has no base to add them to. Give run=A of one."
    yield from _factor_problems(config, given)
    if config.kept_checkpoint is not None:
        yield f"{given}: checkpoint={config.kept_checkpoint} is in place of run={config.run}'s own. Leave one out."
    if (config.combination == "svd") != (config.rank is not None):
        yield (
            f"combine={config.combine} rank={config.rank}: svd alone takes a rank, and needs one. Give rank=32, say, "
            "or leave both out: cat sums exactly."
        )


def _factor_problems(config: ExportConfig, given: str) -> Iterator[str]:
    if len(config.factors) < len(config.adapters):
        yield f"{given}: the same adapter stands there twice. Give it once, with the sum of its factors."
    for name, factor in config.factors.items():
        if not math.isfinite(factor):
            yield f"{given}: each has a finite factor behind a colon, such as {name or 'RUN'}:0.5."
        elif not (adapter_folder(name) / ADAPTER).is_file():
            yield f"{given}: {name} has no {ADAPTER}. Give a run that trained an adapter, or the folder of one."
    if not any(config.factors.values()):
        yield f"{given}: all factors are 0, so nothing is left. Give one that is not."
