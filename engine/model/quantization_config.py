"""Read `quantization_config` of config.json, by `quant_method`. Torch-free.

Reading is strict: every key is used, listed as ignored, or refused by name.
"""

from __future__ import annotations

from collections.abc import Callable

from serve_llm.common.options.parsers import OTHER_METHODS
from serve_llm.engine.model.awq_gptq_config import read_autoround, read_awq, read_gptq
from serve_llm.engine.model.compressed_tensors_config import Int8Checkpoint, read_compressed_tensors
from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.float_config import read_bitsandbytes, read_fbgemm, read_fp8, read_modelopt
from serve_llm.engine.model.gguf_config import GGUFTensors, read_gguf_config
from serve_llm.engine.model.quark_config import read_quark
from serve_llm.engine.model.torchao_config import read_torchao
from serve_llm.engine.model.weight_format import QuantizedModules

_READERS: dict[str, Callable[[ConfigReader], Int8Checkpoint | GGUFTensors | QuantizedModules]] = {
    "auto-round": read_autoround,
    "awq": read_awq,
    "bitsandbytes": read_bitsandbytes,
    "compressed-tensors": read_compressed_tensors,
    "fbgemm_fp8": read_fbgemm,
    "fp8": read_fp8,
    "gguf": read_gguf_config,
    "gptq": read_gptq,
    "modelopt": read_modelopt,
    "quark": read_quark,
    "torchao": read_torchao,
}


def read_quantization_config(config: ConfigReader) -> Int8Checkpoint | GGUFTensors | QuantizedModules:
    """Raises ModelError for anything that is not supported, and OptionError as `ConfigReader.done` does."""
    methods = {name: name for name in _READERS} | OTHER_METHODS
    method = config.choice("quant_method", methods, "bitsandbytes" if _loads_bitsandbytes(config) else "")
    result = _READERS[method](config)
    config.done()
    return result


def _loads_bitsandbytes(config: ConfigReader) -> bool:
    """Whether the settings are those of bitsandbytes, which transformers wrote without `quant_method` until 4.33."""
    return config.flag("load_in_4bit", False) or config.flag("load_in_8bit", False)
