"""GGUF export of the merged model: written here or by llama.cpp's converter, read back, and compared in llama.cpp."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig

from app.errors import ConfigError, EnvironmentProblem
from app.exports import llama_cpp
from app.exports.gguf_model import (
    HARD_TEXTS,
    OTHER_WAY,
    Described,
    Place,
    Vocabulary,
    described,
    modelfile,
    vocabulary_of,
)
from app.exports.kinds import Export, MergedExport
from app.exports.verify import Reference, Reloaded, Verification, run_fresh
from app.finished.inference import load_tuned_tokenizer
from app.model.decoding import end_ids
from app.pages.model_card import Loading

LICENSES = ("LICENSE*", "NOTICE*", "USE_*")
NOT_READ = "llama.cpp did not read it: pip install xllamacpp for that"
# nats that the mean loss in llama.cpp may differ by, relative to one above 1: it rounds activations as it does weights
QUANTS = {"bf16": 0.02, "f16": 0.02, "q8_0": 0.05, "q4_0": 0.5}


class GgufFile(MergedExport):
    """The merged model as one GGUF file, with a Modelfile for Ollama."""

    measure = "loss_difference"

    @property
    def name(self) -> str:
        return f"model-{self.config.quant}.gguf"

    @cached_property
    def tokenizer(self) -> Any:
        return load_tuned_tokenizer(self.final, self.config.model.trust_remote_code)

    def on_card(self, loading: Loading, verified: Verification) -> Loading:
        lost = (
            "" if verified.note else f" Its loss there is {verified.loss_after:.4f} (run: {verified.loss_before:.4f})."
        )
        said = f"A GGUF file in {self.config.quant}, for llama.cpp and programs that contain it.{lost}"
        commands = f"llama-server -m {self.name}\nollama create mine -f Modelfile"
        return replace(loading, commands=commands, quantized=said)


class GgufExport(GgufFile):
    """The file as this program writes it."""

    merged_dtype = "fp32"
    digests: dict[str, str]  # of the bytes of each tensor that was written

    @property
    def copied(self) -> dict[str, Path]:
        return {name: file for name, file in super().copied.items() if any(map(Path(name).match, LICENSES))}

    @cached_property
    def model(self) -> Described:
        """The model, or why it is not written."""
        base = self.evaluation.base
        if base.stacks_of_experts:
            raise ConfigError(
                f"kind=gguf: {base.stacks_of_experts[0]} is a stack of experts, which is not written here. {OTHER_WAY}"
            )
        return described(base.on_meta().config, self.config.quant)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return vocabulary_of(self.tokenizer, self._ends)

    @property
    def _ends(self) -> list[int]:
        """Tokens that end an answer."""
        folder, config = Path(self.sections.model.path), self.evaluation.base.on_meta().config
        has_own = (folder / "generation_config.json").is_file()
        generation = GenerationConfig.from_pretrained(str(folder)) if has_own else GenerationConfig(eos_token_id=None)
        return end_ids(SimpleNamespace(generation_config=generation, config=config), self.tokenizer)

    @property
    def bytes(self) -> int:
        """Size of all files, up to names and padding."""
        return (
            sum(each.bytes for each in self._places())
            + self.vocabulary.bytes
            + sum(file.stat().st_size for file in self.copied.values())
        )

    def _places(self) -> Iterator[Place]:
        """The tensors of the file, by those that are merged; a tied head is not among them."""
        for name, stored in self.merge.names.files.items():
            if not (name == "lm_head.weight" and self.model.numbers.tie_word_embeddings):
                yield self.model.place(name, stored, tuple(self.merge.tensors[stored].shape))

    def write(self, folder: Path) -> int:
        Export.write(self, folder)
        self.digests = write_gguf(
            folder / self.name,
            self.model,
            self.vocabulary,
            list(self._places()),
            lambda name: self.merge.weight(name)[0],
        )
        (folder / "Modelfile").write_text(modelfile(self.name, self.tokenizer, self.vocabulary), encoding="utf-8")
        return 0

    def reload(self, folder: Path, reference: Reference) -> Reloaded | str:
        file, runtime = folder / self.name, self.evaluation.runtime
        problem = read_back(file, self.digests)
        if problem is not None:
            return problem
        if find_spec("xllamacpp") is None:
            return Reloaded(reference.ids, None, None, note=f"the file has the bytes that were written; {NOT_READ}")
        return by_llama_cpp(file, self.vocabulary, reference, runtime.threads if runtime.device.type == "cpu" else None)

    def tolerance(self, rounded: int) -> tuple[float, str]:  # noqa: ARG002
        return QUANTS[self.config.quant], f"of {self.config.quant} in llama.cpp"


def write_gguf(
    file: Path, model: Described, vocabulary: Vocabulary, places: list[Place], read: Callable[[str], Tensor]
) -> dict[str, str]:
    """Write a file tensor by tensor; returns a hash of the bytes of each. `read` gives the fp32 source of a place."""
    factors = model.rope_factors()
    writer = model.writer(file)
    vocabulary.add_to(writer, model.numbers.vocab_size)
    if factors is not None:
        writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
    for place in places:
        writer.add_tensor_info(place.name, place.stored_shape, np.dtype(np.uint8), place.bytes, raw_dtype=place.type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    if factors is not None:
        writer.write_tensor_data(factors)
    digests = {} if factors is None else {"rope_freqs.weight": sha256(factors).hexdigest()}
    for place in places:
        packed = model.packed(place, read(place.source))
        digests[place.name] = sha256(packed).hexdigest()
        writer.write_tensor_data(packed)
    writer.close()
    return digests


def read_back(file: Path, digests: Mapping[str, str]) -> str | None:
    """Whether a file has other tensors than those that were written."""
    from gguf import GGUFReader

    found = {each.name: sha256(each.data.tobytes()).hexdigest() for each in GGUFReader(str(file)).tensors}
    other = sorted(name for name, _ in found.items() ^ digests.items())
    return f"{other[0]} is not in the file as it was written" if other else None


def by_llama_cpp(file: Path, vocabulary: Vocabulary, reference: Reference, threads: int | None) -> Reloaded | str:
    """Rows, texts and conversations as llama.cpp reads them, in a fresh process."""
    texts, chats = vocabulary.texts, vocabulary.chats
    rows: list[dict[str, Any]] = [
        {"ids": ids.tolist(), "at": reference.rows[f"at.{i}"].tolist(), "targets": targets.tolist()}
        for i, (ids, targets) in enumerate(zip(reference.ids, reference.targets, strict=True))
    ]
    plan: dict[str, Any] = {"model": str(file), "threads": threads, "rows": rows}
    plan |= {"plain": (vocabulary.ends or [0])[0], "number": len(vocabulary.tokens)}
    plan |= {"texts": [text for text, _ in texts], "chats": [messages for messages, _ in chats]}
    found = run_fresh(llama_cpp.__file__, plan)
    if isinstance(found, str):
        return found
    other = [
        f"it reads {theirs} where training read {ours}, in {given!r}"
        for (given, ours), theirs in zip([*texts, *chats], found["texts"] + found["chats"], strict=True)
        if ours != theirs
    ]
    losses = [-each for row in found["rows"] for each in row["logprobs"]]
    choices = [torch.tensor(row["choices"]) for row in found["rows"]]
    mean = sum(losses) / len(losses)
    return Reloaded(reference.ids, mean, None, choices=choices, failure=other[0] if other else None)


# ---- gguf converter


_CONVERTER, _QUANTIZER = "convert_hf_to_gguf.py", "llama-quantize"
_BY_CONVERTER = ("bf16", "f16", "q8_0")  # its --outtype; others are made of bf16
_TOLERANCE = 0.5  # of fewer bits, in nats, as of q4_0


def _quantizer(place: Path) -> str | None:
    return shutil.which(_QUANTIZER, path=os.pathsep.join(map(str, (place / "build" / "bin", place))))


def converter_problems(given: str, quant: str) -> Iterator[str]:
    """What of llama.cpp is not in the folder `llama_cpp=`."""
    place = Path(given).expanduser()
    if not (place / _CONVERTER).is_file():
        yield f"llama_cpp={given}: there is no {_CONVERTER} in it. Give the folder of llama.cpp's source."
    elif quant not in _BY_CONVERTER and _quantizer(place) is None:
        yield (
            f"llama_cpp={given}: quant={quant} needs {_QUANTIZER} there or in build/bin. Build it: "
            "cmake -B build && cmake --build build --target llama-quantize."
        )


class ConvertedExport(GgufFile):
    """A GGUF file that llama.cpp's programs make of the merged model, in bf16; its Modelfile names the file alone."""

    @property
    def disk_bytes(self) -> int:
        return 3 * self.bytes

    def write(self, folder: Path) -> int:
        whole, quant, given = folder / "merged", self.config.quant, str(self.config.llama_cpp)
        whole.mkdir()
        rounded = super().write(whole)
        kind = quant if quant in _BY_CONVERTER else _BY_CONVERTER[0]
        made = folder / f"model-{kind}.gguf"
        place = Path(given).expanduser().absolute()
        run_program(
            given, sys.executable, str(place / _CONVERTER), str(whole), "--outfile", str(made), "--outtype", kind
        )
        if kind != quant:
            run_program(given, str(_quantizer(place)), str(made), str(folder / self.name), quant.upper())
            made.unlink()
        for file in [file for pattern in LICENSES for file in whole.glob(pattern)]:
            file.rename(folder / file.name)
        shutil.rmtree(whole)
        (folder / "Modelfile").write_text(f"FROM ./{self.name}\n", encoding="utf-8")
        return rounded

    def reload(self, folder: Path, reference: Reference) -> Reloaded | str:
        if find_spec("xllamacpp") is None:
            return Reloaded(reference.ids, None, None, note=f"by {_CONVERTER}; {NOT_READ}")
        plain = self.tokenizer.backend_tokenizer
        texts = [(text, plain.encode(text, add_special_tokens=False).ids) for text in HARD_TEXTS]
        tokens = list(self.tokenizer.get_vocab())
        words = Vocabulary("", tokens, [], None, [], {}, (False, False), texts=texts)
        runtime = self.evaluation.runtime
        threads = runtime.threads if runtime.device.type == "cpu" else None
        return by_llama_cpp(folder / self.name, words, reference, threads)

    def tolerance(self, rounded: int) -> tuple[float, str]:  # noqa: ARG002
        return QUANTS.get(self.config.quant, _TOLERANCE), f"of {self.config.quant} in llama.cpp"


def run_program(given: str, *command: str) -> None:
    """Run a program of llama.cpp, which imports what lies beside it."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        said = " ".join((done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()[-3:])
        name = next(Path(word).name for word in command if word != sys.executable)
        raise EnvironmentProblem(f"llama_cpp={given}: {name} ended with {done.returncode}: {said}")
