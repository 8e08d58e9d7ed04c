"""Options from every source (command line, file, environment, keywords), and the errors that name faults."""

from pathlib import Path

import msgspec
import pytest

from serve_llm.common.errors import OptionError
from serve_llm.common.options.schema import OPTION_FIELDS, Options
from serve_llm.common.options.sources import make_options, parse_args

# For each option: what a user types, and its value. Must name every option (tested below).
NODES = ("--master-addr", "10.0.0.1:29500", "-tp", "2")
SHARED_EXPERTS = ("-dp", "2", "--enable-expert-parallel")
SPLIT = ("-dp", "4", "--nnodes", "3", *NODES, "--data-parallel-split")
NEEDS = {name: {"nnodes", "master_addr", "tensor_parallel_size"} for name in ("nnodes", "node_rank")}
NEEDS["data_parallel_split"] = NEEDS["nnodes"] | {"nnodes", "data_parallel_size"}
NEEDS |= {name: {"enable_lora"} for name in ("lora_modules", "max_loras", "max_cpu_loras", "max_lora_rank")}
NEEDS["max_log_len"] = {"enable_log_requests"}
NEEDS |= {"ssl_keyfile": {"ssl_certfile"}, "ssl_certfile": {"ssl_keyfile"}}
NEEDS |= {"front_end_addr": {"cluster_secret"}}
NEEDS |= {"kv_offload_dir": {"kv_offload_memory"}, "kv_offload_dir_size": {"kv_offload_dir", "kv_offload_memory"}}
NEEDS["enable_eplb"] = {"data_parallel_size", "enable_expert_parallel"}
NEEDS["eplb_config"] = {*NEEDS["enable_eplb"], "enable_eplb"}
TYPED: dict[str, tuple[list[str], object]] = {
    "model": (["org/model"], "org/model"),
    "host": (["--host", "0.0.0.0"], "0.0.0.0"),
    "port": (["--port", "0"], 0),
    "front_ends": (["--front-ends", "4"], 4),
    "front_end_addr": (["--front-end-addr", "10.0.0.1:29700", "--cluster-secret", "s"], "10.0.0.1:29700"),
    "dtype": (["--dtype", "Float32"], "float32"),
    "max_model_len": (["--max-model-len", "32k"], 32_000),
    "max_num_seqs": (["--max-num-seqs=1"], 1),
    "max_num_batched_tokens": (["--max-num-batched-tokens", "2K"], 2048),
    "gpu_memory_utilization": (["--gpu-memory-utilization", "0.5"], 0.5),
    "enforce_eager": (["--enforce-eager"], True),
    "batch_invariant": (["--batch-invariant"], True),
    "attention_backend": (["--attention-backend", "FLASH_ATTN"], "flash"),
    "all_reduce": (["--all-reduce", "symmetric"], "symmetric"),
    "kv_cache_memory": (["--kv-cache-memory", "8GiB"], 8 * 2**30),
    "block_size": (["--block-size", "64"], 64),
    "kv_events_config": (
        ["--kv-events-config", '{"enable_kv_cache_events": true, "topic": "kv"}'],
        '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": null, '
        '"buffer_steps": 10000, "hwm": 100000, "max_queue_size": 100000, "topic": "kv"}',
    ),
    "kv_offload_dir": (["--kv-offload-dir", "/cache", "--kv-offload-memory", "1GiB"], "/cache"),
    "kv_offload_dir_size": (
        ["--kv-offload-dir-size", "1TiB", "--kv-offload-dir", "/cache", "--kv-offload-memory", "1GiB"],
        2**40,
    ),
    "kv_offload_memory": (["--kv-offload-memory", "16GiB"], 16 * 2**30),
    "enable_prefix_caching": (["--no-prefix-caching"], False),
    "jump_forward": (["--no-jump-forward"], False),
    "speculative_config": (
        ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 5}'],
        '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 5, "prompt_lookup_min": 3}',
    ),
    "allow_unknown_config": (["--allow-unknown-config", "a", "--allow-unknown-config", "b.c"], ("a", "b.c")),
    "seed": (["--seed", str(2**64 - 1)], 2**64 - 1),
    "served_model_name": (["--served-model-name", "a", "b"], ("a", "b")),
    "tokenizer": (["--tokenizer", "t"], "t"),
    "chat_template": (["--chat-template", "c.jinja"], "c.jinja"),
    "default_chat_template_kwargs": (["--default-chat-template-kwargs", '{"a": false}'], '{"a": false}'),
    "override_generation_config": (["--override-generation-config", '{"top_k": 5}'], '{"top_k": 5}'),
    "dialect": (["--dialect", "qwen3"], "qwen3"),
    "revision": (["--revision", "main"], "main"),
    "download_dir": (["--download-dir", "/models"], "/models"),
    "load_format": (["--load-format", "dummy"], "dummy"),
    "model_impl": (["--model-impl", "Transformers"], "transformers"),
    "runner": (["--runner", "Pooling"], "pooling"),
    "convert": (["--convert", "embed"], "embed"),
    "pooling_type": (["--pooling-type", "mean"], "mean"),
    "classifier_from_token": (["--classifier-from-token", "no", "yes"], ("no", "yes")),
    "quantization": (["--quantization", "INT8"], "int8"),
    "kv_cache_dtype": (["--kv-cache-dtype", "int8"], "int8"),
    "generation_config": (["--generation-config", "none"], "none"),
    "reasoning_field": (["--reasoning-field", "reasoning_content"], "reasoning_content"),
    "api_key": (["--api-key", "one", "--api-key", "two,three"], ("one", "two,three")),
    "log_level": (["--log-level", "WARNING"], "warning"),
    "log_format": (["--log-format", "json"], "json"),
    "enable_log_requests": (["--enable-log-requests"], True),
    "max_log_len": (["--max-log-len", "80", "--enable-log-requests"], 80),
    "device": (["--device", "cpu"], "cpu"),
    "cpu_threads": (["--cpu-threads", "3"], 3),
    "tensor_parallel_size": (["-tp", "3"], 3),
    "pipeline_parallel_size": (["--pipeline-parallel-size", "2"], 2),
    "tensor_parallel_split": (["--tensor-parallel-split", "3,1"], (3.0, 1.0)),
    "pipeline_parallel_layers": (["--pipeline-parallel-layers", "9,8,7"], (9, 8, 7)),
    "enable_expert_parallel": (["--enable-expert-parallel"], True),
    "enable_eplb": (["--enable-eplb", *SHARED_EXPERTS], True),
    "eplb_config": (
        ["--eplb-config", '{"num_redundant_experts": 8}', "--enable-eplb", *SHARED_EXPERTS],
        '{"step_interval": 3000, "num_redundant_experts": 8}',
    ),
    "distributed_executor_backend": (["--distributed-executor-backend", "MP"], "mp"),
    "data_parallel_size": (["-dp", "2"], 2),
    "nnodes": (["--nnodes", "2", *NODES], 2),
    "data_parallel_min": (["--data-parallel-min", "1"], 1),
    "data_parallel_max": (["--data-parallel-max", "4"], 4),
    "data_parallel_split": (["--data-parallel-split", "0,2", "-dp", "2", "--nnodes", "2", *NODES], (0, 2)),
    "node_rank": (["--node-rank", "1", "--nnodes", "2", *NODES], 1),
    "master_addr": (["--master-addr", "[fd00::1]:29500"], "[fd00::1]:29500"),
    "host_ip": (["--host-ip", "10.0.0.1"], "10.0.0.1"),
    "cluster_secret": (["--cluster-secret", "s"], "s"),
    "max_queue": (["--max-queue", "64,1m"], (64, 1_000_000)),
    "request_timeout": (["--request-timeout", "2.5"], 2.5),
    "drain_timeout": (["--drain-timeout", "5"], 5.0),
    "responses_store": (["--responses-store", "memory"], "memory"),
    "batches_dir": (["--batches-dir", "/batches"], "/batches"),
    "unknown_fields": (["--unknown-fields", "ignore"], "ignore"),
    "limit": (["--limit", "n=4", "--limit", "body-bytes=1MiB"], ("n=4", "body-bytes=1MiB")),
    "trust_request_chat_template": (["--trust-request-chat-template"], True),
    "ssl_keyfile": (["--ssl-keyfile", "k.pem", "--ssl-certfile", "c.pem"], "k.pem"),
    "ssl_certfile": (["--ssl-certfile", "c.pem", "--ssl-keyfile", "k.pem"], "c.pem"),
    "page": (["--no-page"], False),
    "allowed_origins": (["--allowed-origins", "https://a:8443", "--allowed-origins", "*"], ("https://a:8443", "*")),
    "max_restarts": (["--max-restarts", "0"], 0),
    "step_timeout": (["--step-timeout", "2.5"], 2.5),
    "enable_lora": (["--enable-lora"], True),
    "lora_modules": (["--lora-modules", "a=/adapters/a", "b=b", "--enable-lora"], ("a=/adapters/a", "b=b")),
    "max_loras": (["--max-loras", "8", "--enable-lora"], 8),
    "max_cpu_loras": (["--max-cpu-loras", "16", "--enable-lora"], 16),
    "max_lora_rank": (["--max-lora-rank", "64", "--enable-lora"], 64),
    "metrics_prefix": (["--metrics-prefix", "vllm:"], "vllm:"),
    "otlp_traces_endpoint": (["--otlp-traces-endpoint", "https://a:1/v1/traces"], "https://a:1/v1/traces"),
}


