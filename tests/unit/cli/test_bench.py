"""serve-llm bench: prompts, arrivals, figures and tables, against a scripted server."""

import itertools
import json
import math
import random
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from bench.workloads import WORKLOADS
from serve_llm.cli.api_client import ApiClient
from serve_llm.cli.bench import chart, command, datasets, goodput, peer_options, report, serve, start, workloads
from serve_llm.cli.bench.client import StreamUsage, TimedReply
from serve_llm.common.errors import OptionError
from support.scripted_api import ScriptedApi, serve_script

SVG = "{http://www.w3.org/2000/svg}"
STRINGS = [f"\u0120{word}" for word in datasets.WORDS[:40]]


def words(seed: int = 0) -> datasets.WordSource:
    return datasets.WordSource(["a", "b", "c"], is_exact=True, seed=seed)


def test_words_are_those_that_are_one_token() -> None:
    with serve_script([(200, {"token_strs": STRINGS})]) as api:
        found = datasets.find_words(ApiClient(api.url), "m", 0)
    assert found.is_exact and found.words == datasets.WORDS[:40]
    assert api.bodies[0]["prompt"].split() == datasets.WORDS
    for answer in ((404, {}), (200, {"token_strs": STRINGS[:3]}), (200, [])):
        with serve_script([answer]) as api:
            assert not datasets.find_words(ApiClient(api.url), "m", 0).is_exact


def test_random_prompts() -> None:
    requests = datasets.make_random(words(), 50, 20, 10, 0.5, 4)
    lengths = {len(request.prompt.split()) for request in requests}
    assert min(lengths) >= 14 and max(lengths) <= 34 and len(lengths) > 5
    assert all(5 <= request.output_tokens <= 15 for request in requests)
    assert len({tuple(request.prompt.split()[:4]) for request in requests}) == 1
    assert requests == datasets.make_random(words(), 50, 20, 10, 0.5, 4)
    assert requests != datasets.make_random(words(1), 50, 20, 10, 0.5, 4)
    assert {request.output_tokens for request in datasets.make_random(words(), 5, 20, 10, 0, 0)} == {10}


def test_prefix_repetition() -> None:
    requests = datasets.make_prefix_repetition(words(), 12, 30, 5, 3, 7)
    prefixes = [tuple(request.prompt.split()[:30]) for request in requests]
    assert all(prefixes.count(prefix) == 4 for prefix in prefixes)
    assert {len(request.prompt.split()) for request in requests} == {35}


def test_conversations(tmp_path: Path) -> None:
    records = [
        {"conversations": [{"from": "human", "value": "Q1"}, {"from": "gpt", "value": "one two three"}]},
        {"messages": [{"role": "user", "content": "Q2"}, {"role": "assistant", "content": "one"}]},
        {"conversations": [{"value": "no answer"}]},
        "nonsense",
    ]
    expected = {("Q1", 3), ("Q2", 1)}
    for text in (json.dumps(records), "\n".join(json.dumps(record) for record in records)):
        (tmp_path / "data").write_text(text)
        found = datasets.read_conversations(str(tmp_path / "data"), 5, None, 0, lambda text: len(text.split()))
        assert len(found) == 5 and set(found) == expected
    found = datasets.read_conversations(str(tmp_path / "data"), 2, 9, 0, len)
    assert {request.output_tokens for request in found} == {9}
    for text in ("[]", "{", "[1"):
        (tmp_path / "data").write_text(text)
        with pytest.raises(OptionError, match="--dataset-path"):
            datasets.read_conversations(str(tmp_path / "data"), 1, None, 0, len)


def test_arrivals() -> None:
    assert serve.make_arrivals(3, math.inf, 1.0, 0) == [0.0] * 3
    times = serve.make_arrivals(4000, 10.0, 1.0, 0)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert times[0] == 0 and times[-1] == pytest.approx(400, rel=0.1)
    assert report.find_percentile(gaps, 50) == pytest.approx(math.log(2) / 10, rel=0.1), "exponential"
    even = serve.make_arrivals(100, 10.0, 1e6, 0)
    assert even[-1] == pytest.approx(9.9, rel=0.01)


