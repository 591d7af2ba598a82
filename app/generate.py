"""Generate text with a fine-tuned model, or any other.

finetune generate run=runs/mine prompt="What is the plural of goose?"
finetune generate run=runs/mine                                  chat
finetune generate run=runs/mine prompts=questions.jsonl output=answers.jsonl
finetune generate run=runs/mine prompts=-                        JSON rows, each answered at once, for programs
finetune generate run=runs/mine prompt="..." adapter=false       the base model, for comparison
finetune generate run=runs/mine prompt="..." checkpoint=100      a kept checkpoint, or checkpoint=best
finetune generate run=runs/labels prompt="..."                   task=classification: the label and its probability
finetune generate run=runs/names prompt="..."                    task=tokens: each word with its tag
finetune generate model=Qwen/Qwen3-8B prompt="..." temperature=0.7     a folder, hub id, or model name of finetune train
"""

import json
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.config.adapters import ADAPTER
from app.config.commands import GENERATE, STDIN, GenerateConfig, class_problems, run_command
from app.config.dataset import has_chats, has_pairs
from app.config.finished_run import finished_folder, require_intact_final
from app.config.help import command_help
from app.config.kinds import OWN, PROBLEMS, text_of
from app.config.load import named_model, read_run
from app.config.schema import RunConfig
from app.config.tasks import TASKS, task_of
from app.errors import AppError, ConfigError, PromptTooLong, refuse
from app.files import write_text
from app.safe_text import printable

if TYPE_CHECKING:
    from app.data.rows import Message
    from app.finished.inference import TextGenerator

# torch is imported inside functions, so that an error in the command line is reported at once

CHAT_HELP = (
    "/new starts a new conversation, /system TEXT sets the system prompt, /undo removes the last turn, /quit exits; "
    "Ctrl-C stops an answer"
)
_STREAM, _ROW_OPTIONS = "stream", ("temperature", "max_new_tokens")  # fields of a row of prompts=-


def generate(config: GenerateConfig) -> None:
    """Generate answers for a checked config, to standard output or a file."""
    from app.data.prompts import prompts_file

    if config.prompts not in (None, STDIN):
        prompts_file(str(config.prompts))
    folder = None if config.run is None else finished_folder(config.run, config.checkpoint)
    run = None if folder is None else read_run(folder / "run.yaml")
    if run is not None:  # it may come from others
        run.model.trust_remote_code = config.trust_remote_code
    if folder is None or run is None or config.checkpoint is None:
        _answer(config, folder, run)
        return
    from app.training.final_model import at_checkpoint

    with at_checkpoint(folder, config.checkpoint, run) as place:
        _answer(config, place, run)


def _answer(config: GenerateConfig, folder: Path | None, run: RunConfig | None) -> None:
    """Answer with the run in `folder`, or with another model."""
    from app.data.prompts import as_conversation, read_prompts

    if folder is not None and run is not None and task_of(run.task).has_classes:
        if config.prompts == STDIN:
            raise ConfigError(f"prompts={STDIN}: run={folder} returns labels. Set prompt=TEXT or prompts=FILE.")
        (_classify if task_of(run.task).pooled else _tag)(config, folder, run)
        return
    if config.second is not None:
        raise ConfigError("second is only for a run of task=classification on pairs of texts. Remove it.")
    questions = None if config.prompts in (None, STDIN) else read_prompts(str(config.prompts), config.system)
    generator = _build_generator(config, folder, run)
    if config.prompts == STDIN:
        _answer_lines(config, generator, sys.stdin)
    elif questions is not None:
        _answer_file(config, generator, questions)
    elif config.prompt is not None:
        ((_, answer),) = generator.answers([as_conversation(config.prompt, config.system)], batch=1)
        sys.stdout.write(f"{answer}\n")
    else:
        _converse(config, generator)


def _classify(config: GenerateConfig, folder: Path, run: RunConfig) -> None:
    """Print or write the labels with their probabilities."""
    columns, pair = run.dataset.columns, has_pairs(run.dataset)
    refuse(class_problems(config, str(folder), pair))
    from app.data.prompts import read_examples

    one = [config.prompt, *([config.second] if pair else [])]
    fields = [columns.sentence1, columns.sentence2] if pair else [columns.text]
    texts = [list(map(str, one))] if config.prompts is None else read_examples(config.prompts, fields)
    from app.finished.inference import Classifier

    lm, tokenizer = _loaded(config, folder, run)
    classifier, cut = Classifier(lm, tokenizer, run.dataset.max_length, run.task.problem), 0
    problem = PROBLEMS[run.task.problem]
    lines = []
    for text, (values, was_cut) in zip(texts, classifier.answers(texts), strict=True):
        cut += was_cut
        answer = problem.answer(values)
        if config.prompts is None:
            all_labels = "".join(f"  {p:7.2%}  {printable(name)}\n" for name, p in values.items() if problem.named)
            lines.append(f"{printable(text_of(answer))}\n{all_labels}")
        else:
            line = {**dict(zip(fields, text, strict=True)), "label": answer, problem.values: values}
            lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    _put(config, lines)
    _tell_cut(run, cut, len(texts))


