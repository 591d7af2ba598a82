"""A GGUF file is what llama.cpp computes the same with, or its proof fails."""

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Regex, pre_tokenizers
from transformers import AutoTokenizer

from app.assets import ROOT
from app.config.finished_run import export_config
from app.errors import AppError
from app.evaluation.run import prepare_evaluation
from app.exports import gguf, gguf_model
from app.exports.export import make_export, prepare_export
from app.exports.gguf_model import modelfile, vocabulary_of
from tests.exports.small_gguf import KINDS, YARN, Small
from tests.harness.runs import FinishedRuns

pytest.importorskip("xllamacpp")


@pytest.mark.parametrize("kind", gguf_model.KINDS)
def test_kind_gives_llama_cpp_the_same_tokens_and_loss(tmp_path: Path, kind: str) -> None:
    found = Small(kind, tmp_path).proof()
    assert found.passed, found.lines()
    assert found.same_choice == 1
    assert KINDS.keys() == gguf_model.KINDS.keys()


@pytest.mark.parametrize(("window", "context"), [(None, 256), (64, 64), (512, 256)])
def test_gguf_context_length_does_not_exceed_the_window(tmp_path: Path, window: int | None, context: int) -> None:
    numbers = transformers.MistralConfig(max_position_embeddings=256, sliding_window=window)
    written = gguf_model.describe(numbers, "bf16").writer(tmp_path / "model.gguf").kv_data[0]
    assert written["llama.context_length"].value == context


def spoilt(small: Small, trap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trap of llama.cpp's format, put back."""
    kind, words = gguf_model.KINDS[small.kind], small.vocabulary
    match trap:
        case "rows of q and k":
            monkeypatch.setitem(gguf_model.KINDS, small.kind, kind._replace(pairs=False))
        case "norms less one":
            monkeypatch.setitem(gguf_model.KINDS, small.kind, kind._replace(norm_offset=0.0))
        case "rope factors":
            monkeypatch.setattr(gguf_model.GgufModel, "rope_factors", lambda _: None)
        case "another pre-tokenizer":
            small.vocabulary = replace(words, pre="qwen2")
        case "a blank before":
            small.vocabulary = replace(words, space_prefix=not words.space_prefix)


@pytest.mark.parametrize(
    ("kind", "trap", "why"),
    [
        ("llama", "rows of q and k", "does not prefer a token"),
        ("llama", "another pre-tokenizer", "it reads tokens ["),
        ("gemma3_text", "norms less one", "does not prefer a token"),
    ],
)
def test_proof_fails_with_a_trap_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, trap: str, why: str
) -> None:
    small = Small(kind, tmp_path)
    spoilt(small, trap, monkeypatch)
    found = small.proof()
    assert not found.passed
    assert why in str(found.failure), found


@pytest.fixture
def small_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(ROOT / "tiny")


def test_blank_that_llama_cpp_does_not_put_is_in_the_template(small_tokenizer: Any) -> None:
    """The tokens of conversations are compared as the vocabulary is made."""
    found = vocabulary_of(small_tokenizer, [1])
    assert found.pre == "gpt-2"
    assert len(found.chats) == 6
    assert "' ' ~ message['content']" in str(found.template)
    small_tokenizer.chat_template = "{% for each in messages %}<|user|>{{ each.content }}{% endfor %}"
    with pytest.raises(AppError, match="the chat template cannot add it"):
        vocabulary_of(small_tokenizer, [1])


def test_modelfile_has_the_template_where_texts_stand_around_messages(small_tokenizer: Any) -> None:
    words = vocabulary_of(small_tokenizer, [1])
    written = modelfile("a.gguf", small_tokenizer, words)
    assert written.startswith('FROM ./a.gguf\nTEMPLATE """{{ range .Messages }}{{ if eq .Role "system" }}<|system|> {{')
    assert written.endswith('{{ end }}{{ end }}<|assistant|>"""\nPARAMETER stop "<|end|>"\n')
    trims = str(words.template).replace("message['content']", "message['content'] | upper")
    assert "# The chat template is more than fixed text" in modelfile(
        "a.gguf", small_tokenizer, replace(words, template=trims)
    )


def test_tokenizers_and_models_that_are_not_proven_are_refused(small_tokenizer: Any) -> None:
    other = AutoTokenizer.from_pretrained(ROOT / "wordpiece")
    with pytest.raises(AppError, match="WordPiece tokenizers are not supported"):
        vocabulary_of(other, [1])
    split = pre_tokenizers.Split(Regex(r"\\w+|\\s+"), "isolated")
    small_tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    with pytest.raises(AppError, match="no known equivalent of the tokenizer"):
        vocabulary_of(small_tokenizer, [1])
    yarn = YARN | {"attention_factor": 2.0}
    for numbers, why in (
        (transformers.GPT2Config(), "model type gpt2 is not supported"),
        (transformers.LlamaConfig(rope_parameters=yarn), "has rope_type=yarn, which is not supported"),
        (transformers.Gemma3TextConfig(query_pre_attn_scalar=300), "has query_pre_attn_scalar=300"),
        (transformers.Qwen2Config(layer_types=["sliding_attention", "full_attention"] * 16), "has layer_types"),
    ):
        with pytest.raises(AppError, match=why):
            gguf_model.describe(numbers, "bf16")


def test_export_without_llama_cpp_says_what_was_not_proven(
    finished: FinishedRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf, "find_spec", lambda name: None if name == "xllamacpp" else find_spec(name))
    config = export_config([f"run={finished('lora')}", f"to={tmp_path}/out", "kind=gguf"])
    evaluation = prepare_evaluation(config, config.folder, {}, tuned=True, say=lambda _: None)
    found = make_export(prepare_export(config, evaluation), {}, lambda _: None)
    assert found.lines().startswith("passed: the file has the bytes that were written; llama.cpp did not read it")
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        *("model-bf16.gguf", "Modelfile", "README.md", "export.json")
    }
    assert json.loads((tmp_path / "out" / "export.json").read_text())["quant"] == "bf16"
    card = (tmp_path / "out" / "README.md").read_text()
    assert "llama-server -m model-bf16.gguf" in card
    assert "vllm" not in card


def test_scores_rank_token_by_its_first_merge() -> None:
    vocabulary = {"a": 0, "b": 1, "c": 2, "ab": 3, "bc": 4, "abc": 5}
    scores = gguf_model._scores({"vocab": vocabulary}, [("a", "b"), ("a", "bc"), ("b", "c"), ("ab", "c")])
    assert scores == [-4.0, -4.0, -4.0, 0.0, -2.0, -1.0]
