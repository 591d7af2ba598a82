"""The finished model as files that the ordinary tools load."""

import copy
import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from app.adapters.lora import save_as_update
from app.base.names import Names
from app.base.safetensors_files import widest_first, write_weights
from app.base.text_part import rename_adapter
from app.base.tokenizer import NEW_TOKENS
from app.model.training_model import TrainingModel

MAX_FILE_BYTES = 50 * 10**9  # as transformers divides them
_EQUAL_NAMES = Names()  # of a model that is no text part
_TOKENIZER_CONFIG, _TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
_TOKENIZER_FILES = ("*token*", "*.model", "vocab.*", "merges.txt", _TEMPLATE)


def save_model(
    training_model: TrainingModel,
    tokenizer: Any,
    folder: Path,
    tensors: Iterable[tuple[str, Tensor]] | None = None,
    names: Names = _EQUAL_NAMES,
    start: Mapping[str, Tensor] | None = None,
) -> None:
    """An adapter in PEFT's format, or a whole model in transformers' format, with the tokenizer beside it. `tensors`:
    where the model is sharded, those of `saved_tensors`, whole, one at a time. An adapter of a text part gets the names
    of the whole, which is what other programs load. `start`: what its halves began with, and the base gave up.
    """
    network: Any = training_model.network
    lm: Any = training_model.language_model
    if (
        training_model.has_classes and lm.config.pad_token_id is None
    ):  # without it transformers answers one text at a time
        lm.config.pad_token_id = tokenizer.pad_token_id
    if training_model.network is not training_model.language_model:
        given: dict[str, Any] = {} if tensors is None else {"state_dict": dict(tensors)}
        # "auto" would ask the hub about the vocabulary of the base
        network.save_pretrained(str(folder), save_embedding_layers=False, **given)
        if start:
            save_as_update(folder, start)
        if names.is_part:
            rename_adapter(folder, folder, names.of_folder)
        if training_model.has_classes:  # names and number of the classes are nowhere else
            numbers = copy.deepcopy(lm.config)
            numbers.architectures = [type(lm).__name__]
            numbers.save_pretrained(str(folder))
    elif tensors is None:
        lm.save_pretrained(str(folder))
    elif _has_other_names_in_files(lm):
        lm.save_pretrained(str(folder), state_dict=dict(tensors))
    else:
        _save_one_by_one(lm, folder, saved_tensors(training_model), tensors)
    if (folder / "config.json").is_file():
        add_transformers_4_keys(folder, type(lm.config))
    save_tokenizer(tokenizer, folder)


def saved_tensors(training_model: TrainingModel) -> dict[str, Tensor]:
    """What `save_model` saves, as it is on this process: tied tensors once."""
    network: Any = training_model.network
    lm: Any = training_model.language_model
    if network is not lm:
        return dict(adapter_tensors(training_model).values())
    state: dict[str, Tensor] = lm.state_dict(keep_vars=True)
    tied = {name for name, source in lm.all_tied_weights_keys.items() if state.get(name) is state.get(source)}
    return widest_first({name: tensor.detach() for name, tensor in state.items() if name not in tied})


def adapter_tensors(training_model: TrainingModel) -> dict[str, tuple[str, Tensor]]:
    """The tensors of an adapter's file by their names there, each with its name in the network."""
    from peft import get_peft_model_state_dict

    network: Any = training_model.network
    kept = network.state_dict(keep_vars=True).keys()
    buffers = {name: each for name, each in network.named_buffers(remove_duplicate=False) if name in kept}
    own = {**dict(network.named_parameters(remove_duplicate=False)), **buffers, **training_model.trained()}
    apart = {name: tensor.detach() for name, tensor in own.items()}  # one object a name: PEFT gives other names
    saved = get_peft_model_state_dict(network, apart, save_embedding_layers=False)
    names = {id(tensor): name for name, tensor in saved.items()}
    return {names[id(tensor)]: (name, own[name]) for name, tensor in apart.items() if id(tensor) in names}


def _has_other_names_in_files(lm: Any) -> bool:
    """transformers renames, splits and joins the tensors of some kinds as it saves them, all at once."""
    from transformers.core_model_loading import revert_weight_conversion

    names = {name: torch.empty_like(each, device="meta") for name, each in lm.state_dict().items()}
    written = revert_weight_conversion(lm, dict(names))
    return bool(lm.is_remote_code()) or written.keys() != names.keys()


