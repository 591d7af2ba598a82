"""Check data, memory or cluster before training. Accepts the settings of finetune train.

finetune check data dataset=messages dataset.path=chat.jsonl
finetune check memory recipe=qlora model=llama hardware=rtx4090   estimated memory; exact=true traces every layer
finetune check data dataset=text dataset.path=books/ output_dir=runs/look   also write check.json and check.html
finetune check memory model=llama answers.rows=4 answers.length=2048        also estimate generation
finetune check memory sweep=single_gpu hardware=rtx3090           estimate each rung of a ladder
finetune check                                                    data and memory
finetune check cluster launch.num_processes=2 output_dir=runs/look   test communication between processes
finetune check quantization model=llama    quantization error of its weights in int8, fp8, NF4, FP4 ...
finetune check quantization rows=64 dataset=messages dataset.path=chat.jsonl   also outliers of layer inputs
finetune check models                      supported model types; model.path=DIR: whether DIR is supported
"""

import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.config.commands import CHECK, CHECKS, CheckConfig, check_config, print_settings_notes, run_command
from app.config.help import command_help, train_help
from app.config.overrides import key_of
from app.config.schema import RunConfig
from app.distributed.launch import fail_as_one_of_several, launch, processes_to_start, report_failure, world
from app.errors import AppError, ConfigError, refuse
from app.files import report_write_errors, write_json, write_text
from app.program import as_started, remember_settings, with_target
from app.tracking.console import Console, open_console

if TYPE_CHECKING:
    from app.config.kinds import ModelKinds

# torch is imported inside functions so that command-line errors are reported within a second

_COMPUTING = ("torch", "transformers", "peft", "accelerate", "bitsandbytes", "numpy")
STOPS = 2  # exit code if training would fail
FAILED = 3  # exit code if the planner failed on a rung


def check(config: CheckConfig, console: Console) -> int:
    """Run the checks, print and write their results, and return the exit code."""
    _check_parts(config)
    if config.folder is not None and world().is_first:
        _make(config.folder)
    from app.pages.check_page import SECTIONS
    from app.pages.page import show

    results: dict[str, Any] = {}
    for name in config.checks:
        results[name] = _CHECKS[name](config, console)
        if world().is_first:
            show(SECTIONS[name](results[name]))
    if not world().is_first:
        return 0
    if config.folder is not None:
        _write(config.folder, results, console)
    stops = [problem for facts in results.values() for problem in facts["stops"]]
    if stops:
        text = ConfigError(stops).report() + "\ntraining would fail on these rows" * ("data" in results)
        if world().is_joined:  # the launcher prints failures for all processes
            report_failure(0, STOPS, text)
        else:
            sys.stderr.write(f"{text}\n")
    return STOPS if stops else 0


def _data(config: CheckConfig, console: Console) -> dict[str, Any]:
    from app.training.data_check import advice, check_data

    checked = check_data(config.run, _processes(config.run), console.say)
    facts = checked.facts()
    facts |= {name: [as_started(text) for text in facts[name]] for name in ("lines", "notes", "stops")}
    return {**facts, "advice": [{"set": key, "why": why} for key, why in advice(checked)]}


def _memory(config: CheckConfig, _console: Console) -> dict[str, Any]:
    start = time.perf_counter()
    from app.memory.check import check_memory
    from app.pages.check_page import out_of_memory_problem

    processes = _planned_processes(config)
    options = config.options
    facts = check_memory(
        config.run,
        config.overrides,
        options.hardware,
        exact=options.exact,
        processes=processes,
        answers=options.answers,
    )
    facts["stops"] = [] if facts["fits"] else [out_of_memory_problem(facts)]
    facts["seconds"] = round(time.perf_counter() - start, 2)
    return facts