def test_figures_of_a_known_course_of_events() -> None:
    replies = [
        TimedReply(0.0, 4.0, [1.0, 2.0, 4.0], StreamUsage(4, 3)),
        TimedReply(1.0, 5.0, [4.0, 5.0], StreamUsage(4, 2)),
        TimedReply(1.0, 2.0, error="gone"),
    ]
    result = report.summarize_replies(replies, 5.0, [99.0])
    assert (result["completed"], result["failed"], result["first_error"]) == (2, 1, "gone")
    assert (result["total_input_tokens"], result["total_output_tokens"], result["output_throughput"]) == (8, 5, 1.0)
    assert (result["mean_ttft_ms"], result["median_ttft_ms"]) == (2000.0, 2000.0)
    assert result["p99_ttft_ms"] == pytest.approx(2980.0)
    assert result["mean_tpot_ms"] == pytest.approx((1500 + 1000) / 2)
    assert result["median_itl_ms"] == 1000.0 and result["mean_e2el_ms"] == 4000.0
    empty = report.summarize_replies([], 1.0, [99.0])
    assert empty["completed"] == 0 and empty["p99_itl_ms"] == 0.0


def run(api: ScriptedApi, *arguments: str) -> int:
    return command.main(["serve", api.url, "--num-prompts", "3", "--random-input-len", "4", *arguments], {})


def answers(count: int) -> list[Any]:
    """Return the answer to /tokenize, then to each request."""
    pieces = [{"content": ""}, {"content": "a"}, {"content": "b"}]
    return [(200, {"token_strs": STRINGS}), *[pieces] * count]


def test_a_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plot = tmp_path / "plots" / "r.svg"
    with serve_script(answers(5)) as api:
        arguments = ["--backend", "openai-chat", "--num-warmups", "2", "--random-output-len", "2", "--api-key", "k"]
        saved = ["--save-result", "--result-dir", str(tmp_path / "new"), "--result-filename", "r.json"]
        assert run(api, *arguments, *saved, "--metric-percentiles", "50,99.9", "--plot", str(plot)) == 0
    sent = [body for body in api.bodies if "messages" in body]
    assert len(sent) == 5 and all(body["max_tokens"] == 2 and body["ignore_eos"] for body in sent)
    assert all(len(body["messages"][0]["content"].split()) == 4 and body["temperature"] == 0 for body in sent)
    table = capsys.readouterr().out
    assert "Successful requests:                   3\n" in table and "P99.9 E2EL (ms):" in table
    assert "-- Time per Output Token (excl. 1st token) --" in table
    result = json.loads((tmp_path / "new" / "r.json").read_text())
    assert (result["completed"], result["model_id"], result["request_rate"]) == (3, "scripted", "inf")
    assert result["total_output_tokens"] == 6, "the event without text is no token"
    headings = [text.text for text in ElementTree.parse(plot).iter(f"{SVG}text") if text.get("class") == "heading"]
    assert headings == ["scripted, random", *report.TITLES.values(), "Output tokens", "Requests"]


def test_the_server_by_host_and_port(capsys: pytest.CaptureFixture[str]) -> None:
    with serve_script(answers(3)) as api:
        host, port = api.url.removeprefix("http://").split(":")
        arguments = ["--backend", "openai-chat", "--dataset-name", "prefix_repetition"]
        lengths = ["--prefix-repetition-prefix-len", "3", "--prefix-repetition-suffix-len", "2"]
        place = ["--host", host, "--port", port]
        assert command.main(["serve", *place, "--num-prompts", "3", *arguments, *lengths], {}) == 0
    sent = [body for body in api.bodies if "messages" in body]
    assert len(sent) == 3 and all(len(body["messages"][0]["content"].split()) == 5 for body in sent)
    parse = serve.create_parser().parse_args
    usual = "http://127.0.0.1:8000"
    assert serve.find_target(usual, parse([])) == usual
    assert serve.find_target(usual, parse(["--port", "9"])) == "http://127.0.0.1:9"
    assert serve.find_target(usual, parse(["--host", "fd00::1"])) == "http://[fd00::1]:8000"