def test_every_option_is_tried_below() -> None:
    assert set(TYPED) == {option.name for option in OPTION_FIELDS}
    assert len(TYPED) <= 88  # so that a user can read the list


def test_dtypes_have_the_names_that_vllm_accepts() -> None:
    assert parse_args(["demo", "--dtype", "half"], {}).dtype == "float16"
    assert make_options("demo", dtype="Float").dtype == "float32"


def test_a_drain_timeout_may_be_zero_and_others_may_not() -> None:
    assert make_options("demo", drain_timeout="0").drain_timeout == 0.0
    for name, value in (("drain_timeout", "-1"), ("drain_timeout", "nan"), ("request_timeout", "0")):
        with pytest.raises(OptionError, match="expected seconds"):
            make_options("demo", **{name: value})


def test_a_second_name_works_in_every_source(tmp_path: Path) -> None:
    url = "http://a:1/v1/traces"
    file = tmp_path / "options.yaml"
    file.write_text(f"otlp-endpoint: {url}")
    for argv, environ in (
        (["--otlp-endpoint", url], {}),
        (["--config", str(file)], {}),
        ([], {"SERVE_LLM_OTLP_ENDPOINT": url}),
    ):
        assert parse_args(["demo", *argv], environ).otlp_traces_endpoint == url
    assert make_options("demo", otlp_endpoint=url).otlp_traces_endpoint == url


