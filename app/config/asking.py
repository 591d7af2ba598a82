"""What app.generate takes: whom to ask, what, and how answers are chosen."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from app.config.command import parse_command
from app.config.fields import number


@dataclass(kw_only=True, slots=True)
class GenerateConfig:
    """`temperature=0` is greedy. Without `prompt` and `prompts` it is a conversation."""

    run: str | None = None
    model: str | None = None
    prompt: str | None = None
    second: str | None = None  # of a pair, for a run that learnt labels of pairs
    prompts: str | None = None
    output: str | None = None
    system: str | None = None
    adapter: bool = True
    chat: bool | None = None  # null: as the run was trained, or whether there is a chat template
    max_new_tokens: int = number(256, at_least=1)
    temperature: float = number(0.0, at_least=0)
    top_p: float = number(1.0, above=0, at_most=1)
    top_k: int | None = number(None, at_least=1)
    batch: int = number(8, at_least=1)
    seed: int = number(0, at_least=0, at_most=2**32 - 1)

    @property
    def sampling(self) -> dict[str, float | int | bool]:
        """In the words of transformers."""
        if self.temperature == 0:
            return {"do_sample": False}
        limits = {} if self.top_k is None else {"top_k": self.top_k}
        return {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": 0, **limits}


def class_problems(config: GenerateConfig, folder: str, pair: bool) -> Iterator[str]:
    """What means nothing to a model that answers with a label."""
    given = {
        "system": config.system,
        "chat": config.chat,
        "temperature": config.temperature or None,
    }
    idle = [key for key, value in given.items() if value is not None]
    if idle:
        yield (
            f"{' and '.join(idle)} would change nothing: run={folder} was tuned with task=classification, and answers "
            "with a label. Leave it out."
        )
    if config.prompt is None and config.prompts is None:
        yield (
            f"prompt has no value. Give prompt=TEXT or prompts=FILE: run={folder} was tuned with task=classification, "
            "which answers with a label and holds no conversation."
        )
    if config.prompt is not None and pair != (config.second is not None):
        words = "give second=TEXT too" if pair else "leave second out"
        yield f"run={folder} was tuned on {'pairs of texts' if pair else 'single texts'}: {words}."


def generate_config(arguments: Sequence[str]) -> GenerateConfig:
    """From the command line, with everything that is wrong with it."""
    return parse_command(arguments, GenerateConfig, _problems)


def _problems(config: GenerateConfig) -> Iterator[str]:
    if config.run is None and config.model is None:
        yield "run has no value. Give run=DIR of a finished run, or model=DIR or a hub id."
    if config.run is not None and config.model is not None:
        yield f"run={config.run} and model={config.model} both say whom to ask. Keep one."
    if config.prompt is not None and config.prompts is not None:
        yield f"prompt and prompts={config.prompts} both say what to ask. Keep one."
    if config.second is not None and config.prompt is None:
        yield "second is the other text of a pair. Give prompt=TEXT, the first, or leave second out."
    if config.output is not None and config.prompts is None:
        yield f"output={config.output} is for the answers to a file. Give prompts=FILE, or leave output out."
    if config.model is not None and not config.adapter:
        yield f"adapter=false: model={config.model} has no adapter that could be left off. Leave adapter out."
    if config.temperature == 0 and (config.top_p < 1 or config.top_k is not None):
        yield (
            "top_p and top_k choose among samples, and temperature=0 takes none. "
            "Set temperature=0.7, or leave them out."
        )