def test_goodput(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    replies = [
        TimedReply(0.0, 4.0, [1.0, 2.0, 4.0], StreamUsage(4, 3)),
        TimedReply(1.0, 2.0, [2.0], StreamUsage(4, 1)),
    ]
    for words_, met in (
        (["ttft:1000"], 2),
        (["ttft:1000", "e2el:3999"], 1),
        (["tpot:1499"], 1),
        (["ttft:999"], 0),
    ):
        assert goodput.count_met(replies, goodput.parse_objectives(words_)) == met
    with serve_script(answers(3)) as api:
        saved = ["--save-result", "--result-dir", str(tmp_path), "--result-filename", "r.json"]
        assert run(api, "--backend", "openai-chat", *saved, "--goodput", "ttft:60000", "tpot:60000") == 0
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["request_goodput"] == result["request_throughput"] > 0
    assert "Request goodput (req/s):" in capsys.readouterr().out


def test_plots_of_a_known_course_of_events() -> None:
    replies = [
        TimedReply(10.0, 14.0, [11.0, 14.0], StreamUsage(4, 4)),
        TimedReply(11.0, 12.0, error="gone"),
    ]
    first_token, rate, requests = serve.make_charts(replies, 6.0, ["ttft"])
    assert list(first_token.points) == [(1000.0, 0.0), (1000.0, 100.0)]
    assert {x: y for x, y in rate.points if y} == pytest.approx({1.05: 20.0, 4.05: 20.0}), "two tokens in 0.1 s"
    steps = [(0, 0), (0, 0), (0, 1), (1, 1), (1, 2), (2, 2), (2, 1), (4, 1), (4, 0)]
    assert list(requests.points) == steps


@pytest.mark.parametrize(
    ("highest", "ticks"),
    [
        (0, [0, 1]),
        (6, [0, 1, 2, 3, 4, 5, 6]),
        (0.13, [0, 0.05, 0.1, 0.15]),
        (1000, [0, 200, 400, 600, 800, 1000]),
        (7, [0, 2, 4, 6, 8]),
    ],
)
def test_axes_have_round_numbers(highest: float, ticks: list[float]) -> None:
    assert list(chart.find_ticks(highest)) == pytest.approx(ticks)


def test_a_drawing_is_within_its_axes_and_escaped(tmp_path: Path) -> None:
    line = chart.Chart("<b>", "s", "%", [(0.0, 0.0), (5.0, 50.0), (10.0, 100.0)])
    chart.write_charts(tmp_path / "a.svg", "a & b", [line, chart.Chart("none", "s", "%", [])])
    root = ElementTree.parse(tmp_path / "a.svg").getroot()
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"a & b", "<b>", "nothing measured"} <= set(texts)
    (drawn,) = (path.get("d") for path in root.iter(f"{SVG}path") if path.get("class") == "line")
    left, right, top, bottom = 64, 460 - 28, 48, 280 - 44
    middle = f"{(left + right) / 2:.1f} {(top + bottom) / 2:.1f}"
    assert drawn == f"M{left}.0 {bottom}.0L{middle}L{right}.0 {top}.0"
    with pytest.raises(OptionError, match="cannot be written: Is a directory"):
        chart.write_charts(tmp_path, "a", [line])


