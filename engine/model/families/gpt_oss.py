"""gpt-oss (GptOssForCausalLM, arXiv:2508.10925): attention sinks, windows in every other layer, clamped experts."""

from __future__ import annotations

from dataclasses import replace

from serve_llm.engine.errors import ModelError
from serve_llm.engine.model.config import Config
from serve_llm.engine.model.families.decoder import read_decoder, read_local_windows
from serve_llm.engine.model.families.experts import IN_TRAINING, read_router, with_experts
from serve_llm.engine.model.families.names import ATTENTION, PRE_NORMS, weights
from serve_llm.engine.model.spec import Dense, ModelSpec, MoE, Norm
from serve_llm.engine.model.weight_map import Row, Transform, WeightMap

ALPHA, LIMIT = 1.702, 7.0  # of the activation, as kernels.activation has them


def read(config: Config) -> tuple[ModelSpec, WeightMap]:
    """Defaults of absent keys are transformers' own (GptOssConfig)."""
    for key, known in (("swiglu_limit", LIMIT), ("swiglu_alpha", ALPHA)):
        if config.number(key, known) != known:
            raise ModelError(f"config.json: {key} other than {known} is not supported")
    config.choice("hidden_act", {"silu": "silu"}, "silu")  # the file's name for the activation that it is not
    bias = config.flag("attention_bias", True)
    width = config.integer("intermediate_size", 2880)
    plain = read_decoder(
        config,
        "GptOssForCausalLM",
        default_kv_heads=8,
        default_max_position=131072,
        default_head_dim=64,
        default_rope_base=150000.0,
        norm=Norm("rms", config.number("rms_norm_eps", 1e-5)),
        windows=read_local_windows(config, 2, default_window=128),
        ffn=Dense(width, "swigluoai", gated=True, bias=True),
        qkv_bias=bias,
        output_bias=bias,
    )
    if config.inner("rope_scaling") is None and config.inner("rope_parameters") is None:
        raise ModelError("config.json: rope_scaling is missing")  # for which transformers has other defaults than none
    layers = (replace(layer, mixer=replace(layer.attention, sinks=True)) for layer in plain.layers)
    router = read_router(config, config.integer("num_local_experts", 128, highest=10_000), 4)
    spec = with_experts(replace(plain, layers=tuple(layers)), replace(router, bias=True))
    config.ignore(*IN_TRAINING)
    config.ignore(
        "experts_per_token", "initial_context_length"
    )  # of the published ones; transformers does not read them
    is_mxfp4 = _is_mxfp4(config)
    config.done()
    named = weights(spec, PRE_NORMS | ATTENTION)
    return spec, replace(named, rows=(*named.rows, *_rows(spec, is_mxfp4)))


def _is_mxfp4(config: Config) -> bool:
    """Whether the weights of experts are stored so."""
    stored = config.inner("quantization_config")
    if stored is None:
        return False
    stored.choice("quant_method", {"mxfp4": "mxfp4"}, "")
    stored.ignore("modules_to_not_convert")  # all but the experts
    stored.done()
    return True


def _rows(spec: ModelSpec, is_mxfp4: bool) -> list[Row]:
    """What is named unlike in other families. Experts lie in stacks, the rows of gate and up in turns."""
    ffn = spec.layers[0].ffn
    assert isinstance(ffn, MoE)
    count, width = ffn.router.num_experts, ffn.expert.width

    def row(source: str, products: tuple[str, ...], kind: str, transform: Transform = "none", scales: str = "") -> Row:
        stack = f"model.layers.{{layer}}.mlp.experts.{source}"
        return Row(
            stack,
            tuple(f"layers.{{layer}}.ffn.experts.{{member}}.{product}.{kind}" for product in products),
            transform,
            sizes=(width,) * len(products) if len(products) > 1 else (),
            groups=width if len(products) > 1 else 1,
            members=count,
            scales=scales and stack.replace("_blocks", scales),
        )

    found = [
        Row("model.layers.{layer}.self_attn.sinks", ("layers.{layer}.attention.sinks",)),
        *(
            Row(f"model.layers.{{layer}}.mlp.router.{kind}", (f"layers.{{layer}}.ffn.router.{kind}",))
            for kind in ("weight", "bias")
        ),
    ]
    for source, products in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
        found.append(row(f"{source}_bias", products, "bias"))
        if is_mxfp4:
            found.append(row(f"{source}_blocks", products, "weight", scales="_scales"))
        else:
            found.append(row(source, products, "weight", "transpose"))
    return found
