"""gpt-oss (GptOssForCausalLM, arXiv:2508.10925): attention sinks, windows in every other layer, clamped experts."""

from __future__ import annotations

from dataclasses import replace

from serve_llm.common.errors import ModelError
from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.families.decoder import map_attention, read_decoder, read_local_windows
from serve_llm.engine.model.families.experts import IN_TRAINING, read_router, with_experts
from serve_llm.engine.model.families.names import ATTENTION, PRE_NORMS, weights
from serve_llm.engine.model.spec import MLPSpec, ModelSpec, MoESpec, NormSpec
from serve_llm.engine.model.weight_map import Transform, WeightMap, WeightRule

ALPHA, LIMIT = 1.702, 7.0  # constants of the activation, as in kernels.activation
# In checkpoints whose experts are modules: unsloth's, and llm-compressor's.
OTHER_WORDS = ((".mlp.router.linear.", ".mlp.router."), (".mlp.experts.experts.", ".mlp.experts."))


def read(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
    """Defaults of absent keys are transformers' own (GptOssConfig)."""
    for key, known in (("swiglu_limit", LIMIT), ("swiglu_alpha", ALPHA)):
        if config.number(key, known) != known:
            raise ModelError(f"config.json: {key} other than {known} is not supported")
    config.choice("hidden_act", {"silu": "silu"}, "silu")  # the file says silu, but the activation is a different one
    bias = config.flag("attention_bias", True)
    width = config.integer("intermediate_size", 2880)
    plain = read_decoder(
        config,
        "GptOssForCausalLM",
        default_kv_heads=8,
        default_max_position=131072,
        default_head_dim=64,
        default_rope_base=150000.0,
        norm=NormSpec("rms", config.number("rms_norm_eps", 1e-5)),
        windows=read_local_windows(config, 2, default_window=128),
        ffn=MLPSpec(width, "swigluoai", gated=True, bias=True),
        qkv_bias=bias,
        output_bias=bias,
    )
    if config.inner("rope_scaling") is None and config.inner("rope_parameters") is None:
        raise ModelError("config.json: rope_scaling is missing")  # without it, transformers uses its own defaults
    plain = map_attention(plain, lambda index, attention: replace(attention, sinks=True))
    router = read_router(config, config.integer("num_local_experts", 128, highest=10_000), 4)
    spec = with_experts(plain, replace(router, bias=True))
    config.ignore(*IN_TRAINING)
    config.ignore("experts_per_token", "initial_context_length")  # in published files; transformers does not read them
    is_mxfp4 = _is_mxfp4(config)
    config.done()
    named = replace(weights(spec, PRE_NORMS | ATTENTION), stacks=tuple(_list_modules(spec)), other_words=OTHER_WORDS)
    return spec, replace(named, rules=(*named.rules, *_rows(spec, is_mxfp4)))


def _is_mxfp4(config: ConfigReader) -> bool:
    """Whether the experts' weights are stored as MXFP4. In other formats they are unquantised or 8-bit floats."""
    stored = config.inner("quantization_config")
    if stored is None or stored.text("quant_method") != "mxfp4":
        return False
    stored.ignore("modules_to_not_convert")  # all but the experts
    stored.done()
    return True


def _rows(spec: ModelSpec, is_mxfp4: bool) -> list[WeightRule]:
    """Rules that only this family needs. Experts are stored in stacks, with alternating rows of gate and up."""
    ffn = spec.layers[0].ffn
    assert isinstance(ffn, MoESpec)
    count = ffn.router.num_experts
    width = ffn.expert.intermediate_size

    def row(
        source: str, products: tuple[str, ...], kind: str, transform: Transform = "none", scales: str = ""
    ) -> WeightRule:
        stack = f"model.layers.{{layer}}.mlp.experts.{source}"
        return WeightRule(
            stack,
            tuple(f"layers.{{layer}}.ffn.experts.{{member}}.{product}.{kind}" for product in products),
            transform,
            sizes=(width,) * len(products) if len(products) > 1 else (),
            groups=width if len(products) > 1 else 1,
            members=count,
            scales=scales and stack.replace("_blocks", scales),
        )

    rules = [WeightRule("model.layers.{layer}.self_attn.sinks", ("layers.{layer}.attention.sinks",))]
    for kind in ("weight", "bias"):
        parameter = f"layers.{{layer}}.ffn.router.{kind}"
        rules.append(WeightRule(f"model.layers.{{layer}}.mlp.router.{kind}", (parameter,)))
    for source, products in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
        rules.append(row(f"{source}_bias", products, "bias"))
        if is_mxfp4:
            rules.append(row(f"{source}_blocks", products, "weight", scales="_scales"))
        else:
            rules.append(row(source, products, "weight", "transpose"))
    return rules


def _list_modules(spec: ModelSpec) -> list[WeightRule]:
    """Rules for experts that are quantised as modules: unsloth joins gate and up of an expert, llm-compressor does
    not."""
    ffn = spec.layers[0].ffn
    assert isinstance(ffn, MoESpec)
    width = ffn.expert.intermediate_size
    sources = {
        "gate_up_projs.{member}": ("gate", "up"),
        "down_projs.{member}": ("down",),
        **{f"{{member}}.{product}_proj": (product,) for product in ("gate", "up", "down")},
    }
    return [
        WeightRule(
            f"model.layers.{{layer}}.mlp.experts.{source}.{kind}",
            tuple(f"layers.{{layer}}.ffn.experts.{{member}}.{product}.{kind}" for product in products),
            sizes=(width,) * len(products) if len(products) > 1 else (),
            groups=width if len(products) > 1 else 1,
            members=ffn.router.num_experts,
        )
        for source, products in sources.items()
        for kind in ("weight", "bias")
    ]
