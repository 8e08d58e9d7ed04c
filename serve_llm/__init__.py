"""serve-llm: an OpenAI-compatible serving daemon for large language models, and the same engine as a library.

    from serve_llm import LLM, SamplingParams

    llm = LLM("demo")
    outputs = llm.generate(["def main():\\n"], SamplingParams(temperature=0, max_tokens=32))
    print(outputs[0].outputs[0].text)

Names are loaded when they are first used, so that importing the package costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from serve_llm.llm import LLM
    from serve_llm.server.adapters.offline import LoRARequest
    from serve_llm.server.response.outputs import CompletionOutput, Logprob, PoolingRequestOutput, RequestOutput
    from serve_llm.server.sampling_params import SamplingParams
    from serve_llm.server.structured_output.params import StructuredOutputs

__all__ = [
    "LLM",
    "CompletionOutput",
    "LoRARequest",
    "Logprob",
    "PoolingRequestOutput",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
]

_STREAMS = "for streams, run the server and call it with any client of OpenAI's API; LLM also runs in threads"
# What takes the place of classes that programs import from vllm.
_REPLACED = {
    "AsyncEngineArgs": "LLM takes the options as keywords",
    "AsyncLLM": _STREAMS,
    "AsyncLLMEngine": _STREAMS,
    "BeamSearchParams": "there is no beam search; n with a temperature gives several texts",
    "EngineArgs": "LLM takes the options as keywords",
    "GuidedDecodingParams": "use StructuredOutputs",
    "LLMEngine": "use LLM",
    "PoolingParams": "embed, classify and score take its fields as keywords",
    "StructuredOutputsParams": "use StructuredOutputs",
    "TextPrompt": "use a string, or a dict {'prompt': ...}",
    "TokensPrompt": "use a list of ids, or a dict {'prompt_token_ids': ...}",
}


def __getattr__(name: str) -> object:
    if name in _REPLACED:  # `from serve_llm import ...` would hide the text of an AttributeError
        raise ImportError(f"serve_llm has no {name}: {_REPLACED[name]}")
    if name == "__version__":
        from importlib.metadata import version

        return version("serve-llm")
    if name == "SamplingParams":
        from serve_llm.server.sampling_params import SamplingParams

        return SamplingParams
    if name == "StructuredOutputs":
        from serve_llm.server.structured_output.params import StructuredOutputs

        return StructuredOutputs
    if name == "LoRARequest":
        from serve_llm.server.adapters.offline import LoRARequest

        return LoRARequest
    if name in __all__:
        from serve_llm import llm

        return getattr(llm, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
