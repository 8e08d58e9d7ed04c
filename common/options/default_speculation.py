"""Drafts without `--speculative-config`: prompt lookup, where it costs ordinary text next to nothing."""

from __future__ import annotations

from serve_llm.common.options.engine_schema import EngineOptions
from serve_llm.common.options.speculative import PROMPT_LOOKUP, SpeculativeConfig

# With more sequences, a step without drafts uses the processor well already, and a draft delays all of them.
MAX_SEQUENCES = 2
DEFAULT_SPECULATION = SpeculativeConfig(method=PROMPT_LOOKUP, disable_by_batch_size=MAX_SEQUENCES)
ON_MESSAGE = (
    "Prompt lookup is on: with at most %d requests at a time, a step also verifies tokens that followed an earlier "
    "occurrence of the latest ones; the output is the same. --speculative-config none turns it off"
)
OFF_MESSAGE = "Prompt lookup is off, because %s"
HOW_TO_TURN_ON = "; --speculative-config ngram turns it on"


def explain_default_off(
    options: EngineOptions, device: str, has_states: bool, executor_backend: str = "inprocess"
) -> str | None:
    """Return why the default verifies no drafts, or None if it does. has_states: the model has linear attention."""
    is_placed_by_ray = executor_backend == "ray" and options.tensor_parallel_size > 1
    reasons = {
        "its gain with linear attention has not been measured": has_states,
        "its gain on GPUs has not been measured": device != "cpu",
        "its gain over pipeline stages has not been measured": options.pipeline_parallel_size > 1,
        "its gain over several hosts has not been measured": options.nnodes > 1,
        "its gain over ranks that Ray places, perhaps on several hosts, has not been measured": is_placed_by_ray,
        "engines that share experts would wait for each other's drafts": options.experts_span_engines,
        "its gain in transformers' own code has not been measured": options.model_impl == "transformers",
    }
    reason = next((reason for reason, applies in reasons.items() if applies), None)
    return None if reason is None else reason + HOW_TO_TURN_ON
