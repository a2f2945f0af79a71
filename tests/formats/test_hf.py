"""Hugging Face configs: the published ones give the published counts and our presets; the rest is refused by name.

The files in `configs/` hold the facts of the public config.json files. ViT's lists 1000 labels there by name; here it
says `num_labels`.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gnomon
from gnomon.errors import CatalogueError, GnomonError, InputError
from gnomon.formats.huggingface.decoders import DECODERS
from gnomon.formats.huggingface.hybrids import HYBRIDS
from gnomon.formats.huggingface.known import READERS, TYPES
from gnomon.formats.huggingface.mixtures import MIXTURES
from gnomon.formats.huggingface.older import OLDER
from gnomon.formats.huggingface.read import ReadOptions, from_hf_config, read_hf_config
from gnomon.formats.keys import MAX_CHARACTERS, read_json
from gnomon.models.presets import model

CONFIGS = Path(__file__).parent / "configs"

PUBLISHED = {
    "llama-3.1-8b": ("llama-3.1-8b", 8_030_261_248),
    "llama-3.1-70b": ("llama-3.1-70b", 70_553_706_496),
    "llama-3.1-405b": ("llama-3.1-405b", 405_853_388_800),
    "llama-3.2-1b": ("llama-3.2-1b", 1_235_814_400),
    "mistral-7b-v0.1": ("mistral-7b", 7_241_732_096),
    "qwen2.5-7b": ("qwen2.5-7b", 7_615_616_512),
    "qwen3-8b": ("qwen3-8b", 8_190_735_360),
    "gemma-2-9b": ("gemma-2-9b", 9_241_705_984),
    "gpt2": ("gpt2", 124_439_808),
    "gpt-neox-20b": ("gpt-neox-20b", 20_554_567_680),
    "mixtral-8x7b-v0.1": ("mixtral-8x7b", 46_702_792_704),
    "qwen3-30b-a3b": ("qwen3-30b-a3b", 30_532_122_624),
    "deepseek-v3": ("deepseek-v3", 671_026_419_200),
    "bert-base-uncased": ("bert-base", 109_482_240),
    "t5-base": ("t5-base", 222_903_552),
    "flan-t5-base": ("flan-t5-base", 247_577_856),
    "vit-base-patch16-224": ("vit-b-16", 86_567_656),
}


def config(name: str, **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    return {key: value for key, value in {**values, **changes}.items() if value != "absent"}


def test_every_file_and_every_reader_is_tried() -> None:
    assert {path.stem for path in CONFIGS.glob("*.json")} == set(PUBLISHED)
    others = {
        "roberta",
        "xlm-roberta",
        "mt5",
        *("bart", "mbart", "marian", "m2m_100", "pegasus"),
        "kimi_k2",
        *(one.name for one in (*DECODERS, *OLDER, *MIXTURES, *HYBRIDS)),
    }
    assert {config(name)["model_type"] for name in PUBLISHED} == set(READERS) - others


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_a_published_config_is_the_preset(name: str) -> None:
    preset, count = PUBLISHED[name]
    graph = read_hf_config((CONFIGS / f"{name}.json").read_text(), preset).graph
    assert graph.num_parameters() == count
    if name != "gpt-neox-20b":  # its file says gelu_fast, the paper's table says nothing
        assert graph == model(preset)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_a_key_that_nobody_understands_is_named(name: str) -> None:
    asked = config(name, use_magic=True)
    assert "use_magic = True: no reader knows this key; not accounted for" in from_hf_config(asked, "m").notes
    with pytest.raises(InputError, match="unknown key 'use_magic'.*`\\$.use_magic`"):
        from_hf_config(asked, "m", strict=True)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("llama-3.1-8b", "attention_dropout", 0.1),
        ("llama-3.1-8b", "hidden_act", "cube"),
        ("qwen2.5-7b", "layer_types", ["sliding_attention"] * 28),
        ("gemma-2-9b", "attention_bias", True),
        ("gpt2", "add_cross_attention", True),
        ("gpt2", "embd_pdrop", 0.0),
        ("gpt-neox-20b", "attention_bias", False),
        ("mixtral-8x7b-v0.1", "router_jitter_noise", 0.1),
        ("qwen3-30b-a3b", "mlp_only_layers", [0]),
        ("qwen3-30b-a3b", "decoder_sparse_step", 2),
        ("deepseek-v3", "num_key_value_heads", 8),
        ("deepseek-v3", "scoring_func", "softmax"),
        ("bert-base-uncased", "position_embedding_type", "relative_key"),
        ("t5-base", "feed_forward_proj", "gated-silu"),
        ("t5-base", "is_gated_act", True),
        ("vit-base-patch16-224", "num_labels", "absent"),
    ],
)
def test_other_mathematics_is_refused(name: str, key: str, value: object) -> None:
    with pytest.raises(InputError) as error:
        from_hf_config(config(name, **{key: value}), "m")
    assert error.value.path == f"$.{'id2label' if key == 'num_labels' else key}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "absent"}, "missing key 'hidden_size'"),
        ({"hidden_size": None}, "missing key 'hidden_size'"),
        ({"hidden_size": "4096"}, "expected an integer of at least 1, got '4096'"),
        ({"hidden_size": True}, "expected an integer of at least 1, got True"),
        ({"hidden_size": -1}, "expected an integer of at least 1, got -1"),
        ({"num_key_value_heads": 5}, "num_heads=32 is not a multiple of num_kv_heads=5"),
        ({"num_attention_heads": 33}, "hidden_size=4096 is not a multiple of 33 heads"),
        ({"tie_word_embeddings": "yes"}, "expected true or false, got 'yes'"),
        ({"num_hidden_layers": 10**12}, "num_layers is 1000000000000: at most 10000"),
        ({"vocab_size": 10**12}, "vocab_size is 1000000000000: at most 4294967296"),
        ({"model_type": 3}, "names its model_type; got 3"),
    ],
)
def test_bad_values_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        from_hf_config(config("llama-3.1-8b", **changes), "m")


def test_a_number_too_large_for_one_is_named() -> None:
    """A mutated file ended in an OverflowError."""
    with pytest.raises(InputError, match="expected a number of at least 0, got 1000") as error:
        from_hf_config(config("gpt-neox-20b", rotary_pct=10**400), "m")
    assert error.value.path == "$.rotary_pct"
    with pytest.raises(GnomonError, match="query_scalar = 0.0 must be above 0"):  # a ZeroDivisionError
        from_hf_config(config("gemma-2-9b", query_pre_attn_scalar=0), "m")


def test_an_unknown_model_type_lists_the_nearest() -> None:
    with pytest.raises(CatalogueError, match="model_type 'lama' has no reader.*did you mean 'llama'"):
        from_hf_config({"model_type": "lama"}, "m")


def test_roberta_is_a_bert_of_one_kind_of_token() -> None:
    facts = {"model_type": "roberta", "vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1}
    assert from_hf_config(config("bert-base-uncased", **facts), "m").graph.num_parameters() == 124_645_632


def test_mt5_is_a_gated_t5_with_a_head_of_its_own() -> None:
    """mt5-small: 300,176,768 parameters on the hub."""
    facts = {"model_type": "mt5", "d_model": 512, "d_kv": 64, "d_ff": 1024, "num_layers": 8, "num_heads": 6}
    more = {"num_decoder_layers": 8, "vocab_size": 250112, "feed_forward_proj": "gated-gelu"}
    assert from_hf_config({**facts, **more, "tie_word_embeddings": False}, "m").graph.num_parameters() == 300_176_768


@pytest.mark.parametrize(
    ("kind", "layers", "width", "vocab", "places", "count"),
    [
        ("bart", 6, 768, 50265, 1024, 139_420_416),  # bart-base
        ("bart", 12, 1024, 50265, 1024, 406_291_456),  # bart-large
        ("mbart", 12, 1024, 250054, 1024, 610_879_488),  # mbart-large-50
        ("m2m_100", 12, 1024, 256206, 1024, 615_073_792),  # nllb-200-distilled-600M
        ("pegasus", 16, 1024, 96103, 1024, 568_699_904),  # pegasus-large
        ("marian", 6, 512, 58101, 512, 73_886_208),  # opus-mt, its two tables of sines left out
    ],
)
def test_encoders_with_a_decoder_have_the_parameters_of_their_cards(
    kind: str, layers: int, width: int, vocab: int, places: int, count: int
) -> None:
    """Counts are those of the hub's cards; names are transformers' own."""
    values: dict[str, Any] = {"model_type": kind, "d_model": width, "vocab_size": vocab, "is_encoder_decoder": True}
    values["max_position_embeddings"] = places
    for side in ("encoder", "decoder"):
        values |= {f"{side}_layers": layers, f"{side}_ffn_dim": 4 * width, f"{side}_attention_heads": width // 64}
    read = from_hf_config(values, "m", strict=True)
    assert read.graph.num_parameters() == count and "not run yet" in str(read.numerics)
    names = read.graph.parameters()
    assert "model.decoder.layers.0.encoder_attn.q_proj.weight" in names and "model.shared.weight" in names
    assert ("model.encoder.embed_positions.weight" in names) == (kind in ("bart", "mbart"))
    with pytest.raises(InputError, match="tie_word_embeddings=False changes the mathematics"):
        from_hf_config({**values, "tie_word_embeddings": False}, "m")
    with pytest.raises(CatalogueError, match="its encoder reads sound"):
        from_hf_config({**values, "model_type": "whisper"}, "m")


def test_kimi_k2_is_a_deepseek_v3_of_more_experts() -> None:
    """A trillion parameters, says its model card."""
    facts = {"model_type": "kimi_k2", "n_routed_experts": 384, "num_attention_heads": 64, "num_key_value_heads": 64}
    more = {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "vocab_size": 163840}
    graph = from_hf_config(config("deepseek-v3", **facts, **more), "m").graph
    assert graph.num_parameters() / 1e12 == pytest.approx(1.03, abs=0.005)


def test_a_file_with_all_keys_of_the_base_class_is_read() -> None:
    """As releases before 4.3x wrote them inside others: generation, labels and pruning stand there too."""
    base = {"torchscript": False, "pruned_heads": {}, "is_encoder_decoder": False, "num_beam_groups": 1}
    more = {"chunk_size_feed_forward": 0, "bad_words_ids": None, "id2label": {"0": "LABEL_0"}, "typical_p": 1.0}
    whole = from_hf_config(config("llama-3.1-8b", **base, **more), "m").graph
    assert whole.num_parameters() == 8_030_261_248
    with pytest.raises(InputError, match=r"add_cross_attention=True changes the mathematics"):
        from_hf_config(config("llama-3.1-8b", add_cross_attention=True), "m")


def test_the_rotated_fraction_by_both_its_names() -> None:
    """transformers 4.57 writes GPT-NeoX's twice."""
    twice = from_hf_config(config("gpt-neox-20b", rotary_pct=0.25, partial_rotary_factor=0.25), "m")
    assert twice.graph.num_parameters() == 20_554_567_680
    with pytest.raises(InputError, match="understood is 0.25"):
        from_hf_config(config("gpt-neox-20b", rotary_pct=0.25, partial_rotary_factor=0.5), "m")


