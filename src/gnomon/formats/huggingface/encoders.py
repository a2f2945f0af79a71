"""Hugging Face configs of encoders, of texts and images, and of encoders with a decoder (T5, BART).

As in `huggingface.decoders`. Heads that classify texts are BERT's and RoBERTa's.
"""

from __future__ import annotations

from collections.abc import Mapping

from gnomon.formats.huggingface.model_type import ModelType
from gnomon.formats.huggingface.numerics import BERT, Usual
from gnomon.formats.huggingface.parts import ACTIVATIONS, Notes, Reader, ReadOptions, only
from gnomon.formats.huggingface.pieces import exactly, led
from gnomon.formats.huggingface.weights import Family
from gnomon.formats.keys import Keys
from gnomon.graph import Graph
from gnomon.models import bart, bert, t5, vit


def _roberta(k: Keys, name: str, options: ReadOptions, notes: Notes) -> Graph:
    """Reads RoBERTa, whose head has a GELU whatever activation the layers have."""
    return _bert(k, name, options, notes, head_activation="gelu")


def _bert(k: Keys, name: str, options: ReadOptions, notes: Notes, *, head_activation: str = "") -> Graph:
    k.must_be("position_embedding_type", "absolute")
    k.must_be("is_decoder", False)
    k.must_be("add_cross_attention", False)
    k.must_be("tie_word_embeddings", True)
    k.ignore("classifier_dropout")
    k.ignore(*(f"pooler_{p}" for p in ("fc_size", "num_attention_heads", "num_fc_layers", "size_per_head", "type")))
    k.ignore("directionality")
    classes = _classes(k) if options.bert_head == "classifier" else 1
    if options.bert_head == "pooler":
        notes.append("the bare model with its pooler, without a loss; ask for the mlm head to train it")
    return bert.bert(
        bert.BertConfig(
            name=name,
            num_layers=k.integer("num_hidden_layers"),
            hidden_size=k.integer("hidden_size"),
            num_heads=k.integer("num_attention_heads"),
            ffn_size=k.integer("intermediate_size"),
            vocab_size=k.integer("vocab_size"),
            max_positions=k.integer("max_position_embeddings"),
            num_token_types=k.integer("type_vocab_size", 2),
            dropout=k.number("hidden_dropout_prob", 0.1),
            attention_dropout=k.number("attention_probs_dropout_prob", 0.1),
            activation=k.choice("hidden_act", ACTIVATIONS, "gelu"),
            head=options.bert_head,
            num_classes=classes,
            head_activation=head_activation,
        )
    )


def _mt5(k: Keys, name: str, options: ReadOptions, notes: Notes) -> Graph:
    return _t5(k, name, options, notes, multilingual=True)


def _t5(k: Keys, name: str, options: ReadOptions, notes: Notes, *, multilingual: bool = False) -> Graph:
    layers = k.integer("num_layers")
    gated = k.choice("feed_forward_proj", {"relu": "", "gated-gelu": "gated"}, "relu") == "gated"
    k.must_be("is_gated_act", gated)
    k.must_be("dense_act_fn", "gelu_new" if gated else "relu")
    k.must_be("is_encoder_decoder", True)
    k.ignore("n_positions", "classifier_dropout")
    tied = k.flag("tie_word_embeddings", True)
    k.ignore("scale_decoder_outputs")
    scaled = not multilingual and k.flag("scale_decoder_outputs", tied)
    return t5.t5(
        t5.T5Config(
            name=name,
            num_layers=layers,
            num_decoder_layers=k.integer("num_decoder_layers", layers),
            hidden_size=k.integer("d_model"),
            num_heads=k.integer("num_heads"),
            head_dim=k.integer("d_kv"),
            ffn_size=k.integer("d_ff"),
            vocab_size=k.integer("vocab_size"),
            gated=gated,
            tied=tied,
            scaled=scaled,
            buckets=k.integer("relative_attention_num_buckets", 32),
            max_distance=k.integer("relative_attention_max_distance", 128),
            dropout=k.number("dropout_rate", 0.1),
        )
    )


def _bart_like(*, trained: int | None, pre_norm: bool, embedding_norm: bool, scaled: bool) -> Reader:
    """Makes a reader of models like BART. trained: rows of a table of positions before the first token's; None:
    positions are not trained. scaled: where the file does not say. Source: modelling classes of transformers 5.23."""

    def read(k: Keys, name: str, options: ReadOptions, notes: Notes) -> Graph:
        k.must_be("is_encoder_decoder", True)
        k.must_be("tie_word_embeddings", True)
        if k.has("share_encoder_decoder_embeddings"):
            k.must_be("share_encoder_decoder_embeddings", True)
        for side in ("encoder", "decoder"):
            if k.number(f"{side}_layerdrop", 0.0):
                notes.append(f"{side}_layerdrop: layers that training leaves out by chance are computed here")
        # of older releases, whose classes were one; the classes of today do not read them
        k.ignore("normalize_before", "normalize_embedding", "static_position_embeddings", "extra_pos_embeddings")
        k.ignore("add_bias_logits", "add_final_layer_norm", "decoder_vocab_size", "num_hidden_layers")
        k.ignore("classifier_dropout", "classif_dropout", "num_labels", "id2label", "label2id", "init_std")
        places = k.integer("max_position_embeddings", 1024)
        return bart.bart(
            bart.BartConfig(
                name=name,
                num_layers=k.integer("encoder_layers"),
                num_decoder_layers=k.integer("decoder_layers"),
                hidden_size=k.integer("d_model"),
                num_heads=k.integer("encoder_attention_heads"),
                num_decoder_heads=k.integer("decoder_attention_heads"),
                ffn_size=k.integer("encoder_ffn_dim"),
                decoder_ffn_size=k.integer("decoder_ffn_dim"),
                vocab_size=k.integer("vocab_size"),
                position_rows=None if trained is None else places + trained,
                pre_norm=pre_norm,
                embedding_norm=embedding_norm,
                scaled=k.flag("scale_embedding", scaled),
                activation=k.choice("activation_function", ACTIVATIONS, "gelu"),
                dropout=k.number("dropout", 0.1),
                attention_dropout=k.number("attention_dropout", 0.0),
                activation_dropout=k.number("activation_dropout", 0.0),
            )
        )

    return read


