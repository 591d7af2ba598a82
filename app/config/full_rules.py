"""Rules about training whole models in little memory."""

from collections.abc import Iterator

from app.config.schema import RunConfig


def _narrow_weights_are_of_whole_models(run: RunConfig) -> Iterator[str]:
    if run.precision.trained == "fp32":
        return
    if run.adapter.kind != "none":
        yield (
            f"precision.trained={run.precision.trained} is for training whole models, and this run has adapter.kind="
            f"{run.adapter.kind}: its base is in 16 bits already. Set recipe=full, or precision.trained=fp32."
        )
    elif run.precision.kind != "bf16":
        yield (
            f"precision.trained={run.precision.trained} goes with arithmetic in bf16, and this run has precision.kind="
            f"{run.precision.kind}. Set precision=bf16 too, or precision.trained=fp32."
        )


def _steps_in_backward_see_one_gradient(run: RunConfig) -> Iterator[str]:
    """All that stands in the way in one message: they are mended together."""
    if not run.optimizer.in_backward:
        return
    if run.adapter.kind != "none":
        yield (
            f"optimizer.in_backward=true saves the gradients of whole models, and this run has adapter.kind="
            f"{run.adapter.kind}: those of adapters are small. Set recipe=full, or optimizer.in_backward=false."
        )
        return
    faults = [
        (run.training.clip != 0, f"training.clip={run.training.clip:g}", "training.clip=0"),
        (
            run.batching.accumulation != 1,
            f"batching.accumulation={run.batching.accumulation}",
            "batching.accumulation=1",
        ),
        (run.precision.kind == "fp16", "precision=fp16", "precision=bf16 or fp32"),
        (
            run.launch.num_processes not in (1, "auto"),
            f"launch.num_processes={run.launch.num_processes}",
            "launch.num_processes=1",
        ),
    ]
    given = [text for broken, text, _ in faults if broken]
    if given:
        wanted = " ".join(text for broken, _, text in faults if broken)
        yield (
            f"optimizer.in_backward=true steps each weight as soon as its gradient is there, so nothing can be done to "
            f"all gradients first, as {' and '.join(given)} would. Set {wanted}, or optimizer.in_backward=false."
        )


def _recorded_graphs_keep_gradients(run: RunConfig) -> Iterator[str]:
    if run.parallel.kind in {"zero2", "zero3"} and run.compile.graphs:
        yield (
            "compile.graphs=true writes gradients to the same place each time, and "
            f"parallel={run.parallel.kind} lets them go as they are sent. Set compile.graphs=false, or parallel=auto."
        )


FULL_RULES = (
    _narrow_weights_are_of_whole_models,
    _steps_in_backward_see_one_gradient,
    _recorded_graphs_keep_gradients,
)
