"""How large the bins are: told, or as large as the memory of the machine allows. The tokens of a step are the same.

batching.tokens=auto leaves a step what it would be without it: `model.suggest.tokens * batching.accumulation` tokens on
each process. They are divided into 1, 2, 4, ... micro-batches of a bin each, the larger the faster.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from app.config.schema import RunConfig
from app.distributed.host_group import Peers
from app.errors import ConfigError
from app.training.choices import Choices

AUTO = "auto"
KEPT_BINS = "tokens"  # among the choices of a checkpoint

# Of a run and its layers: the tokens of a bin, and a remark
Largest = Callable[[RunConfig, Choices, int], tuple[int, str]]


def is_open(run: RunConfig) -> bool:
    """Whether somebody has to say how large they are."""
    return run.batching.tokens == AUTO


def step_tokens(run: RunConfig) -> int:
    """Of one process."""
    return run.model.suggest.tokens * run.batching.accumulation


def ladder(run: RunConfig) -> list[int]:
    """The bins that divide a step and hold every row, the largest first."""
    return list(_halved(step_tokens(run), run.dataset.max_length))


def _halved(tokens: int, least: int) -> Iterator[int]:
    while tokens >= least:
        yield tokens
        if tokens % 2:
            return
        tokens //= 2


def suggested(run: RunConfig) -> int:
    """The model's own size, or what of the ladder is next to it."""
    rungs = ladder(run)
    return next((tokens for tokens in rungs if tokens <= run.model.suggest.tokens), rungs[-1])


def with_bins(run: RunConfig, tokens: int) -> RunConfig:
    """The same step in bins of so many tokens."""
    whole = step_tokens(run)
    if whole % tokens:
        raise ConfigError(
            f"batching.tokens=auto: this run began with bins of {tokens} tokens, and a step of {whole} (model.suggest."
            f"tokens={run.model.suggest.tokens} * batching.accumulation={run.batching.accumulation}) is no multiple of "
            f"them. Give the batching.accumulation that it began with, or batching.tokens={tokens} and another one."
        )
    return replace(run, batching=replace(run.batching, tokens=tokens, accumulation=whole // tokens))


def settled_bins(
    run: RunConfig,
    choices: Choices,
    layers: int,
    kept: Mapping[str, str],
    find: Largest | None,
    peers: Peers,
) -> tuple[RunConfig, list[str]]:
    """The run with its bins in numbers, and remarks: those it began with, else those that were found."""
    if not is_open(run):
        return run, []
    if KEPT_BINS in kept:
        return with_bins(run, int(kept[KEPT_BINS])), []
    tokens, remark = suggested(run), ""
    if find is not None and peers.rank == 0:  # the first process speaks for all
        try:
            tokens, remark = find(run, choices, layers)
        except ConfigError as reason:
            remark = f"batching.tokens=auto: {tokens} tokens. {reason}"
        except Exception as fault:  # noqa: BLE001  whatever a kind does in a trace, the run does not depend on it
            remark = f"batching.tokens=auto: {tokens} tokens; no plan for this model ({type(fault).__name__})"
    return with_bins(run, int(peers.highest(tokens if peers.rank == 0 else 0))), [remark] if remark else []