def test_a_failed_request_is_counted_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    refused = (400, {"error": {"message": "no"}})
    with serve_script([(404, {}), refused, refused, refused]) as api:
        assert run(api, "--backend", "openai-chat", "--request-rate", "1000", "--max-concurrency", "1") == 1
    captured = capsys.readouterr()
    assert "Failed requests:                       3" in captured.out and "First error: status 400" in captured.out
    assert "approximate" in captured.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("serve --num-prompts 0", "--num-prompts: 0 is not at least 1"),
        ("serve --request-rate -1", "--request-rate: -1 is not above 0"),
        ("serve --dataset-name sharegpt", "--dataset-path: sharegpt needs"),
        ("serve --dataset-path x", "--dataset-path belongs to"),
        ("serve --dataset-name images", "--dataset-name: invalid choice: 'images'"),
        ("serve --percentile-metrics ttft,x", "--percentile-metrics: expected some of ttft, tpot"),
        ("serve --metric-percentiles 101", "--metric-percentiles: expected numbers from 0 to 100"),
        ("serve --random-range-ratio 1", "--random-range-ratio"),
        ("serve --num-warmups -1", "--num-warmups"),
        ("serve --workload W5", "--workload: invalid choice: 'W5'"),
        ("serve --workload W1 --dataset-name sharegpt --dataset-path f", "omit --dataset-name"),
        ("serve --zzz", "unknown option --zzz"),
        ("serve --num-prompt 5", "unknown option --num-prompt; did you mean --num-prompts?"),
        ("start demo --num-iter 2", "unknown option --num-iter; did you mean --num-iters?"),
        ("latency demo --batchsize 2", "unknown option --batchsize; did you mean --batch-size?"),
        ("serve demo --base-url http://h", "--base-url: the server is given twice"),
        ("serve demo --port 1", "--host, --port: the server is given twice"),
        ("serve --goodput ttft:x", "--goodput: expected ttft, tpot, e2el with milliseconds, such as ttft:200"),
        ("serve --goodput itl:5", "not 'itl:5'"),
        ("throughput demo --dataset-name sharegpt", "--dataset-path: sharegpt needs"),
        ("latency", "no model"),
        ("latency demo --port 1", "unknown option --port"),
        ("throughput demo --num-iters 2", "unknown option --num-iters"),
        ("start", "give a model first"),
        ("start demo --zzz", "unknown option --zzz"),
        ("startup", "give a model first"),
        ("start demo --num-iters-cold 2", "--num-iters-cold is an option of vLLM's bench: --num-iters N starts"),
        ("serve --tokenizer gpt2", "--tokenizer is an option of vLLM's bench: not needed; lengths are those that"),
        ("serve --save-detailed", "--save-detailed is an option of vLLM's bench: --save-result writes"),
        ("serve demo --ramp-up-strategy=linear", "--ramp-up-strategy is an option of vLLM's bench: --request-rate is"),
        ("serve demo --tokenizer /nonexistent --port 1", "--host, --port: the server is given twice"),
        ("serve --headless", "--headless is an option of vLLM: --node-rank N"),
        ("throughput demo --async-engine", "--async-engine is an option of vLLM's bench: omit it"),
        ("latency demo --tensor-parallel-siz 2", "did you mean --tensor-parallel-size?"),
        ("nonsense", "bench: expected one of serve, latency, throughput, start, not 'nonsense'"),
    ],
)
def test_bad_arguments(arguments: str, words: str) -> None:
    with pytest.raises(OptionError) as raised:
        command.main(arguments.split(), {})
    assert words in str(raised.value)


def test_options_of_vllms_bench_name_ours() -> None:
    known = serve.create_parser()._option_string_actions | start.create_parser()._option_string_actions
    for flag in peer_options.VLLM_BENCH:
        assert known.keys().isdisjoint(flag.names), "it is an option here"
        assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", flag.answer)) <= known.keys()
    peer_options.refuse_peer_options(["--tokenizer", "x", "--served-model-name", "a"], starts_server=True)


@pytest.mark.parametrize("name", ["W1", "W2", "W3", "W4"])
def test_workloads_are_those_of_the_comparisons(name: str) -> None:
    options, rest = workloads.parse_with_workload(serve.create_parser(), ["--workload", name, "--dtype", "bfloat16"])
    found = (options.max_concurrency, options.random_input_len, options.random_output_len, options.num_prompts)
    compared = WORKLOADS[name]
    assert found == (compared.streams, compared.prompt_tokens, compared.output_tokens, compared.requests)
    assert options.random_prefix_len == compared.shared_tokens
    assert options.num_warmups == (1 if compared.shared_tokens else 0)
    assert rest == ["--dtype", "bfloat16"]


def test_options_beside_a_workload_change_it() -> None:
    arguments = ["--num-prompts", "3", "--workload", "W2"]
    options, _ = workloads.parse_with_workload(serve.create_parser(), arguments)
    assert (options.num_prompts, options.random_input_len) == (3, 256)


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([], {}) == 0
    assert "serve-llm bench throughput MODEL" in capsys.readouterr().out


def test_seeds_do_not_touch_the_global_generator() -> None:
    before = random.getstate()
    datasets.make_random(words(), 3, 4, 4, 0.5, 2)
    assert random.getstate() == before