def _save_one_by_one(lm: Any, folder: Path, named: Mapping[str, Tensor], tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Save as save_pretrained does, one tensor in memory at a time. `tensors` come in the order of `named`."""
    write_config(lm, lm.dtype, folder)
    if lm.can_generate():
        lm.generation_config.save_pretrained(folder)
    write_weights(folder, named, tensors, MAX_FILE_BYTES)


def write_config(lm: Any, dtype: torch.dtype, folder: Path) -> None:
    """Write the config.json of a model by itself."""
    numbers = copy.deepcopy(lm.config)
    numbers.architectures, numbers.dtype = [type(lm).__name__], str(dtype).removeprefix("torch.")
    vars(numbers).pop("quantization_config", None)
    numbers.save_pretrained(folder)


def save_base(training_model: TrainingModel, tokenizer: Any, folder: Path, drawn: Any = None) -> None:
    """A base of random weights, as it was before any adapter: nothing else could make it again.

    Of a quantised or sharded one the weights are `drawn` once more: any tool reads them, and packed again they give the
    same bytes.
    """
    lm: Any = training_model.language_model
    if drawn is None:
        adapter = {id(tensor) for tensor in saved_tensors(training_model).values()}
        base = {
            name.replace(".base_layer.", ".").replace(".original_module.", "."): tensor.detach()
            for name, tensor in lm.state_dict(keep_vars=True).items()
            if id(tensor) not in adapter
        }
        lm.save_pretrained(str(folder), state_dict=base)
    else:
        drawn.save_pretrained(str(folder))
    add_transformers_4_keys(folder, type(lm.config))
    save_tokenizer(tokenizer, folder)


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Copy the files that the tokenizer was read from; only what the run changed, its chat template, is written anew.

    transformers 5 would write `"tokenizer_class": "TokenizersBackend"`, which transformers 4 refuses.
    """
    source = Path(tokenizer.name_or_path)
    files = {file for pattern in _TOKENIZER_FILES for file in source.glob(pattern) if file.is_file()}
    for file in files:
        shutil.copyfile(file, folder / file.name)
    if not files:  # the source is gone since the run began
        tokenizer.save_pretrained(str(folder))
    own = json.loads((folder / _TOKENIZER_CONFIG).read_text()) if (folder / _TOKENIZER_CONFIG).is_file() else {}
    changes: dict[str, Any] = {}
    if "tokenizer_class" not in own and not (folder / "config.json").is_file():  # nothing else would name it
        name = type(tokenizer).__name__
        changes["tokenizer_class"] = "PreTrainedTokenizerFast" if name == "TokenizersBackend" else name
    stored = own.get("chat_template")
    if (folder / _TEMPLATE).is_file():
        stored = (folder / _TEMPLATE).read_text()
    elif isinstance(stored, list):
        stored = {each["name"]: each["template"] for each in stored}
    if getattr(tokenizer, NEW_TOKENS, None):
        file = folder / "tokenizer.json"  # but for the tokens that the run added it stays as it was
        content, added = json.loads(file.read_text()), json.loads(tokenizer.backend_tokenizer.to_str())["added_tokens"]
        file.write_text(json.dumps({**content, "added_tokens": added}, ensure_ascii=False))
    if tokenizer.chat_template != stored:
        (folder / _TEMPLATE).write_text(tokenizer.chat_template)
        changes["chat_template"] = tokenizer.chat_template  # tools that do not read the file
    if changes:
        (folder / _TOKENIZER_CONFIG).write_text(json.dumps(own | changes, indent=2, ensure_ascii=False) + "\n")


def add_transformers_4_keys(folder: Path, config_class: Any) -> None:
    """Write what transformers 4 reads beside `rope_parameters` into config.json; it would take defaults for them.

    The file stays as it was where transformers 5 would read another rope from it.
    """
    file = folder / "config.json"
    plain = file.read_text()
    config = json.loads(plain)
    added = transformers_4_keys(config)
    if added:
        before = _rope_in(folder, config_class)
        file.write_text(json.dumps(config | added, indent=2, sort_keys=True) + "\n")
        if _rope_in(folder, config_class) != before:
            file.write_text(plain)


def _rope_in(folder: Path, config_class: Any) -> dict[str, Any]:
    """What transformers 5 reads, without `type`, an older name of `rope_type`."""
    rope = config_class.from_pretrained(str(folder)).rope_parameters
    return {key: value for key, value in rope.items() if key != "type"}


def transformers_4_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_theta`, `rope_scaling` and the like for a config.json of transformers 5, where its rope is flat.

    transformers 5 reads `rope_scaling` in place of `rope_parameters`, and must get the same from it.
    """
    rope = config.get("rope_parameters")
    if not rope or any(isinstance(each, dict) for each in rope.values()):
        return {}
    scaling = {key: value for key, value in rope.items() if key not in {"rope_theta", "partial_rotary_factor"}}
    if scaling["rope_type"] == "longrope" and "original_max_position_embeddings" in config:  # Phi 3 allows three keys
        scaling = {"type": "longrope", **{key: scaling[key] for key in ("short_factor", "long_factor")}}
    keys = {"rope_theta": rope["rope_theta"], "rope_scaling": scaling if scaling != {"rope_type": "default"} else None}
    if "partial_rotary_factor" in rope:
        keys["partial_rotary_factor"] = rope["partial_rotary_factor"]
    kind = config["model_type"]  # these have other names besides
    if kind == "gpt_neox":
        keys |= {"rotary_emb_base": rope["rope_theta"], "rotary_pct": keys.pop("partial_rotary_factor")}
    elif kind == "qwen3_moe":
        keys["num_experts"] = config["num_local_experts"]
    return keys


def needs_transformers_5(folder: Path) -> bool:
    """Whether layers differ in their rope, for which transformers 4 has other keys in each kind."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) if file.is_file() else {}
    return bool(config.get("rope_parameters")) and "rope_theta" not in config
