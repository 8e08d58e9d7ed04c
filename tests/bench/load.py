"""Generate load for any server with an OpenAI-compatible /v1/completions and report its speed.

Run: PYTHONPATH=tests python -m bench.load --url http://127.0.0.1:8000 --workload W2 [--rate 0.7] [--ids 300:31000]

Closed loop (each stream sends its next request when the last one is answered) or, with --rate, Poisson arrivals.
Prompts are token ids, the end-of-sequence token is ignored, and token counts come from the server's own usage. The
generator shares the cores with the server, so it does little (serve_llm.cli.bench.client, which `serve-llm bench` uses
too), and the result includes its own CPU use as a share of one core. Prints one readable line, then one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import re
import resource
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import uvloop

from bench.workloads import WORKLOADS, Workload, percentile, poisson_arrivals
from serve_llm.cli.bench.client import StreamClient, TimedReply

IDS = range(300, 31000)
GREEDY: Mapping[str, object] = {"temperature": 0}


def single_words(tokenizer: Path) -> dict[int, str]:
    """Return tokens that are a space and a lower-case word, by id: any sequence of them has as many tokens as words.

    tokenizer: a tokenizer.json with a byte-level vocabulary, in which a leading space is written as "Ġ".
    """
    vocabulary = json.loads(tokenizer.read_text(encoding="utf-8"))["model"]["vocab"]
    return {token_id: f" {word[1:]}" for word, token_id in vocabulary.items() if re.fullmatch("\u0120[a-z]{3,}", word)}


class Target:
    """A server by its URL. words: the text of each id, for a server that does not accept ids."""

    def __init__(self, url: str, model: str | None, words: Mapping[int, str] | None = None) -> None:
        self._client = StreamClient(url)
        self._model, self._words = model, words

    async def complete(
        self, prompt: Sequence[int], output_tokens: int, sampling: Mapping[str, object] = GREEDY
    ) -> TimedReply:
        asked: dict[str, object] = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **sampling,
        }
        if self._words is None:
            asked["ignore_eos"] = True
        else:  # such a server refuses fields that are not OpenAI's, so the model itself must not stop early
            asked["prompt"] = "".join(self._words[token_id] for token_id in prompt)
        return await self._client.send("/v1/completions", asked)


@dataclass(frozen=True)
class Result:
    """One workload on one server. Times are in seconds unless the name says otherwise."""

    seconds: float
    requests: int
    output_tokens: int
    short: int  # requests with fewer output tokens than requested
    errors: int
    first_error: str | None
    tokens_per_second: float
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    client_cores: float  # CPU share of this generator


def summarise(replies: Sequence[TimedReply], seconds: float, wanted: int, client_seconds: float) -> Result:
    """Summarise the replies. wanted: output tokens of each request. Failed requests count only as errors."""
    good = [reply for reply in replies if reply.error is None and reply.times]
    counts = [reply.usage.completion_tokens if reply.usage else len(reply.times) for reply in good]
    first = [reply.times[0] - reply.began for reply in good]
    between = [b - a for reply in good for a, b in itertools.pairwise(reply.times)]
    errors = [reply.error or "a reply without tokens" for reply in replies if reply not in good]
    return Result(
        seconds=seconds,
        requests=len(good),
        output_tokens=sum(counts),
        short=sum(count < wanted for count in counts),
        errors=len(errors),
        first_error=errors[0] if errors else None,
        tokens_per_second=sum(counts) / seconds,
        ttft_p50=percentile(first, 0.5),
        ttft_p99=percentile(first, 0.99),
        itl_p50=percentile(between, 0.5),
        itl_p99=percentile(between, 0.99),
        client_cores=client_seconds / seconds,
    )


def sampling_of_texts(workload: Workload, turn: int) -> dict[str, object]:
    """Return fields that make all servers sample alike, and let no draft or prefix come from another turn's texts."""
    alike = {"temperature": workload.temperature, "top_p": 1, "top_k": 0, "min_p": 0, "seed": turn}
    return alike | {"cache_salt": f"{workload.name} {turn}"}


async def drive(target: Target, workload: Workload, turn: int, ids: Sequence[int], rate: float | None = None) -> Result:
    """Send all requests. rate: arrivals per second; None: closed loop. A shared prefix is sent first, uncounted."""
    if workload.shared_tokens:
        await target.complete([*workload.shared(ids), ids[turn % len(ids)]], 1)
    prompts = workload.prompts(turn, ids)
    sampling = sampling_of_texts(workload, turn) if workload.texts else GREEDY
    used, began = _cpu_seconds(), time.perf_counter()
    if rate is None:
        waiting = iter(prompts)
        replies: list[TimedReply] = []

        async def stream() -> None:
            for prompt in waiting:
                replies.append(await target.complete(prompt, workload.output_tokens, sampling))

        await asyncio.gather(*(stream() for _ in range(workload.streams)))
    else:

        async def arrive(prompt: list[int], after: float) -> TimedReply:
            await asyncio.sleep(began + after - time.perf_counter())
            return await target.complete(prompt, workload.output_tokens, sampling)

        arrivals = poisson_arrivals(rate, len(prompts), turn)
        replies = await asyncio.gather(*map(arrive, prompts, arrivals))
    seconds = time.perf_counter() - began
    return summarise(replies, seconds, workload.output_tokens, _cpu_seconds() - used)


def run(
    url: str,
    workload: Workload,
    turn: int,
    ids: Sequence[int] = IDS,
    rate: float | None = None,
    words: Mapping[int, str] | None = None,
) -> Result:
    """Drive a server with one model (the first that it lists)."""
    return uvloop.run(drive(Target(url, model_name(url), words), workload, turn, ids, rate))


def model_name(url: str) -> str | None:
    """Return the first model that the server lists; None if it lists none, in which case it accepts any name."""
    with urllib.request.urlopen(url + "/v1/models", timeout=10) as answer:
        models = json.load(answer)["data"]
    return str(models[0]["id"]) if models else None


def line(result: Result) -> str:
    """Format the result as one readable line."""
    return (
        f"{result.tokens_per_second:8.1f} output tokens/s   first token {1e3 * result.ttft_p50:6.0f} ms "
        f"(p99 {1e3 * result.ttft_p99:6.0f})   between tokens {1e3 * result.itl_p50:5.1f} ms "
        f"(p99 {1e3 * result.itl_p99:6.1f})   client {result.client_cores:.1%} of a core"
        + (f"   {result.short} replies too short" if result.short else "")
        + (f"   {result.errors} errors: {result.first_error}" if result.errors else "")
    )


def id_range(text: str) -> range:
    """Parse --ids: FIRST:LAST, the last one excluded."""
    first, colon, last = text.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise argparse.ArgumentTypeError(f"{text!r} is not FIRST:LAST with FIRST below LAST, such as 300:31000")
    return range(int(first), int(last))


def positive(text: str) -> float:
    """Parse a number above 0."""
    if not 0 < (number := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="W1")
    parser.add_argument("--rate", type=positive, help="requests per second, at random times; default: closed loop")
    parser.add_argument("--ids", type=id_range, default=IDS, help="token ids of prompts: FIRST:LAST (300:31000)")
    parser.add_argument("--turn", type=int, default=0, help="a different number gives different prompts")
    given = parser.parse_args()
    result = run(given.url.rstrip("/"), WORKLOADS[given.workload], given.turn, given.ids, given.rate)
    print(f"{given.workload} {line(result)}")
    print(json.dumps(msgspec.to_builtins(result)))
    return 1 if result.errors else 0


if __name__ == "__main__":
    sys.exit(main())