def _classes(k: Keys) -> int:
    """Counts the classes of a classifier; two where the file does not say, as in transformers."""
    labels = k.raw("id2label")
    k.ignore("label2id", "problem_type")
    return k.integer("num_labels", len(labels) if isinstance(labels, Mapping) else 2)


def _vit(k: Keys, name: str, options: ReadOptions, notes: Notes) -> Graph:
    labels = k.raw("id2label")
    only(k, options, "problem_type", "single_label_classification")
    k.ignore("label2id", "encoder_stride", "pooler_output_size", "pooler_act")
    if labels is not None and not isinstance(labels, Mapping):
        k.fail("id2label", f"expected an object, got {labels!r}")
    if labels is None and not k.has("num_labels"):
        k.fail("id2label", "no id2label or num_labels: the size of the classifier is not known")
    return vit.vit(
        vit.VitConfig(
            name=name,
            num_layers=k.integer("num_hidden_layers"),
            hidden_size=k.integer("hidden_size"),
            num_heads=k.integer("num_attention_heads"),
            ffn_size=k.integer("intermediate_size"),
            image_size=k.integer("image_size"),
            patch_size=k.integer("patch_size"),
            num_channels=k.integer("num_channels", 3),
            num_classes=k.integer("num_labels", len(labels) if labels is not None else None),
            qkv_bias=k.flag("qkv_bias", True),
            dropout=k.number("hidden_dropout_prob", 0.0),
            attention_dropout=k.number("attention_probs_dropout_prob", 0.0),
            activation=k.choice("hidden_act", ACTIVATIONS, "gelu"),
        )
    )


T5_FILES = Family(
    copies=(
        ("encoder.embed_tokens.weight", "shared.weight"),
        ("decoder.embed_tokens.weight", "shared.weight"),
        ("lm_head.weight", "shared.weight"),
    ),
    # Files of the first releases have it; cross-attention adds no biases by distance, and nothing reads it.
    ignored=(r"^decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight$",),
)
ROBERTA_FILES = Family(
    names=(
        (r"^classify\.dense\.", "classifier.dense."),
        (r"^classify\.out\.", "classifier.out_proj."),
        (r"^cls\.predictions\.transform\.LayerNorm\.", "lm_head.layer_norm."),
        (r"^cls\.predictions\.transform\.", "lm_head."),
        (r"^cls\.predictions\.", "lm_head."),
        (r"^bert\.", "roberta."),
    ),
    ignored=(r"position_ids$", r"^roberta\.pooler\."),
    copies=(
        ("lm_head.decoder.weight", "bert.embeddings.word_embeddings.weight"),
        ("lm_head.decoder.bias", "cls.predictions.bias"),
    ),
)

ENCODERS = (
    ModelType(
        name="bert",
        reader=_bert,
        numerics=Usual(**BERT, padding=0),
        weights=Family(
            names=((r"^classify\.dense\.", "bert.pooler.dense."), (r"^classify\.out\.", "classifier.")),
            ignored=(r"position_ids$", r"^bert\.pooler\.", r"^cls\.seq_relationship\."),
            copies=(
                ("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
                ("cls.predictions.decoder.bias", "cls.predictions.bias"),
            ),
        ),
        same_keys=("ernie",),
    ),
    ModelType(
        name="roberta",
        reader=_roberta,
        numerics=Usual(**BERT, padding=1, first_position=-1),
        weights=ROBERTA_FILES,
        same_keys=(
            "camembert",
            "data2vec-text",
        ),
    ),
    ModelType(
        name="xlm-roberta", reader=_roberta, numerics=Usual(**BERT, padding=1, first_position=-1), weights=ROBERTA_FILES
    ),
    ModelType(
        name="t5", reader=_t5, numerics=Usual(eps_key="layer_norm_epsilon", rotary="", padded=False), weights=T5_FILES
    ),
    ModelType(
        name="mt5", reader=_mt5, numerics=Usual(eps_key="layer_norm_epsilon", rotary="", padded=False), weights=T5_FILES
    ),
    *(
        ModelType(name=name, reader=reader, numerics=None, weights=Family())
        for name, reader in (
            ("bart", _bart_like(trained=2, pre_norm=False, embedding_norm=True, scaled=False)),
            ("mbart", _bart_like(trained=2, pre_norm=True, embedding_norm=True, scaled=False)),
            ("marian", _bart_like(trained=None, pre_norm=False, embedding_norm=False, scaled=False)),
            ("m2m_100", _bart_like(trained=None, pre_norm=True, embedding_norm=False, scaled=True)),
            ("pegasus", _bart_like(trained=None, pre_norm=True, embedding_norm=False, scaled=False)),
        )
    ),
    ModelType(
        name="vit",
        reader=_vit,
        numerics=Usual(**BERT, padded=False),
        weights=Family(
            rules=(
                (r"patch_embeddings\.projection\.weight$", exactly),
                (r"cls_token$", led(1, 1)),
                (r"position_embeddings$", led(1)),
            ),
            ignored=(r"^vit\.pooler\.",),
        ),
    ),
)
"""Models that are no decoders alone."""
