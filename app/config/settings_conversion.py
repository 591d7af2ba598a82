"""Settings of a file of another program in the words of this one, and what became of each."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml

from app.config.did_you_mean import setting_of
from app.config.groups import choices_by_group
from app.config.load import compose_run
from app.config.overrides import split_arguments
from app.config.peft_methods import METHODS
from app.config.schema import RunConfig
from app.config.settings_file import TYPED_ALONE, as_override, flat
from app.config.validate import format_value, is_key
from app.errors import ConfigError

PROGRAMS: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("converted_files.yaml").read_text("utf-8")
)
_UNSET: tuple[Any, ...] = (None, "", [], {}, False, "none", "None")
_LAYERS = {"output_proj": "o_proj", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}  # of torchtune
_ROWS = "dataset.path=rows.jsonl"  # in place of a path that the file does not have
_MLP = ["gate_proj", "up_proj", "down_proj"]
_NAMES_OF_ROWS = {"completion": "text", "pretrain": "text"}  # type of Axolotl's rows that is no chat


@dataclass(kw_only=True, slots=True)
class Conversion:
    """The settings of a file: `words` of this program, and what became of each setting."""

    program: str
    settings: Mapping[str, Any]
    words: dict[str, Any] = field(default_factory=dict)
    carried: dict[str, str] = field(default_factory=dict)
    needless: dict[str, str] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)

    def carry(self, name: str, **words: Any) -> None:
        """Set words of this program for a setting; a dot in a key is written as two underscores."""
        given = {key.replace("__", "."): value for key, value in words.items()}
        self.words |= given
        self.carried[name] = " ".join(f"{key}={format_value(value)}" for key, value in given.items())


def converted(data: Mapping[str, Any]) -> Conversion:
    """The settings of a file in the words of this program, as far as a run accepts them."""
    settings = dict(flat("", data))
    program = next((name for name, facts in PROGRAMS.items() if {*facts["known_by"]} & {*settings, *data}), None)
    if program is None:
        labels = ", ".join(facts["label"] for facts in PROGRAMS.values())
        raise ConfigError(f"It is no file of settings of {labels}: none of their names is in it.")
    found = Conversion(program=program, settings=settings)
    for name, value in settings.items():
        special = _SPECIAL.get((program, name)) or _SPECIAL.get(("", name))
        if special is not None:
            special(found, name, value)
        else:
            _by_table(found, name, value)
    _choose_recipe(found)
    _count_rows(found)
    _leave_out_refused(found)
    return found


def _by_table(found: Conversion, name: str, value: Any) -> None:
    facts = PROGRAMS[found.program]
    if name in (facts["rows"], facts["adapter"][0], *facts["four_bits"]):
        return  # read together
    known = facts.get("alias", {}).get(name, name)
    needless = facts["needless"].split()
    row = {} if name in needless else setting_of(facts["columns"], known, value)
    here = row.get("here", "")
    if not row and any(fnmatch(name, pattern) for pattern in needless):
        found.needless[name] = "nothing here corresponds to it"
    elif known in TYPED_ALONE or f"model.{known}" in TYPED_ALONE:
        found.lost[name] = f"it must be typed: model.{known}=true" if value else "it is off"
    elif not row and (value is None or (value is False and known in choices_by_group())):
        found.needless[name] = "it is not set"
    elif is_key(RunConfig, known) and not row:
        found.carry(name, **{known: value})
    elif not here and (value in _UNSET or row.get("remark", "").endswith("Leave it out.")):
        found.needless[name] = row.get("remark", "it is not set")
    elif not here:
        found.lost[name] = row.get("remark", "no setting of this program is known for it: docs/keys.md has all")
    else:
        _carry_here(found, name, value, here)


def _carry_here(found: Conversion, name: str, value: Any, here: str) -> None:
    """Carry a setting by the words of its row in the table."""
    words = dict(word.partition("=")[::2] for word in here.split())
    is_switch = any(words.values())
    if value is None or (value in _UNSET and is_switch) or (here.startswith("training.max_") and int(value) < 1):
        found.needless[name] = "it is not set"
    elif is_switch:
        found.carry(name, **{key: value if text == "NAME" else yaml.safe_load(text) for key, text in words.items()})
    elif here in choices_by_group() and value not in choices_by_group()[here]:
        found.lost[name] = f"{here}={format_value(value)} is not offered: {', '.join(choices_by_group()[here])} are"
    else:
        found.carry(name, **{here: value})


def _choose_recipe(found: Conversion) -> None:
    """recipe=full, lora or qlora; a recipe of pairs keeps its name, with the adapter and bits of the file."""
    facts, settings = PROGRAMS[found.program], found.settings
    name, *without = facts["adapter"]
    given = settings.get(name)
    if found.program == "torchtune":
        kind = str(given)
        recipe = "qlora" if "qlora" in kind else "lora" if "lora" in kind else "full"
    else:
        is_adapted = facts["default"] == "lora" if given in _UNSET else given not in without
        four = given == "qlora" or any(settings.get(each) in (True, 4) for each in facts["four_bits"])
        recipe = ("qlora" if four else "lora") if is_adapted else "full"
    if "recipe" in found.words:
        recipe_words = {"quantization": "nf4"} if recipe == "qlora" else {"adapter": "none"} if recipe == "full" else {}
    else:
        recipe_words = {"recipe": recipe}
    if str(given).upper() in METHODS:
        recipe_words |= {"adapter": "peft", "adapter__method": str(given).upper()}
    found.carry(name if name in settings else f"{name} (not given)", **recipe_words)
    if recipe == "full":
        for key in [key for key in found.words if key.startswith("adapter.")]:
            del found.words[key]
            setting = next(each for each, words in found.carried.items() if words.startswith(f"{key}="))
            del found.carried[setting]
            found.needless[setting] = "the file trains no adapter"
    for each in facts["four_bits"]:
        if each in settings and each != name:
            (found.needless if settings[each] in _UNSET else found.carried)[each] = f"recipe={recipe}"


def _count_rows(found: Conversion) -> None:
    """Rows of a micro-batch: padded rows, or the tokens of a bin."""
    name = PROGRAMS[found.program]["rows"]
    rows = found.settings.get(name)
    if not isinstance(rows, int):
        return
    if found.words.get("batching.packing") is False:
        found.carry(name, **{"batching.rows": rows})
        return
    length = found.words.get("dataset.max_length")
    if isinstance(length, int):
        found.carry(name, **{"batching.tokens": rows * length})
        found.changed.append(
            f"{name}: {rows}: rows are packed, so a micro-batch is a bin of {rows} x {length} = {rows * length} tokens "
            f"with more rows than {rows}; batching.packing=false batching.rows={rows} pads rows as before"
        )
    else:
        found.lost[name] = f"the file has no length: batching.tokens is {rows} times dataset.max_length"


def _leave_out_refused(found: Conversion) -> None:
    """Leave out what a run refuses, with its reason, until it accepts the rest."""
    rows = [] if {"dataset.path", "dataset"} <= {*found.words} or found.words.get("dataset") == "mix" else [_ROWS]
    if rows:
        found.changed.append("the file names no rows that this program finds: type dataset=FILE beside from=")
    rows = rows if "dataset" in found.words else [f"dataset=auto {each}" for each in rows]
    for _ in range(len(found.words)):
        try:
            words = [*" ".join(rows).split(), *(f"{key}={as_override(value)}" for key, value in found.words.items())]
            compose_run(split_arguments(words)[0])
        except ConfigError as refusal:
            wrong = {
                key: problem for problem in refusal.problems for key in found.words if problem.startswith(f"{key}=")
            }
            if not wrong:
                raise
            for key, problem in wrong.items():
                del found.words[key]
                of_key = [name for name, words in found.carried.items() if f"{key}=" in words]
                for name in of_key:
                    del found.carried[name]
                    found.lost[name] = problem
        else:
            return


# ---- settings that no row of the table can carry


def _datasets(found: Conversion, name: str, value: Any) -> None:
    """Axolotl's list of data sets."""
    sources = value if isinstance(value, list) else []
    if not all(isinstance(each, Mapping) and "path" in each for each in sources) or not sources:
        found.lost[name] = "its entries have no path"
        return
    keys = {"path": "path", "split": "split", "name": "hub_config", "revision": "revision"}
    columns = {"field_messages": "messages", "field": "text", "field_instruction": "instruction"}
    of_sources = [{ours: each[theirs] for theirs, ours in keys.items() if theirs in each} for each in sources]
    kind = {_NAMES_OF_ROWS.get(str(each.get("type")), "auto") for each in sources}
    for number, each in enumerate(sources):
        known = {*keys, *columns, "type", "ds_type"}
        for key in each.keys() - known:
            found.lost[f"datasets[{number}].{key}"] = f"{format_value(each[key])}: dataset.columns and dataset.format"
    named = {
        f"dataset.columns.{ours}": each[name] for each in sources for name, ours in columns.items() if name in each
    }
    if len(sources) == 1:
        found.carry(
            name, dataset=kind.pop(), **{f"dataset.{key}": each for key, each in of_sources[0].items()}, **named
        )
    else:
        mix = {
            f"dataset.mix.source{n}.{key}": text for n, each in enumerate(of_sources, 1) for key, text in each.items()
        }
        found.carry(name, dataset="mix", dataset__format="auto", **mix, **named)


