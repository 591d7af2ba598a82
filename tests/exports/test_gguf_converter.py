"""What llama.cpp's programs are asked to make of a merged model: stand-ins write down their arguments."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from app.config.finished_run import export_config
from app.errors import AppError
from app.export import export
from app.exports import gguf
from app.exports.gguf import converter_problems, run_program
from app.tracking.console import Console
from tests.harness.runs import FinishedRuns

CONVERTER = """
import beside, json, sys
from pathlib import Path
model, _, made, _, kind = sys.argv[1:]
assert json.loads((Path(model) / "config.json").read_text())["model_type"] == "llama"
assert {"model.safetensors", "tokenizer.json"} <= {each.name for each in Path(model).iterdir()}
(Path(__file__).parent / "said.json").write_text(json.dumps([sys.argv[2], Path(made).name, *sys.argv[4:]]))
Path(made).write_text("converted")
"""
QUANTIZER = '#!/bin/sh\necho "$(cat $1) as $3" >$2\n'


def stand_in(folder: Path, converter: str = CONVERTER) -> Path:
    (folder / "build" / "bin").mkdir(parents=True)
    (folder / "convert_hf_to_gguf.py").write_text(converter)
    (folder / "beside.py").touch()
    quantizer = folder / "build" / "bin" / "llama-quantize"
    quantizer.write_text(QUANTIZER)
    quantizer.chmod(0o755)
    return folder


def test_merged_model_goes_through_converter_and_quantizer(
    finished: FinishedRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf, "find_spec", lambda name: None if name == "xllamacpp" else find_spec(name))
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    place, out = stand_in(tmp_path / "llama.cpp"), tmp_path / "out"
    words = [f"run={finished('lora')}", "kind=gguf", "quant=q4_k_m", f"llama_cpp={place}"]
    assert export(export_config([*words, f"to={out}"]), Console()) == 0
    assert json.loads((place / "said.json").read_text()) == ["--outfile", "model-bf16.gguf", "--outtype", "bf16"]
    assert {file.name for file in out.iterdir()} == {*("model-q4_k_m.gguf", "Modelfile", "README.md", "export.json")}
    assert (out / "model-q4_k_m.gguf").read_text() == "converted as Q4_K_M\n"
    assert "llama.cpp did not read it" in json.loads((out / "export.json").read_text())["note"]


def test_missing_programs_and_keys_of_no_use_are_refused(finished: FinishedRuns, tmp_path: Path) -> None:
    words = [f"run={finished('lora')}", f"to={tmp_path}/out"]
    with pytest.raises(AppError, match="Set llama_cpp=DIR, its folder"):
        export_config([*words, "kind=gguf", "quant=q4_k_m"])
    other = finished.copy(tmp_path / "other")
    settings = (other / "run.yaml").read_text().replace("kind: causal", "kind: classification")
    (other / "run.yaml").write_text(settings.replace("format: messages", "format: labelled_text"))
    with pytest.raises(AppError, match="is for models that generate text, not task=classification"):
        export_config([f"run={other}", "kind=gguf", f"to={tmp_path}/out", "llama_cpp=here"])
    with pytest.raises(AppError, match="is for GGUF files only"):
        export_config([*words, "kind=merged", "llama_cpp=here"])
    assert "no convert_hf_to_gguf.py in this folder" in "".join(converter_problems(str(tmp_path), "bf16"))
    (stand_in(tmp_path / "llama.cpp") / "build" / "bin" / "llama-quantize").unlink()
    assert list(converter_problems(f"{tmp_path}/llama.cpp", "q8_0")) == []
    failing = stand_in(tmp_path / "failing", "raise SystemExit('Model X is not supported')") / "convert_hf_to_gguf.py"
    with pytest.raises(AppError, match=r"convert_hf_to_gguf.py failed with exit code 1: Model X is not supported"):
        run_program("DIR", sys.executable, str(failing))
    assert "needs llama-quantize" in "".join(converter_problems(f"{tmp_path}/llama.cpp", "q4_k_m"))
