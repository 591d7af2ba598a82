"""A command that the documents show, with what takes long cut short after its words were read as they are.

python -m tests.full.docs.quickly app.train recipe=full
"""

import importlib
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from app.config.schema import RunConfig
from app.program import COMMANDS
from app.sweeps.search_space import Preset

ROWS, EVAL_ROWS, STEPS, ANSWER = 120, 16, 2, 4
TRIALS = 5  # of a search: its last one is the first that is chosen by those before


def main() -> None:
    sys.argv = sys.argv[1:]
    if sys.argv[0] == "app":
        is_command = sys.argv[1] in COMMANDS
        sys.argv[: 1 + is_command] = [f"app.{sys.argv[1]}" if is_command else "app.main"]
    command = importlib.import_module(sys.argv[0])
    if sys.argv[0] in SHORTENED:
        SHORTENED[sys.argv[0]](command)
    command.main()


def _train(command: Any) -> None:
    """Two steps on a few rows; the trials of a sweep are forks, and as short."""
    import app.sweeps.sweep as sweep
    from app.sweeps import trials
    from tests.command.forked_trials import Fork

    vars(trials)["Popen"] = Fork
    vars(sweep)["read_preset"] = _of_few_trials(vars(sweep)["read_preset"])
    read: Callable[[Any], RunConfig] = command.compose_run
    command.compose_run = lambda given: _short(read(given))


def _of_few_trials(read: Callable[[Any], Preset]) -> Callable[[Any], Preset]:
    def short(words: Any) -> Preset:
        preset = read(words)
        return replace(preset, config=replace(preset.config, trials=min(preset.config.trials, TRIALS)))

    return short


def _short(run: RunConfig) -> RunConfig:
    data, training, answers = run.dataset, run.training, run.eval
    return replace(
        run,
        dataset=replace(
            data, max_rows=_least(data.max_rows, ROWS), eval_max_rows=_least(data.eval_max_rows, EVAL_ROWS)
        ),
        training=replace(training, max_steps=_least(training.max_steps, STEPS)),
        eval=replace(answers, samples=min(answers.samples, 1), sample_tokens=min(answers.sample_tokens, ANSWER)),
        launch=replace(run.launch, threads=1),
    )


def _generate(command: Any) -> None:
    generate = command.generate
    command.generate = lambda config: generate(replace(config, max_new_tokens=min(config.max_new_tokens, ANSWER)))


def _least(given: int | None, at_most: int) -> int:
    return at_most if given is None else min(given, at_most)


SHORTENED: dict[str, Callable[[Any], None]] = {"app.train": _train, "app.generate": _generate}

if __name__ == "__main__":
    main()