def _dataset(found: Conversion, name: str, value: Any) -> None:
    """The path of a data set: a name of LLaMA-Factory's dataset_info.json is none."""
    if found.program == "llama_factory":
        found.lost[name] = (
            f"{format_value(value)}: a name of dataset_info.json. Type dataset=FILE, or ORG/NAME of the hub"
        )
    else:
        found.carry(name, dataset="auto", dataset__path=value)


def _targets(found: Conversion, name: str, value: Any) -> None:
    """Layers of an adapter, as a list or a text."""
    names = value.split(",") if isinstance(value, str) else list(value or ())
    if not names:
        found.needless[name] = "it is not set"
    elif {"all", "all-linear"} & {*names}:
        found.carry(name, adapter__targets=["all-linear"])
    else:
        mlp = _MLP if found.settings.get("model.apply_lora_to_mlp") else []
        found.carry(name, adapter__targets=[_LAYERS.get(each.strip(), each.strip()) for each in names] + mlp)


def _per_epoch(found: Conversion, name: str, value: Any) -> None:
    """A number of times an epoch."""
    key = "eval.every" if name.startswith("eval") else "checkpoint.every"
    if value in _UNSET:
        found.needless[name] = "it is not set"
    else:
        found.carry(name, **{key: f"{1 / float(value):.3g}epoch"})