@pytest.mark.parametrize("name", TYPED)
def test_command_line(name: str) -> None:
    argv, value = TYPED[name]
    options = parse_args(argv if name == "model" else ["demo", *argv], {})
    assert getattr(options, name) == value
    default = msgspec.to_builtins(Options(model="demo"))
    changed = {key for key, other in msgspec.to_builtins(options).items() if other != default[key]}
    assert changed == {name} | NEEDS.get(name, set())


def test_defaults_are_what_the_parsers_accept() -> None:
    for option in OPTION_FIELDS:
        if option.default is not None and option.default != () and option.name != "model":
            assert option.metadata["parse"](option.default) == option.default


def test_crosses_the_wire() -> None:
    options = parse_args(["demo", "--api-key", "k", "--served-model-name", "a", "b"], {})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(options), type=Options) == options


def test_secrets_stay_out_of_logs() -> None:
    assert "hunter2" not in repr(parse_args(["demo", "--api-key", "hunter2", "--cluster-secret", "hunter2"], {}))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["demo", "--node-rank", "1"], "--node-rank: 1 is not from 0 to 0 (--nnodes 1)"),
        (["--nnodes", "2", "--node-rank", "2", *NODES], "--node-rank: 2 is not from 0 to 1 (--nnodes 2)"),
        (
            ["demo", "--nnodes", "2", "-tp", "2"],
            "--nnodes: 2 hosts need --master-addr HOST:PORT, the same on all of them",
        ),
        (["demo", "--nnodes", "2", "--master-addr", "h:1"], "--nnodes: 2 hosts for 1 rank (--tensor-parallel-size"),
        (["demo", "--nnodes", "5", *NODES, "-pp", "2"], "--nnodes: 5 hosts for 4 ranks (--tensor-parallel-size"),
        (
            ["demo", "--nnodes", "5", *NODES, "-dp", "2"],
            "--nnodes: 5 hosts for 2 ranks of each of 2 engines (--tensor-parallel-size",
        ),
        (["demo", *SPLIT, "2,2"], "--data-parallel-split: 2 numbers, but --nnodes is 3"),
        (["demo", *SPLIT, "2,1,2"], "--data-parallel-split: 5 engines in total, but --data-parallel-size is 4"),
        (["demo", *SPLIT, "4,0,0"], "--data-parallel-split: node 1 would have no engine; only node 0, which serves"),
        (["demo", *SPLIT, "4,x,0"], "--data-parallel-split: expected whole numbers separated by commas, such as 3,1"),
        (["demo", "--data-parallel-split", "1"], "--data-parallel-split divides engines among several hosts"),
        (["demo", "--master-addr", "10.0.0.1"], "--master-addr: expected host:port, such as 10.0.0.1:29500 or"),
        (["demo", "--master-addr", "fd00::1:29500"], "--master-addr: expected host:port"),
        (["demo", "--master-addr", "h:0"], "--master-addr: expected host:port"),
        (["--nnodes", "2", *NODES], "no model: give"),
    ],
)
def test_options_for_several_hosts_that_do_not_go_together(argv: list[str], message: str) -> None:
    with pytest.raises(OptionError) as raised:
        parse_args(argv, {})
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["-tp", "2"], "--tensor-parallel-size"),
        (["-pp", "2", "--quantization", "int8"], "--pipeline-parallel-size, --quantization"),
        (["--quantization", "fp8"], "--quantization"),
        (["--distributed-executor-backend", "ray"], "--distributed-executor-backend"),
        (["--allow-unknown-config", "key"], "--allow-unknown-config"),
    ],
)
def test_what_does_not_go_with_transformers_own_code(argv: list[str], named: str) -> None:
    parse_args(["demo", *argv], {})
    with pytest.raises(OptionError) as raised:
        parse_args(["demo", "--model-impl", "transformers", *argv], {})
    assert str(raised.value) == (
        f"--model-impl: transformers' code runs as one rank in the engine process and cannot be combined with {named}"
    )


