"""Options of `vllm bench` that this program lacks, and what to do instead."""

from __future__ import annotations

from collections.abc import Sequence

from serve_llm.common.errors import OptionError
from serve_llm.common.options.peer_flag import PeerFlag, refused
from serve_llm.common.options.peer_flags import find_peer_flag
from serve_llm.common.options.sources import make_parser

_SAMPLING = "requests are greedy; --temperature changes that"
_DATASETS = "--dataset-name random, sharegpt or prefix-repetition"
_COUNTED = "not needed; lengths are those that the server's /tokenize and `usage` count"
_RAMP = "--request-rate is constant; run it once for each rate"

VLLM_BENCH: tuple[PeerFlag, ...] = (
    refused("--endpoint-type", "--backend openai or openai-chat"),
    refused("--tokenizer --tokenizer-mode --tokenizer-revision --trust-remote-code --skip-tokenizer-init", _COUNTED),
    refused("--ramp-up-strategy --ramp-up-start-rps --ramp-up-end-rps", _RAMP),
    refused("--save-detailed", "--save-result writes all figures, --plot FILE draws the times of all requests"),
    refused("--append-result", "--save-result writes a file for each run"),
    refused("--metadata --label", "--result-filename names the file of --save-result"),
    refused("--request-id-prefix --header --extra-body", "omit it; requests have no fields or headers besides ours"),
    refused("--insecure", "give the address of a server without TLS, or one whose certificate is valid"),
    refused("--ready-check-timeout-sec --skip-test-prompt", "omit it; `serve-llm chat` tries a server out"),
    refused("--profile --profiler-config", "omit it; attach a profiler to the server"),
    refused("--served-model-name", "--model NAME is the name of the model at a URL"),
    refused("--lora-modules --lora-assignment --lora-path", "--model NAME may be that of an adapter"),
    refused("--input-len", "--random-input-len"),
    refused("--output-len", "--random-output-len"),
    refused("--prefix-len", "--random-prefix-len"),
    refused(
        "--top-p --top-k --min-p --frequency-penalty --presence-penalty --repetition-penalty --use-beam-search",
        _SAMPLING,
    ),
    refused("--logprobs -n --n", "omit it; each request has one answer without logprobs"),
    refused("--plot-timeline --timeline-itl-thresholds --plot-dataset-stats", "--plot FILE"),
    refused("--no-stream", "omit it; answers are streamed, or there would be no time to the first token"),
    refused("--no-oversample --disable-shuffle --skip-chat-template", "omit it; prompts are used in their order"),
    refused(
        "--sonnet-input-len --sonnet-output-len --sonnet-prefix-len --custom-output-len --custom-skip-chat-template "
        "--hf-name --hf-split --hf-subset --hf-output-len --spec-bench-output-len --spec-bench-category "
        "--blazedit-min-distance --blazedit-max-distance --random-batch-size --random-mm-base-items-per-request "
        "--random-mm-num-mm-items-range-ratio --random-mm-limit-mm-per-prompt --random-mm-bucket-config --dataset",
        _DATASETS,
    ),
    refused("--num-iters-cold --num-iters-warm", "--num-iters N starts the server N times"),
    refused("--async-engine --disable-detokenize --disable-frontend-multiprocessing --hf-max-batch-size", "omit it"),
)


def refuse_peer_options(arguments: Sequence[str], starts_server: bool) -> None:
    """Raise OptionError for the first argument that is an option of `vllm bench`.

    arguments: without the benchmark's own options. starts_server: whether the server's options are allowed.
    """
    known = make_parser()._option_string_actions if starts_server else {}
    for argument in arguments:
        name = argument.partition("=")[0]
        flag = next((flag for flag in VLLM_BENCH if name in flag.names), None)
        if flag is None or name in known or (starts_server and find_peer_flag(name) is not None):
            continue
        raise OptionError(f"{name} is an option of vLLM's bench: {flag.answer}")