def test_infinity_is_read_where_nothing_is_counted_by_it() -> None:
    """Mamba-2's configs hold "time_step_limit": [0.0, Infinity]."""
    mamba = {"model_type": "mamba2", "hidden_size": 256, "num_heads": 8, "head_dim": 64, "num_hidden_layers": 2}
    more = {"state_size": 128, "n_groups": 1, "vocab_size": 512, "time_step_limit": [0.0, float("inf")]}
    assert read_hf_config(json.dumps({**mamba, **more}), "m").graph.num_parameters() > 0
    broken = json.dumps(config("gpt2", resid_pdrop=float("inf")))
    with pytest.raises(InputError, match="expected a number of at least 0, got inf"):
        read_hf_config(broken, "m")


def test_biases_windows_and_ties_follow_the_keys() -> None:
    biased = from_hf_config(config("llama-3.1-8b", attention_bias=True, mlp_bias=True), "m").graph
    names = set(biased.parameters())
    assert {f"model.layers.0.self_attn.{p}_proj.bias" for p in "qkvo"} <= names
    assert "model.layers.0.mlp.down_proj.bias" in names
    qwen = from_hf_config(config("qwen2.5-7b", use_sliding_window=True, max_window_layers=20), "m").graph
    assert [(c.first, c.repeat) for c in qwen.calls[1:-1]] == [(0, 20), (20, 8)]
    tied = from_hf_config(config("qwen3-8b", tie_word_embeddings=True), "m").graph
    assert "lm_head.weight" not in tied.parameters()