def test_only_node_0_need_know_the_model() -> None:
    follower = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "h:1"]
    assert parse_args(follower, {}).model == ""
    assert parse_args(["demo", *follower], {}).model == "demo"


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_precedence(tmp_path: Path) -> None:
    file = write(tmp_path / "o.yaml", "port: 2\nseed: 2\nserved_model_name: [two, zwei]\n")
    environ = {"SERVE_LLM_PORT": "1", "SERVE_LLM_SEED": "1", "SERVE_LLM_HOST": "one", "OTHER": "x"}
    options = parse_args(["demo", "--config", file, "--port", "3"], environ)
    assert (options.port, options.seed, options.host) == (3, 2, "one")
    assert options.served_model_name == ("two", "zwei")


def test_file_takes_names_with_either_dash_and_plain_values(tmp_path: Path) -> None:
    text = (
        "model: demo\nmax-model-len: 32k\nmax_num_seqs: 7\nno-prefix-caching: true\nseed:\ngpu-memory-utilization: 1\n"
    )
    options = parse_args(["--config", write(tmp_path / "o.yaml", text)], {})
    assert options == Options(
        model="demo", max_model_len=32_000, max_num_seqs=7, enable_prefix_caching=False, gpu_memory_utilization=1.0
    )


def test_command_line_switches_back_on_what_the_environment_switched_off() -> None:
    assert not parse_args(["demo"], {"SERVE_LLM_NO_PREFIX_CACHING": "1"}).enable_prefix_caching
    assert parse_args(["demo", "--prefix-caching"], {"SERVE_LLM_PREFIX_CACHING": "off"}).enable_prefix_caching


