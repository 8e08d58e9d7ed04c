"""NomicBERT: BERT with rope and a gated feed-forward network, without biases."""

from __future__ import annotations

from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.families.encoder import build_encoder, read_classifier, read_heads
from serve_llm.engine.model.families.encoder_names import build_weights
from serve_llm.engine.model.families.pooled import Read
from serve_llm.engine.model.families.rope import read_rope
from serve_llm.engine.model.rope_spec import RopeSpec
from serve_llm.engine.model.spec import MLPSpec, ModelSpec, NormSpec
from serve_llm.engine.model.weight_map import WeightMap

LAYER = {
    "attn.Wqkv": "attention.q attention.k attention.v",
    "attn.out_proj": "attention.output",
    "norm1": "attention_norm",
    "mlp.fc11": "ffn.up",
    "mlp.fc12": "ffn.gate",
    "mlp.fc2": "ffn.down",
    "norm2": "ffn_norm",
}
CLASSIFIER = {"nomic_bert.pooler.dense": "pooler.dense", "classifier": "pooler.classifier"}
PUBLISHED_NAMES = {  # transformers' name of a key -> the name in the model's own code
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "intermediate_size": "n_inner",
    "layer_norm_eps": "layer_norm_epsilon",
    "max_position_embeddings": "max_trained_positions",
}
SERVED_WHEN_OFF = (
    "causal prenorm parallel_block parallel_block_tied_norm qkv_proj_bias mlp_fc1_bias mlp_fc2_bias use_rms_norm "
    "rotary_emb_interleaved scale_attn_by_inverse_layer_idx"
).split()
UNUSED = (
    "attn_pdrop embd_pdrop resid_pdrop dense_seq_output fused_bias_fc fused_dropout_add_ln reorder_and_upcast_attn "
    "use_flash_attn use_xentropy pad_vocab_size_multiple last_layer_subset n_positions summary_activation "
    "summary_first_dropout summary_proj_to_labels summary_type summary_use_proj head_dim"
).split()


def read_nomic_bert(architecture: str) -> Read:
    """Reads transformers' config (NomicBertConfig) and that of the model's own code."""

    def read(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
        is_published = "n_embd" in config.keys
        if is_published:
            config = config.renamed(PUBLISHED_NAMES)
            config.only("activation_function", "swiglu")
            config.only("rotary_emb_fraction", 1.0, 1, None)
            config.only("scale_attn_weights", True, None)
            config.empty("rotary_emb_scale_base", "rotary_scaling_factor")
            config.refuse(*SERVED_WHEN_OFF)
        else:
            config.choice("hidden_act", {"silu": "silu"}, "silu")
        config.ignore(*UNUSED)
        _, _, head_dim = read_heads(config)
        length = config.integer("max_position_embeddings", 2048)
        if is_published:
            rope = RopeSpec(config.number("rotary_emb_base", 10_000.0))
        else:
            rope, length = read_rope(config, length, head_dim, default_base=1000.0)
        spec = build_encoder(
            config,
            architecture,
            max_position=length,
            ffn=MLPSpec(config.integer("intermediate_size"), "silu", gated=True),
            norm=NormSpec("layer", config.number("layer_norm_eps", 1e-12)),
            ropes=[rope] * config.layers("num_hidden_layers"),
            bias=False,
            token_types=config.integer("type_vocab_size", 2),
            pooler=read_classifier(config, architecture),
        )
        config.done()
        weights = build_weights(
            spec,
            LAYER,
            base="nomic_bert",
            layers="encoder.layers",
            embedding_parts={"embeddings.token_type_embeddings": "token_types", "emb_ln": "embedding_norm"},
            head="cls",
            pooler=CLASSIFIER,
        )
        return spec, weights

    return read