def _tag(config: GenerateConfig, folder: Path, run: RunConfig) -> None:
    """Print or write the words with their tags; truncated words have none."""
    refuse(class_problems(config, str(folder), pair=False, task=run.task.kind))
    from app.data.prompts import read_words, tokens_of_words
    from app.tasks.tagging import tags_of_words

    columns = run.dataset.columns
    rows = [str(config.prompt).split()] if config.prompts is None else read_words(config.prompts, columns.tokens)
    lm, tokenizer = _loaded(config, folder, run)
    lines, cut = [], 0
    for words, tokens in zip(rows, tokens_of_words(rows, tokenizer, run.dataset.max_length), strict=True):
        predicted = tags_of_words(lm, tokens.ids, tokens.loss_mask)
        cut += len(predicted) < len(words)
        tags = [*predicted, *[None] * (len(words) - len(predicted))]
        if config.prompts is None:
            lines += [f"{printable(word)}  {printable(tag or '')}\n" for word, tag in zip(words, tags, strict=True)]
        else:
            lines.append(json.dumps({columns.tokens: words, columns.tags: tags}, ensure_ascii=False) + "\n")
    _put(config, lines)
    _tell_cut(run, cut, len(rows))


def _loaded(config: GenerateConfig, folder: Path, run: RunConfig) -> tuple[Any, Any]:
    """Return the model of a run that returns labels, and its tokenizer."""
    from app.finished.inference import load_tuned, load_tuned_tokenizer

    _use_threads(config)
    require_intact_final(folder)
    tokenizer, source = load_tuned_tokenizer(folder / "final", config.trust_remote_code), (folder, run.model)
    lm = load_tuned(*source, task_of(run.task), adapter=config.adapter, quantization=run.quantization, seed=run.seed)
    return lm, tokenizer


def _put(config: GenerateConfig, lines: list[str]) -> None:
    if config.output is None:
        sys.stdout.writelines(lines)
    else:
        write_text(Path(config.output).expanduser(), "".join(lines))
        sys.stderr.write(f"{config.output}\n")


def _tell_cut(run: RunConfig, cut: int, count: int) -> None:
    if cut:
        longest = f"dataset.max_length={run.dataset.max_length} of the run"
        sys.stderr.write(f"truncated to {longest}: {cut} of {count}\n")


def _use_threads(config: GenerateConfig) -> None:
    import torch

    if config.launch.threads is not None:
        torch.set_num_threads(config.launch.threads)


def _build_generator(config: GenerateConfig, folder: Path | None, run: RunConfig | None) -> "TextGenerator":
    if run is not None and not task_of(run.task).writes_text:
        raise ConfigError(
            f"run={folder}: a model of task={run.task.kind} does not generate text. Use a run of task=causal."
        )
    import torch

    from app.base.rope import in_config, rope_of
    from app.finished.inference import TextGenerator, load_any, load_tuned, load_tuned_tokenizer

    if folder is not None and run is not None:
        require_intact_final(folder)
        tokenizer = load_tuned_tokenizer(folder / "final", config.trust_remote_code)
        lm = load_tuned(folder, run.model, TASKS["causal"], adapter=config.adapter, quantization=run.quantization)
        if run.model.rope != OWN and (folder / "final" / ADAPTER).is_file() and not (folder / "base").is_dir():
            _note(
                f"model.rope={run.model.rope} as in training. The adapter does not store it: other programs need "
                f"{in_config(rope_of(lm.config))} in config.json of the base, or the export: finetune export "
                f"run={config.run} kind=merged to=DIR"
            )
        chat = has_chats(run.dataset)
    else:
        model = replace(named_model(str(config.model)), trust_remote_code=config.trust_remote_code)
        lm, tokenizer = load_any(model, TASKS["causal"], _note)
        chat = bool(tokenizer.chat_template)
    torch.manual_seed(config.seed)
    _use_threads(config)
    chosen = chat if config.chat is None else config.chat
    if chosen and not tokenizer.chat_template:
        raise ConfigError("chat=true: this tokenizer has no chat template. Set chat=false.")
    return TextGenerator(lm, tokenizer, chosen, config.max_new_tokens, dict(config.sampling), _note)


def _note(text: str) -> None:
    sys.stderr.write(f"note: {text}\n")


def _answer_file(config: GenerateConfig, generator: "TextGenerator", questions: list[list[dict[str, Any]]]) -> None:
    """Write one JSON line per question, in order."""
    answers: dict[int, str] = {}
    for index, answer in generator.answers(questions, config.batch):
        answers[index] = answer
        if config.output is not None:
            _show_progress(len(answers), len(questions))
    lines = [
        json.dumps({"messages": question, "answer": answers[index]}, ensure_ascii=False) + "\n"
        for index, question in enumerate(questions)
    ]
    _put(config, lines)


