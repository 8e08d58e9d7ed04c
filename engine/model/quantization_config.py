"""Read `quantization_config` of config.json, by `quant_method`. Torch-free.

Reading is strict: every key is used, listed as ignored, or refused by name.
"""

from __future__ import annotations

from serve_llm.common.options.parsers import OTHER_METHODS
from serve_llm.engine.model.awq_gptq_config import read_autoround, read_awq, read_gptq
from serve_llm.engine.model.compressed_tensors_config import Int8Checkpoint, read_compressed_tensors
from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.float_config import read_bitsandbytes, read_fbgemm, read_fp8, read_modelopt
from serve_llm.engine.model.gguf_config import GGUFTensors, read_gguf_config
from serve_llm.engine.model.torchao_config import read_torchao
from serve_llm.engine.model.weight_format import QuantizedModules


def read_quantization_config(config: ConfigReader) -> Int8Checkpoint | GGUFTensors | QuantizedModules:
    """Raises ModelError for anything that is not supported, and OptionError as `ConfigReader.done` does."""
    names = "auto-round awq bitsandbytes compressed-tensors fbgemm_fp8 fp8 gguf gptq modelopt torchao".split()
    methods = {name: name for name in names} | OTHER_METHODS
    method = config.choice("quant_method", methods, "bitsandbytes" if _loads_bitsandbytes(config) else "")
    result: Int8Checkpoint | GGUFTensors | QuantizedModules
    if method == "awq":
        result = read_awq(config)
    elif method == "gptq":
        result = read_gptq(config)
    elif method == "auto-round":
        result = read_autoround(config)
    elif method == "gguf":
        result = read_gguf_config(config)
    elif method == "compressed-tensors":
        result = read_compressed_tensors(config)
    elif method == "fbgemm_fp8":
        result = read_fbgemm(config)
    elif method == "modelopt":
        result = read_modelopt(config)
    elif method == "torchao":
        result = read_torchao(config)
    elif method == "bitsandbytes":
        result = read_bitsandbytes(config)
    else:
        result = read_fp8(config)
    config.done()
    return result


def _loads_bitsandbytes(config: ConfigReader) -> bool:
    """Whether the settings are those of bitsandbytes, which transformers wrote without `quant_method` until 4.33."""
    return config.flag("load_in_4bit", False) or config.flag("load_in_8bit", False)