def _ladder(arguments: Sequence[str]) -> int:
    """Print and write the estimated memory of each rung of `sweep=`, next to the figures of its source."""
    start = time.perf_counter()
    from app.pages.ladder_tables import planned_tables
    from app.pages.page import as_text
    from app.sweeps.sweep import read_ladder
    from app.sweeps.trials import value_of

    if arguments[0] != "memory":
        raise ConfigError("sweep= is an option of finetune check memory, for ladders. Add memory in front.")
    options = [text for text in arguments if key_of(text).partition(".")[0] in ("hardware", "exact")]
    ladder = read_ladder([text for text in arguments[1:] if text not in options])
    targets = [text for text in with_target("output_dir", arguments) if key_of(text) == "output_dir"]
    folders = [Path(str(value_of(text))).expanduser() for text in targets]
    label, rungs, problems, stops = "this machine", list[dict[str, Any]](), list[str](), list[str]()
    for trial, (name, rung) in zip(ladder.points, ladder.rungs.items(), strict=True):
        planned: dict[str, Any] = {"error": trial.refused}
        if trial.refused is None:
            try:
                planned = _planned_rung(["memory", *trial.overrides, *options])
            except AppError as problem:
                problems += problem.problems
                planned = {"error": "\n".join(problem.problems)}
            except Exception as fault:  # noqa: BLE001  a planner failure on one rung must not stop the others
                traceback.print_exc()
                planned = {"error": f"the planner failed: {type(fault).__name__}: {fault}"}
                stops.append(f"{name}: {planned['error']}")
        label = planned.pop("label", label)
        rungs.append({"name": name, "claimed": rung.claimed, **planned})
    if not stops and all(rung["error"] for rung in rungs):
        raise ConfigError(list(dict.fromkeys(problems)))
    seconds = round(time.perf_counter() - start, 2)
    facts: dict[str, Any] = {"sweep": ladder.name, "label": label, "source": ladder.source, "rungs": rungs}
    facts |= {"seconds": seconds, "stops": stops}
    console = open_console()
    console.say(as_text(*planned_tables(facts)))
    for folder in folders:
        _make(folder)
        _write(folder, {"ladder": facts}, console)
    return FAILED if stops else 0


def _planned_rung(arguments: Sequence[str]) -> dict[str, Any]:
    from app.memory.check import planned_parts
    from app.sweeps.ladder import batch_text

    config = check_config(arguments)
    _check_parts(config)
    processes = _planned_processes(config)
    exact, hardware = config.options.exact, config.options.hardware
    parts = planned_parts(config.run, hardware, exact=exact, processes=processes)
    label = {} if hardware is None else {"label": hardware.label}
    return {"error": None, "batch": batch_text(config.run), **parts, **label}


def _cluster(_config: CheckConfig, _console: Console) -> dict[str, Any]:
    """Check the cluster; called in every process on all machines."""
    from app.distributed.cluster_check import Unreachable, check_cluster
    from app.tracking.recorder import program_here

    here, program = world(), program_here()
    git = program["program"]["git"] or {"commit": "no checkout"}
    versions = {"app": f"{program['program']['version']} ({git['commit'][:12]})", "python": program["python"]}
    computing = {name: version for name, version in program["packages"].items() if name in _COMPUTING}
    try:
        facts = check_cluster(here, versions | computing)
    except Unreachable as problem:
        report_failure(here.rank, problem.exit_code, problem.report())
        os._exit(problem.exit_code)  # a normal exit would wait for the other processes
    return facts


def _quantization(config: CheckConfig, console: Console) -> dict[str, Any]:
    start = time.perf_counter()
    import torch

    from app.base.base_model import open_weights
    from app.base.base_weights import LoadOptions
    from app.config.tasks import task_of
    from app.layers.quantization import quantization_errors

    run = config.run
    options = LoadOptions(torch.float32, torch.device("cpu"), "eager")
    console.say(f"model   {run.model.path}: reading the linear layers")
    facts = quantization_errors(open_weights(run.model, task_of(run.task), options, run.seed).linear_weights())
    facts |= {"model": run.model.path, "seconds": round(time.perf_counter() - start, 2), "stops": []}
    if config.options.rows:
        from app.training.activation_check import check_activations

        facts["activations"] = check_activations(run, config.options.rows, console.say)
    return facts


