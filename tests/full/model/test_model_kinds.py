"""Every accepted kind of model, with every method, and text parts against the whole."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from app.base.text_part import whole_class
from app.config.kinds import TIERS, model_kinds
from app.model.checks import check_packing
from scripts import make_kinds
from tests.model.small import CAUSAL, MORE_KINDS, build_model, documents_of, lora, model_config, packed, sections
from tests.model.test_training_model import SLOW, check_one_by_one
from tests.model.wholes import saved_whole

_PARTS = 4  # of each section, which run beside each other
# too slow here for what they show; the script tries them
_SLOW: frozenset[tuple[str, str]] = frozenset()


def test_the_table_has_every_kind() -> None:
    known = {section: sorted(kinds) for section, kinds in model_kinds().tasks.items()}
    assert known == {section: sorted(make_kinds.kinds_of(section)) for section in make_kinds.SECTIONS}


@pytest.mark.parametrize("part", range(_PARTS))
@pytest.mark.parametrize("section", make_kinds.SECTIONS)
def test_every_kind_reaches_its_tier(section: str, part: int) -> None:
    accepted = {kind: tier for kind, tier in model_kinds().tasks[section].items() if tier.accepted}
    worse = {}
    with make_kinds.quiet():
        for kind in list(accepted)[part::_PARTS]:
            if (section, kind) in _SLOW:
                continue
            found = make_kinds.tier_in(section, kind)
            if TIERS.index(found.name) > TIERS.index(accepted[kind].name):
                worse[kind] = f"{accepted[kind].name} -> {found.name}: {found.reason}"
            elif found.uncalled != accepted[kind].uncalled:
                worse[kind] = f"uncalled layers: {accepted[kind].uncalled} -> {found.uncalled}"
    assert worse == {}


@pytest.mark.parametrize(
    ("kind", "method"), [*SLOW, *((kind, method) for kind in MORE_KINDS for method in ("full", "lora"))]
)
def test_model_equals_one_document_at_a_time(kind: str, method: str) -> None:
    check_one_by_one(kind, method)


# by names of numbers, the largest that a tiny model has
_MOST: dict[str, int] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 512),
    **dict.fromkeys(
        ("hidden_size", "d_model", "embed_dim", "out_hidden_size", "projection_dim", "text_hidden_size", "output_dim"),
        64,
    ),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim"), 128),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "depth", "encoder_layers", "num_global_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok"), 2),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    "head_dim": 16,
    "max_position_embeddings": 128,
}
# trained packed, of those that can be built so small with the packages at hand
PACKED = (
    *("cosmos3_omni", "deepseek_vl", "exaone4_5", "fuyu", "gemma3", "glmasr", "granite_docling"),
    *("granite_speech", "hyperclovax_vision_v2", "idefics2", "idefics3", "internvl", "lfm2_vl", "lfm3_vl"),
    *("lighton_ocr", "llava", "llava_next", "llava_next_video", "llava_onevision", "minimax_m3_vl", "mistral3"),
    *("mllama", "moss_transcribe_diarize", "muse_glimmer", "ovis2", "qianfan_ocr", "qwen2_audio", "qwen3_5"),
    *("qwen3_vl", "qwen3_vl_moe", "smolvlm", "video_llama_3", "vipllava", "voxtral"),
)
IDS = torch.randint(5, 300, (1, 12), generator=torch.Generator().manual_seed(0))


def _small(given: dict[str, Any]) -> dict[str, Any]:
    """Numbers of a default configuration made small, with a layer of each type."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        if isinstance(value, dict):
            found[name] = _small(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            inside = 500 if name.endswith(("token_id", "token_index")) else value
            found[name] = min(value, _MOST.get(name, inside))
        else:
            found[name] = value
    for name in ("layer_types", "mlp_layer_types"):
        if isinstance(found.get(name), list):
            types = list(dict.fromkeys(found[name]))
            found["num_hidden_layers"] = max(2, len(types))
            found[name] = (types * 2)[: found["num_hidden_layers"]]
    return found


def _numbers(kind: str) -> Any:
    config = transformers.CONFIG_MAPPING[kind]
    given = {key: value for key, value in config().to_dict().items() if key not in {"dtype", "transformers_version"}}
    return config.from_dict(_small(given))


@pytest.mark.parametrize("kind", PACKED)
def test_text_part_is_trained_packed_and_equals_whole(kind: str, tmp_path: Path) -> None:
    whole = saved_whole(_numbers(kind), tmp_path)
    with torch.no_grad():
        expected = whole(input_ids=IDS).logits
    model = build_model(sections(model_config(path=str(tmp_path)), lora()), torch.device("cpu"), 0, str(tmp_path))
    with torch.no_grad():
        found = model.eval().language_model(input_ids=IDS).logits
    assert float((found - expected).norm() / expected.norm()) < 1e-5
    for each in check_packing(model, packed(documents_of((21, 13, 30)))):
        assert each.difference <= each.allowed, each


@pytest.mark.parametrize("kind", ["aya_vision", "cohere2_vision"])
def test_refused_kind_has_a_class_that_computes_something_else(kind: str) -> None:
    numbers = _numbers(kind)
    torch.manual_seed(0)
    whole = whole_class(numbers, CAUSAL)._from_config(numbers).eval()
    text = numbers.get_text_config(decoder=True)
    lm = transformers.AutoModelForCausalLM.from_config(text).eval()
    lm.base_model.load_state_dict(whole.get_decoder().state_dict())
    lm.lm_head.load_state_dict(whole.lm_head.state_dict())
    with torch.no_grad():
        ours, theirs = lm(input_ids=IDS).logits, whole(input_ids=IDS).logits
    assert float((ours - theirs).norm() / theirs.norm()) > 1e-2
