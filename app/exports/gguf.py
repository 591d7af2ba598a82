"""GGUF export of the merged model: written here or by llama.cpp's converter, read back and compared in llama.cpp."""

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
    GgufModel,
    Place,
    Vocabulary,
    describe,
    modelfile,
    vocabulary_of,
)
from app.exports.kinds import Export, MergedExport
from app.exports.verify import Reference, Reloaded, Verification, run_fresh
from app.finished.inference import load_tuned_tokenizer
from app.model.decoding import end_ids
from app.pages.model_card import Loading

LICENSES = ("LICENSE*", "NOTICE*", "USE_*")
NOT_READ = "llama.cpp did not read it (to verify it there: pip install xllamacpp)"
# allowed difference of the mean loss in llama.cpp, which rounds activations too: in nats, relative to a loss above 1
QUANTS = {"bf16": 0.02, "f16": 0.02, "q8_0": 0.05, "q4_0": 0.5}


class GgufFile(MergedExport):
    """Merged model as one GGUF file, with a Modelfile for Ollama."""

    measure = "loss_difference"

    @property
    def name(self) -> str:
        return f"model-{self.config.quant}.gguf"

    @cached_property
    def tokenizer(self) -> Any:
        return load_tuned_tokenizer(self.final, self.config.model.trust_remote_code)

    def on_card(self, loading: Loading, verified: Verification) -> Loading:
        before, after = verified.loss_before, verified.loss_after
        loss = "" if verified.note else f" Its loss in llama.cpp is {after:.4f} (run: {before:.4f})."
        text = f"A GGUF file in {self.config.quant}, for llama.cpp and programs based on it.{loss}"
        commands = f"llama-server -m {self.name}\nollama create mine -f Modelfile"
        return replace(loading, commands=commands, quantized=text)


class GgufExport(GgufFile):
    """GGUF file written by this program."""

    merged_dtype = "fp32"
    digests: dict[str, str]  # hashes of the written tensors, by name

    @property
    def copied(self) -> dict[str, Path]:
        return {name: file for name, file in super().copied.items() if any(map(Path(name).match, LICENSES))}

    @cached_property
    def model(self) -> GgufModel:
        """The model in terms of llama.cpp."""
        base = self.evaluation.base
        if base.stacks_of_experts:
            raise ConfigError(
                f"kind=gguf: stacked experts are not supported ({base.stacks_of_experts[0]}). {OTHER_WAY}"
            )
        return describe(base.on_meta().config, self.config.quant)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return vocabulary_of(self.tokenizer, self._ends)

    @property
    def _ends(self) -> list[int]:
        """Tokens that end an answer."""
        folder, config = Path(self.sections.model.path), self.evaluation.base.on_meta().config
        has_file = (folder / "generation_config.json").is_file()
        generation = GenerationConfig.from_pretrained(str(folder)) if has_file else GenerationConfig(eos_token_id=None)
        return end_ids(SimpleNamespace(generation_config=generation, config=config), self.tokenizer)

    @property
    def bytes(self) -> int:
        """Size of all files, up to names and padding."""
        return (
            sum(place.bytes for place in self._places())
            + self.vocabulary.bytes
            + sum(file.stat().st_size for file in self.copied.values())
        )

    def _places(self) -> Iterator[Place]:
        """Yield the tensors of the file in the order of the merged weights, without a tied head."""
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
    file: Path, model: GgufModel, vocabulary: Vocabulary, places: list[Place], read: Callable[[str], Tensor]
) -> dict[str, str]:
    """Write a file tensor by tensor and return their hashes. `read` returns the fp32 source of a place."""
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
    """Return an error if the tensors of a file differ from those written."""
    from gguf import GGUFReader

    in_file = {tensor.name: sha256(tensor.data.tobytes()).hexdigest() for tensor in GGUFReader(str(file)).tensors}
    other = sorted(name for name, _ in in_file.items() ^ digests.items())
    return f"{other[0]} differs in the file from the tensor that was written" if other else None


