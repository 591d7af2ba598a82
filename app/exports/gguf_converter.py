"""The merged model as a GGUF file by llama.cpp's own programs: kinds of model and quants that are not written here."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from app.errors import EnvironmentProblem
from app.exports.gguf import LICENCES, NOT_READ, QUANTS, GgufFile, by_llama_cpp
from app.exports.gguf_vocabulary import HARD_TEXTS, Vocabulary
from app.exports.verify import Reference, Reloaded

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
        for file in [file for pattern in LICENCES for file in whole.glob(pattern)]:
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