def test_short_names_are_for_the_command_line() -> None:
    assert parse_args(["demo", "-tp", "2", "-pp=3"], {}) == parse_args(
        ["demo", "--tensor-parallel-size", "2", "--pipeline-parallel-size", "3"], {}
    )
    with pytest.raises(OptionError, match="unknown option tp"):
        make_options("demo", tp=2)


def test_shares_are_lists_or_text_with_commas() -> None:
    for split, layers in (("3, 1.5", "9,8"), ([3, 1.5], [9, 8]), ((3.0, 1.5), ("9", "8"))):
        options = make_options("demo", tensor_parallel_split=split, pipeline_parallel_layers=layers)
        assert (options.tensor_parallel_split, options.pipeline_parallel_layers) == ((3.0, 1.5), (9, 8))


def test_environment_lists_have_commas() -> None:
    assert parse_args(["demo"], {"SERVE_LLM_API_KEY": "one,two"}).api_key == ("one", "two")


def test_environment_of_a_kubernetes_service_is_ignored() -> None:
    environ = {
        "SERVE_LLM_SERVICE_HOST": "10.0.0.1",
        "SERVE_LLM_SERVICE_PORT": "8000",
        "SERVE_LLM_SERVICE_PORT_HTTP": "8000",
        "SERVE_LLM_PORT": "tcp://10.0.0.1:8000",
        "SERVE_LLM_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "SERVE_LLM_PORT_8000_TCP_ADDR": "10.0.0.1",
        "SERVE_LLM_PORT_8000_TCP_PORT": "8000",
        "SERVE_LLM_PORT_8000_TCP_PROTO": "tcp",
    }
    assert parse_args(["demo"], environ) == Options(model="demo")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], ["no model", "demo"]),
        (["demo", "extra"], ["unexpected argument 'extra'"]),
        (["demo", "--api-key", "a", "b"], ["unexpected argument 'b'", "give --api-key again for each value"]),
        (["--served-model-name", "a", "demo"], ["no model", "--served-model-name takes all words that follow it"]),
        (["demo", "--max-model-len", "auto"], ["--max-model-len: omit it", "the error names the length that does"]),
        (["demo", "--load-format", "pt"], ["--load-format: expected auto or dummy", "serve-llm convert"]),
        (["demo", "--max-modle-len", "8"], ["--max-modle-len", "--max-model-len"]),
        (["demo", "-d", "2"], ["unknown option -d"]),  # nor with -dp
        (["demo", "--max-model", "8"], ["--max-model", "--max-model-len"]),  # no abbreviations
        (["demo", "--confg=x"], ["--confg", "--config"]),
        (["demo", "--zzzzzzz"], ["--zzzzzzz", "--help"]),
        (["demo", "--port"], ["--port", "expected"]),
        (["demo", "--port", "65536"], ["--port", "0 to 65535", "65536"]),
        (["demo", "--port", "eighty"], ["--port", "eighty"]),
        (["demo", "--dtype", "bf16"], ["--dtype", "bf16", "auto, bfloat16, float16, float32"]),
        (["demo", "--max-model-len", "0"], ["--max-model-len", "at least 1"]),
        (["demo", "--max-num-seqs", "-1"], ["--max-num-seqs", "-1"]),
        (["demo", "--max-num-batched-tokens", "8GiB"], ["--max-num-batched-tokens", "8GiB"]),
        (["demo", "--kv-cache-memory", "lots"], ["--kv-cache-memory", "lots", "GiB"]),
        (["demo", "--gpu-memory-utilization", "1.1"], ["--gpu-memory-utilization", "at most 1", "1.1"]),
        (["demo", "--gpu-memory-utilization", "nan"], ["--gpu-memory-utilization"]),
        (["demo", "--block-size", "24"], ["--block-size", "24", "16, 32"]),
        (["demo", "--seed", str(2**64)], ["--seed"]),
        (["demo", "--api-key", ""], ["--api-key"]),
        (["demo", "--metrics-prefix", "a-b"], ["--metrics-prefix", "a-b"]),
        (["demo", "--config", "/nonexistent.yaml"], ["--config", "/nonexistent.yaml", "No such file"]),
    ],
)
def test_bad_command_line(argv: list[str], words: list[str]) -> None:
    with pytest.raises(OptionError) as caught:
        parse_args(argv, {})
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