def _strategy(found: Conversion, name: str, value: Any) -> None:
    """`epoch`, or `steps`, whose number is a setting of its own."""
    key = "checkpoint.every" if name.startswith("save") else "eval.every"
    if value == "epoch":
        found.carry(name, **{key: "1epoch"})
    else:
        found.needless[name] = "the number of steps says it" if value == "steps" else "it is off"


def _precision(found: Conversion, name: str, value: Any) -> None:
    """`bf16: auto` and the like."""
    if value in (True, "auto", "full", "true"):
        found.carry(name, precision="auto" if value == "auto" else name)
    else:
        found.needless[name] = "it is off"


def _attention(found: Conversion, name: str, _value: Any) -> None:
    found.needless[name] = "attention=auto takes the fastest kernel that keeps packed documents apart"


def _template(found: Conversion, name: str, value: Any) -> None:
    """A chat template by its name there."""
    if value in (*_UNSET, "tokenizer_default", "default"):
        found.needless[name] = "the tokenizer's own template is used"
    else:
        found.lost[name] = f"{value}: the tokenizer's own template is used, or model.chat_template=FILE"


def _stage(found: Conversion, name: str, value: Any) -> None:
    """LLaMA-Factory's word for a task."""
    if value == "sft":
        found.needless[name] = "it is the default"
    else:
        _by_table(found, name, value)


def _data_of_code(found: Conversion, name: str, value: Any) -> None:
    if "dataset.source" in found.settings:
        found.needless[name] = "dataset=auto finds the format"
        return
    found.lost[name] = f"{value}: rows that code chooses. Type dataset=FILE, or ORG/NAME of the hub"


def _component(found: Conversion, name: str, value: Any) -> None:
    """A class of torchtune, by its last name."""
    row = setting_of(["torchtune"], name, value)
    kind = str(value).rpartition(".")[2]
    if row.get("here", "").startswith("optimizer="):
        found.carry(name, optimizer=row["here"].partition("=")[2])
    elif "cosine" in kind:
        found.carry(name, schedule="cosine")
    else:
        found.lost[name] = f"{value}: it is not offered"


_SPECIAL = {
    ("axolotl", "datasets"): _datasets,
    ("llama_factory", "dataset"): _dataset,
    ("trl", "dataset_name"): _dataset,
    ("unsloth", "data.dataset"): _dataset,
    ("axolotl", "chat_template"): _template,
    ("llama_factory", "template"): _template,
    ("llama_factory", "stage"): _stage,
    ("torchtune", "dataset._component_"): _data_of_code,
    ("torchtune", "dataset.source"): _dataset,
    ("torchtune", "optimizer._component_"): _component,
    ("torchtune", "lr_scheduler._component_"): _component,
    **{("", each): _targets for each in ("lora_target", "lora_target_modules", "lora.target_modules")},
    ("torchtune", "model.lora_attn_modules"): _targets,
    **{("", each): _per_epoch for each in ("evals_per_epoch", "saves_per_epoch")},
    **{("", each): _strategy for each in ("eval_strategy", "evaluation_strategy", "save_strategy")},
    **{("", each): _precision for each in ("bf16", "fp16")},
    **{("", each): _attention for each in ("flash_attention", "flash_attn", "attn_implementation", "sdp_attention")},
}
