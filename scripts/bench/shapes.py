"""Models as overrides of the configuration, always with random weights: nothing is downloaded."""

from app.config.load import compose_run
from app.config.schema import RunConfig
from scripts.bench.contest import Contest

METHODS = ("lora", "qlora", "full")


def _llama(**numbers: int | str) -> list[str]:
    return ["model=llama", *(f"model.architecture.{name}={value}" for name, value in numbers.items())]


SHAPES: dict[str, list[str]] = {
    "tiny": ["model=tiny"],
    "small": [  # four layers whose products are large enough to be most of a step on a CPU
        "model=tiny",
        "model.architecture.hidden_size=512",
        "model.architecture.intermediate_size=1408",
        "model.architecture.num_attention_heads=8",
        "model.architecture.num_key_value_heads=8",
        "model.architecture.max_position_embeddings=4096",
    ],
    "llama_1b": _llama(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, tie_word_embeddings="true"
    ),
    "llama_8b": _llama(),
    "llama_70b": _llama(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64
    ),
}


def run_of(contest: Contest, settings: tuple[str, ...] = ()) -> RunConfig:
    """The configuration that all contenders follow; `settings` are those of one of our variants."""
    chosen = [
        f"recipe={contest.method}",
        *SHAPES[contest.model],
        "model.weights=random",
        "optimizer=adamw",
        f"precision={contest.precision}",
        f"seed={contest.seed}",
        f"dataset.max_length={contest.length}",
        f"batching.tokens={contest.bin_tokens}",
        f"batching.accumulation={contest.accumulation}",
        f"training.recompute={str(contest.recompute).lower()}",
        f"launch.threads={contest.threads}",
    ]
    if contest.method != "full":
        chosen += [f"adapter.r={contest.rank}", f"adapter.alpha={2 * contest.rank}"]
    return compose_run(_last_of_each([*chosen, *contest.settings, *settings]))


def _last_of_each(settings: list[str]) -> list[str]:
    """What is told later replaces what was told before; Hydra would refuse two values of one group."""
    return list({text.partition("=")[0]: text for text in settings}.values())