def test_a_secret_in_a_bad_file_is_not_shown(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="not YAML in line 2, column 12") as caught:
        parse_args(["demo", "--config", write(tmp_path / "o.yaml", "port: 1\napi-key: sk: verysecret\n")], {})
    assert "verysecret" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot: 1", ["prot", "o.yaml", "port"]),
        ("config: x", ["config"]),  # a file does not name another
        ("port: [1]", ["port in", "o.yaml"]),
        ("port: true", ["port in"]),
        ("revision: 123", ["revision in", "quote"]),
        ("- port", ["o.yaml", "expected lines"]),
        ("port: {", ["o.yaml", "not YAML"]),
        ("enable-prefix-caching: maybe", ["enable-prefix-caching in", "true or false"]),
    ],
)
def test_bad_file(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(OptionError) as caught:
        parse_args(["demo", "--config", write(tmp_path / "o.yaml", text)], {})
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


def test_empty_file_says_nothing(tmp_path: Path) -> None:
    assert parse_args(["demo", "--config", write(tmp_path / "o.yaml", "# later\n")], {}) == Options(model="demo")


@pytest.mark.parametrize("name", ["SERVE_LLM_PROT", "SERVE_LLM_CONFIG", "SERVE_LLM_"])
def test_unknown_environment_variable(name: str) -> None:
    with pytest.raises(OptionError, match=name):
        parse_args(["demo"], {name: "1"})


def test_nearest_name_is_spelled_as_in_the_environment() -> None:
    with pytest.raises(OptionError, match=r"did you mean SERVE_LLM_MAX_MODEL_LEN\?"):
        parse_args(["demo"], {"SERVE_LLM_MAX_MODLE_LEN": "1"})


def test_secret_value_is_not_repeated_in_the_error() -> None:
    with pytest.raises(OptionError) as caught:
        make_options("demo", api_key=["good", 12345])
    assert "api_key" in str(caught.value) and "12345" not in str(caught.value)


def test_keywords() -> None:
    options = make_options("demo", max_model_len="32k", kv_cache_memory="1GiB", seed=None, api_key="a")
    assert options == Options(model="demo", max_model_len=32_000, kv_cache_memory=2**30, api_key=("a",))
    assert not make_options("demo", enable_prefix_caching=False).enable_prefix_caching
    with pytest.raises(OptionError, match=r"unknown option max_modle_len; did you mean max_model_len\?"):
        make_options("demo", max_modle_len=8)
    with pytest.raises(OptionError, match="max_num_seqs: must be at least 1, not 0"):
        make_options("demo", max_num_seqs=0)