@pytest.mark.parametrize(("value", "window"), [(None, 0), ("absent", 4096), (1024, 1024)])
def test_mistral_without_the_key_has_the_classes_window(value: object, window: int) -> None:
    graph = from_hf_config(config("mistral-7b-v0.1", sliding_window=value), "m").graph
    (layer,) = (b for b in graph.blocks if b.name.startswith("layers"))
    assert layer.op("self_attn.core").attr("window", 0) == window


def test_what_is_left_out_is_said() -> None:
    read = from_hf_config(config("deepseek-v3"), "m")
    assert [note.split(":")[0].split(" ")[0] for note in read.notes] == [
        "quantization_config",
        "num_nextn_predict_layers=1",
    ]
    whole = from_hf_config(config("deepseek-v3"), "m", ReadOptions(mtp=True))
    assert len(whole.notes) == 1 and whole.graph.outputs == ("head.loss", "mtp.loss")
    assert from_hf_config(config("llama-3.1-8b"), "m").notes == ()
    mlm = from_hf_config(config("bert-base-uncased"), "m", ReadOptions(bert_head="mlm"))
    assert mlm.notes == () and mlm.graph.outputs == ("head.loss",)


def test_vit_counts_its_labels() -> None:
    labels = {str(i): f"label {i}" for i in range(10)}
    graph = from_hf_config(config("vit-base-patch16-224", num_labels="absent", id2label=labels), "m").graph
    assert graph.num_parameters() == 86_567_656 - 990 * 769


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON.*line 1:2"),
        ('{"a": 1, "a": 2}', "gives 'a' twice"),
        ('{"a": NaN}', "holds NaN"),
        ('{"a": -Infinity}', "holds -Infinity"),
        ('{"a": 1e400}', "holds 1e400"),
        ("[1]", "holds a list; expected an object"),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
        (" " * (MAX_CHARACTERS + 1), "the limit is"),
    ],
    ids=["syntax", "duplicate", "nan", "infinity", "overflow", "list", "deep", "long"],
)
def test_broken_and_hostile_files(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_json(text, "config.json")


JSON = st.one_of(st.none(), st.booleans(), st.integers(-2, 2**40), st.floats(allow_nan=False), st.text(max_size=5))


@given(name=st.sampled_from(sorted(PUBLISHED)), data=st.data())
def test_any_change_gives_a_graph_or_a_named_error(name: str, data: st.DataObject) -> None:
    values = config(name)
    key = data.draw(st.sampled_from(sorted(values)))
    values[key] = data.draw(st.one_of(JSON, st.lists(JSON, max_size=2)))
    try:
        graph = from_hf_config(values, "m").graph
    except GnomonError as error:
        assert str(error)
    else:
        assert graph.num_parameters() > 0


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen3-30b-a3b", {"num_experts": "absent", "num_local_experts": 128}),
        ("deepseek-v3", {"output_router_logits": False}),
        ("t5-base", {"scale_decoder_outputs": True}),
        ("bert-base-uncased", {"is_decoder": False, "tie_word_embeddings": True}),
    ],
)
def test_what_transformers_5_writes_is_the_same_model(name: str, changes: dict[str, Any]) -> None:
    assert from_hf_config(config(name, **changes), "m").graph == from_hf_config(config(name), "m").graph