def _models(config: CheckConfig, _console: Console) -> dict[str, Any]:
    """Return the table of supported model types, or how the model of the command line would be trained."""
    from app.config.kinds import model_kinds

    if any(key_of(text).partition(".")[0] == "model" for text in config.overrides):
        kinds, stops = _verdict(config.run)
        facts = {**kinds.facts(config.run.task.kind), "stops": stops}
    else:
        facts = {**model_kinds().facts("causal"), "stops": []}
    return facts


def _verdict(run: RunConfig) -> tuple["ModelKinds", list[str]]:
    """Return a table with only the run's model, and why it is not supported."""
    import transformers

    from app.base.base_model import open_base
    from app.config.kinds import REFUSED, ModelKinds, Tier

    base = open_base(run.model, run.task)
    tier, stops = base.tier, list[str]()
    try:
        base.on_meta()
    except ConfigError as refusal:
        stops = list(refusal.problems)
        tier = tier if not tier.accepted else Tier(REFUSED, "; ".join(stops))
    return ModelKinds(transformers.__version__, {run.task.kind: {base.numbers.model_type: tier}}), stops


def _in_processes(config: CheckConfig, arguments: Sequence[str]) -> int:
    """Launch the cluster check in the processes of a run."""
    count = processes_to_start(config.run.launch)
    if count:
        return launch(count, ["-m", "app.check", *arguments])
    if not world().is_joined:
        raise ConfigError(
            f"launch.num_processes={config.run.launch.num_processes}: finetune check cluster needs several "
            "processes. Set launch.num_processes=2 or more, or start it with torchrun or srun."
        )
    return check(config, open_console() if world().is_first else Console(enabled=False))


def _planned_processes(config: CheckConfig) -> int:
    """Return the number of processes to estimate memory for; with `hardware=` that of the config."""
    if config.options.hardware is None:
        return _processes(config.run)
    count = config.run.launch.num_processes
    return count if isinstance(count, int) else 1


def _processes(run: RunConfig) -> int:
    return world().size if world().is_joined else processes_to_start(run.launch) or 1


def _make(folder: Path) -> None:
    with report_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)


def _write(folder: Path, results: dict[str, Any], console: Console) -> None:
    from app.pages.check_page import check_page
    from app.pages.page import as_html

    write_json(folder / "check.json", results)
    write_text(folder / "check.html", as_html(check_page(results)))
    console.say(f"written {folder / 'check.json'} and check.html")


def _check_parts(config: CheckConfig) -> None:
    """Report the problems that packages find within milliseconds, all together."""
    from app.base import source, tokenizer
    from app.data import sources

    run = config.run
    reads_rows = "data" in config.checks or config.options.rows
    problems = [*sources.check(run.dataset), *tokenizer.check(run.model)] if reads_rows else []
    if {"memory", "quantization", "models"} & set(config.checks):
        problems += source.check(run.model)
    refuse(problems)


def _command(arguments: Sequence[str]) -> int:
    if any(key_of(text).partition(".")[0] == "sweep" for text in arguments):
        return _ladder(arguments)
    config = check_config(arguments)
    remember_settings(arguments)
    if "cluster" in config.checks:
        return _in_processes(config, arguments)
    if not world().is_first:
        return 0
    print_settings_notes(config.notes)
    return check(config, open_console())


def main() -> None:
    """Exit with 0 if training would start, 2 on reported problems or invalid settings, 3 if the planner failed on a
    rung of a ladder."""
    usage = f"{__doc__}\nFor the settings see: finetune train --help"

    def help_text(names: Sequence[str]) -> str:
        return train_help(names) if names and not {*names} <= {*CHECKS} else command_help(usage, CHECK)

    run_command(_command, help_text, fail_as_one_of_several)


_CHECKS = {"data": _data, "memory": _memory, "cluster": _cluster, "quantization": _quantization, "models": _models}

if __name__ == "__main__":
    main()
