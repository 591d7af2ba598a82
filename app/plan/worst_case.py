"""The largest micro-batch that the settings allow: a run of any data has none that is larger."""

import math

from app.config.schema import RunConfig
from app.plan.memory_plan import Shape

_MULTIPLE = 8  # the widths that padded rows are rounded up to (data.collate)


def worst_case(run: RunConfig) -> Shape:
    """A full bin of rows as long as they may be; or `batching.rows` of those, padded. No data is read."""
    longest, rows = run.dataset.max_length, run.batching.rows
    packed = run.batching.packing
    width = run.batching.bin_tokens if packed else -(-longest // _MULTIPLE) * _MULTIPLE
    documents: tuple[int, ...] = ()
    if packed:
        documents = _parts(width, longest)
    elif run.task.kind == "masked":  # padding is kept apart from what sees both ways
        documents = _parts(width, longest) * rows
    return Shape(
        rows=1 if packed else rows,
        width=width,
        documents=documents,
        places=len(documents),
        longest=longest if documents else width,
        label_rows=_labelled(run, width if packed else rows * longest, len(documents) or rows),
        micro_batches=run.batching.accumulation,
    )


def _parts(width: int, longest: int) -> tuple[int, ...]:
    full, rest = divmod(width, longest)
    return (longest,) * full + ((rest,) if rest else ())


def _labelled(run: RunConfig, tokens: int, documents: int) -> int:
    """All of them where the next token is predicted: which are not trained, only data tells."""
    if run.task.kind == "classification":
        return documents
    if run.task.kind != "masked":
        return tokens
    return min(tokens, math.ceil(run.task.mask_share * tokens) + documents)