@pytest.mark.parametrize("value", [{}, 10**400, "many"])
@pytest.mark.parametrize("name", ["gemma-2-9b", "mistral-7b-v0.1"])
def test_a_number_that_only_results_depend_on_leaves_the_graph_as_it_is(name: str, value: object) -> None:
    """Two mutated files ended in a TypeError and an OverflowError."""
    values = json.loads((CONFIGS / f"{name}.json").read_text())
    read = read_hf_config(json.dumps({**values, "max_position_embeddings": value}), name)
    assert read.graph == read_hf_config(json.dumps(values), name).graph
    assert isinstance(read.numerics, str) and "cannot be read" in read.numerics


def test_what_is_known_of_a_type_stands_in_one_file() -> None:
    """Of the readers and the runtime: a new type is one value."""
    source = Path(gnomon.__file__).parent
    files = {*(source / "formats/huggingface").glob("*.py"), *(source / "runtime").rglob("*.py")}
    files.remove(source / "formats/huggingface/named.py")  # names that people give to networks, each with its config
    words = {path: {word for text in constants(path) for word in text.split()} for path in files}
    for name in TYPES:
        where = [file for file, found in words.items() if name in found]
        assert len(where) == 1, f"{name} is named in {where}"


def constants(path: Path) -> Iterator[str]:
    """String constants of a file without its docstrings, those under fields among them."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said:
            yield node.value


def test_losses_that_transformers_does_not_compute_are_named() -> None:
    """DeepSeek's own files have them; a plan's field that has the loss is said with its values."""
    values = json.loads((CONFIGS / "deepseek-v3.json").read_text())
    values.pop("aux_loss_alpha", None)
    for more, balance in (({"seq_aux": True}, "sequence"), ({"seq_aux": False}, "layer"), ({}, "sequence")):
        text = json.dumps({**values, "aux_loss_alpha": 0.003, **more})
        (said,) = [note for note in read_hf_config(text, "x").notes if "aux_loss_alpha" in note]
        assert f"experts.balance = '{balance}' with coefficient = 0.003" in said
    assert not any("aux_loss" in note for note in read_hf_config(json.dumps(values), "x").notes)