def _answer_lines(config: GenerateConfig, generator: "TextGenerator", lines: Iterable[str]) -> None:
    """Answer each JSON row with a JSON line, before reading the next row; a row may set options and ask for pieces."""
    from app.data.prompts import read_prompt

    for number, line in enumerate(lines, 1):
        try:
            question, row = read_prompt(f"prompts={STDIN}: line {number}", line, config.system)
            result = {"messages": question, **_answer_row(config, generator, question, row)}
        except AppError as problem:
            result = {"error": problem.report()}
        _print_line(result)


def _answer_row(
    config: GenerateConfig, generator: "TextGenerator", question: "list[Message]", row: Mapping[str, Any]
) -> dict[str, Any]:
    changes = {key: row[key] for key in _ROW_OPTIONS if key in row}
    options = GENERATE.validated({**asdict(config), **changes}, changes) if changes else config
    answering = replace(generator, max_new=options.max_new_tokens, sampling=dict(options.sampling))
    if row.get(_STREAM) is not True:
        ((_, answer),) = answering.answers([question], batch=1)
        return {"answer": answer}
    if options.beams > 1:
        raise ConfigError(f"{_STREAM}: beam search cannot stream. Leave {_STREAM} or beams={options.beams} out.")
    return _stream_lines(answering, question)


def _stream_lines(generator: "TextGenerator", question: "list[Message]") -> dict[str, Any]:
    """Stream an answer as JSON lines and return it. The first piece is empty: the model is loaded. SIGINT ends it."""
    pieces = list[str]()

    def write(text: str) -> None:
        if text:
            pieces.append(text)
            _print_line({"piece": text})

    _print_line({"piece": ""})
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it for background jobs
    try:
        return {"answer": generator.stream(question, write)}
    except KeyboardInterrupt:
        return {"answer": "".join(pieces).strip(), "stopped": True}
    finally:
        signal.signal(signal.SIGINT, before)


def _print_line(values: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(values, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def _show_progress(done: int, total: int) -> None:
    """Update one line on a terminal; in a pipe or file write a line for every tenth."""
    text = f"{done} of {total} answered"
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{text}" + ("\n" if done == total else ""))
    elif done * 10 // total > (done - 1) * 10 // total:
        sys.stderr.write(f"{text}\n")


def _converse(config: GenerateConfig, generator: "TextGenerator") -> None:
    if not generator.chat:
        raise ConfigError("prompt= is required: this model was not trained on conversations. Set prompt=TEXT.")

    def write(text: str) -> None:
        sys.stdout.write(printable(text))
        sys.stdout.flush()

    ChatSession(generator.stream, write, config.system).run(_typed_lines())


class ChatSession:
    """A chat in a terminal. `answer` takes all messages and a function that writes, and returns the answer."""

    def __init__(
        self,
        answer: "Callable[[list[Message], Callable[[str], None]], str]",
        write: Callable[[str], Any],
        system: str | None,
    ) -> None:
        self._answer = answer
        self._write = write
        self._system = system
        self.messages: list[Message] = []

    def run(self, lines: Iterable[str]) -> None:
        """Answer until the end of the lines, or /quit."""
        self._write(f"{CHAT_HELP}\n")
        for line in lines:
            if line.strip() in {"/quit", "/exit"}:
                return
            if line.startswith("/"):
                self._command(line.strip())
            elif line.strip():
                self._turn(line.rstrip("\n"))

    def _command(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word == "/new":
            self.messages = []
        elif word == "/system":
            self._system, self.messages = rest or None, []
        elif word == "/undo":
            self.messages = self.messages[:-2]
        else:
            self._write(f"unknown command {word}. {CHAT_HELP}\n")

    def _turn(self, line: str) -> None:
        from app.data.prompts import as_conversation

        messages = [*self.messages, {"role": "user", "content": line}]
        with_system = [*as_conversation("", self._system)[:-1], *messages]
        try:
            answer = self._answer(with_system, self._write)
        except KeyboardInterrupt:
            self._write("\n(stopped; this turn was removed)\n")
            return
        except PromptTooLong as problem:
            self._write(f"{problem}\n(this turn was removed; /new starts a new conversation)\n")
            return
        self._write("\n")
        self.messages = [*messages, {"role": "assistant", "content": answer}]


def _typed_lines() -> Iterator[str]:
    """Read standard input, with a prompt and line editing at a terminal."""
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if is_terminal:
        import readline  # noqa: F401  adds editing and history to `input`
    while True:
        try:
            yield input("> " if is_terminal else "")
        except EOFError:
            return


def _command(arguments: Sequence[str]) -> int:
    generate(GENERATE.parse(arguments))
    return 0


def main() -> None:
    """Exit codes as of finetune train."""
    run_command(_command, lambda _: command_help(__doc__, GENERATE))


if __name__ == "__main__":
    main()