def by_llama_cpp(file: Path, vocabulary: Vocabulary, reference: Reference, threads: int | None) -> Reloaded | str:
    """Return the results of llama.cpp in a new process for rows, texts and conversations, or an error as text."""
    texts, chats = vocabulary.texts, vocabulary.chats
    rows: list[dict[str, Any]] = [
        {"ids": ids.tolist(), "at": reference.rows[f"at.{i}"].tolist(), "targets": targets.tolist()}
        for i, (ids, targets) in enumerate(zip(reference.ids, reference.targets, strict=True))
    ]
    plan: dict[str, Any] = {"model": str(file), "threads": threads, "rows": rows}
    plan |= {"plain": (vocabulary.ends or [0])[0], "number": len(vocabulary.tokens)}
    plan |= {"texts": [text for text, _ in texts], "chats": [messages for messages, _ in chats]}
    results = run_fresh(llama_cpp.__file__, plan)
    if isinstance(results, str):
        return results
    other = [
        f"it reads tokens {theirs} instead of {ours} in {text!r}"
        for (text, ours), theirs in zip([*texts, *chats], results["texts"] + results["chats"], strict=True)
        if ours != theirs
    ]
    losses = [-logprob for row in results["rows"] for logprob in row["logprobs"]]
    choices = [torch.tensor(row["choices"]) for row in results["rows"]]
    mean = sum(losses) / len(losses)
    return Reloaded(reference.ids, mean, None, choices=choices, failure=other[0] if other else None)


# ---- gguf converter


_CONVERTER, _QUANTIZER = "convert_hf_to_gguf.py", "llama-quantize"
_BY_CONVERTER = ("bf16", "f16", "q8_0")  # its --outtype; others are quantized from bf16
_TOLERANCE = 0.5  # for fewer bits, in nats, as for q4_0


def _quantizer(place: Path) -> str | None:
    return shutil.which(_QUANTIZER, path=os.pathsep.join(map(str, (place / "build" / "bin", place))))


def converter_problems(folder: str, quant: str) -> Iterator[str]:
    """Yield the missing programs of llama.cpp in the folder of `llama_cpp=`."""
    place = Path(folder).expanduser()
    if not (place / _CONVERTER).is_file():
        yield f"llama_cpp={folder}: no {_CONVERTER} in this folder. Set the folder of llama.cpp's source."
    elif quant not in _BY_CONVERTER and _quantizer(place) is None:
        yield (
            f"llama_cpp={folder}: quant={quant} needs {_QUANTIZER} in this folder or in build/bin. Build it: "
            "cmake -B build && cmake --build build --target llama-quantize."
        )


class ConvertedExport(GgufFile):
    """GGUF file that llama.cpp's programs convert from the merged model in bf16; its Modelfile only has FROM."""

    @property
    def disk_bytes(self) -> int:
        return 3 * self.bytes

    def write(self, folder: Path) -> int:
        merged, quant, llama_cpp_folder = folder / "merged", self.config.quant, str(self.config.llama_cpp)
        merged.mkdir()
        rounded = super().write(merged)
        kind = quant if quant in _BY_CONVERTER else _BY_CONVERTER[0]
        converted = folder / f"model-{kind}.gguf"
        place = Path(llama_cpp_folder).expanduser().absolute()
        options = ("--outfile", str(converted), "--outtype", kind)
        run_program(llama_cpp_folder, sys.executable, str(place / _CONVERTER), str(merged), *options)
        if kind != quant:
            paths = str(converted), str(folder / self.name)
            run_program(llama_cpp_folder, str(_quantizer(place)), *paths, quant.upper())
            converted.unlink()
        for file in [file for pattern in LICENSES for file in merged.glob(pattern)]:
            file.rename(folder / file.name)
        shutil.rmtree(merged)
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


def run_program(folder: str, *command: str) -> None:
    """Run a program of llama.cpp with imports from its folder."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        output = " ".join((done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-3:])
        name = next(Path(word).name for word in command if word != sys.executable)
        raise EnvironmentProblem(f"llama_cpp={folder}: {name} failed with exit code {done.returncode}: {output}")
