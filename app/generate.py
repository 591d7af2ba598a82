"""Ask a tuned model.

python -m app.generate run=runs/mine prompt="What is the plural of goose?"
python -m app.generate run=runs/mine prompt="..." adapter=false      the base, for comparison
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.config.command import parse_command, run_command
from app.config.rules import CHAT_FORMATS
from app.config.schema import RunConfig, number
from app.errors import ConfigError


@dataclass(kw_only=True, slots=True)
class GenerateConfig:
    """What the command takes; `temperature=0` is greedy."""

    run: str
    prompt: str
    system: str | None = None
    adapter: bool = True
    max_new_tokens: int = number(256, at_least=1)
    temperature: float = number(0.0, at_least=0)
    top_p: float = number(1.0, above=0, at_most=1)
    seed: int = number(0, at_least=0, at_most=2**32 - 1)


def generate(config: GenerateConfig) -> str:
    """The answer, as text."""
    from app.config.finished import finished_folder
    from app.config.load import read_run

    folder = finished_folder(config.run)
    run = read_run(folder / "run.yaml")
    if run.task.kind != "causal":
        raise ConfigError(
            f"run={folder}: it was tuned with task={run.task.kind}, and such a model writes no text. "
            "Give a run of task=causal."
        )
    return _answer(config, folder, run)


def _answer(config: GenerateConfig, folder: Path, run: RunConfig) -> str:
    import torch

    from app.model.generation import end_ids, generate, prompt_ids
    from app.model.load import load_tuned, load_tuned_tokenizer
    from app.model.tasks import TASKS

    tokenizer = load_tuned_tokenizer(folder / "final")
    lm = load_tuned(
        folder, run.model, TASKS[run.task.kind], adapter=config.adapter, quantization=run.quantization
    )
    torch.manual_seed(config.seed)
    sampling: dict[str, Any] = {}
    if config.temperature > 0:
        sampling = {"do_sample": True, "temperature": config.temperature, "top_p": config.top_p}
    ids = prompt_ids(tokenizer, config.prompt, config.system, chat=run.dataset.format in CHAT_FORMATS)
    answer = generate(lm, [ids], end_ids(lm, tokenizer), config.max_new_tokens, **sampling)[0]
    text: str = tokenizer.decode(answer, skip_special_tokens=True)
    return text.strip()


def _command(arguments: Sequence[str]) -> int:
    sys.stdout.write(f"{generate(parse_command(arguments, GenerateConfig))}\n")
    return 0


def main() -> None:
    """Exit codes as of app.train."""
    run_command(_command)


if __name__ == "__main__":
    main()
