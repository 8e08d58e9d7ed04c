"""Options of other engines: each is accepted under our name or answered with advice, in every source."""

import itertools
import logging
import re
from pathlib import Path
from types import ModuleType

import pytest

from serve_llm.common.errors import OptionError
from serve_llm.common.options.peer_flags import PEER_COMMANDS, PEER_FLAGS, find_peer_flag, translate_arguments
from serve_llm.common.options.peer_variables import PEER_VARIABLES, log_unread
from serve_llm.common.options.schema import Options
from serve_llm.common.options.sources import make_options, make_parser, parse_args
from serve_llm.server.schema.chat import ChatRequest
from serve_llm.server.schema.completions import CompletionRequest
from support.scripts import load_script

ROOT = Path(__file__).parents[3]
KNOWN = frozenset(make_parser()._option_string_actions)
FLAGS = [(engine, flag) for engine, flags in PEER_FLAGS.items() for flag in flags]
NEEDS = {
    "--ssl-keyfile": ["--ssl-certfile", "c.pem"],
    "--ssl-certfile": ["--ssl-keyfile", "k.pem"],
    "--max-loras": ["--enable-lora"],
}
VALUES = {
    "--block-size": "32",
    "--quantization": "int8",
    "--max-queue": "7",
    "--gpu-memory-utilization": "0.5",
    "--master-addr": "h:1",
    "--default-chat-template-kwargs": "{}",
}


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("demo --enable-prefix-caching", {"enable_prefix_caching": True}),
        ("demo --no-enable-prefix-caching", {"enable_prefix_caching": False}),
        ("--model org/name --trust-remote-code", {"model": "org/name"}),
        ("demo --tp=3 --enable-chunked-prefill", {"tensor_parallel_size": 3}),
        ("demo --num-ctx 1k", {"max_model_len": 1000}),
        ("demo --context-length 1k -t 2", {"max_model_len": 1000, "cpu_threads": 2}),
        ("-m file.gguf -a name", {"model": "file.gguf", "served_model_name": ("name",)}),
        ("demo --disable-radix-cache --disable-cuda-graph", {"enable_prefix_caching": False, "enforce_eager": True}),
        ("demo --disable-custom-all-reduce --swap-space 4", {"all_reduce": "nccl"}),
        ("demo --disable-log-stats --max-logprobs 5 --max-num-seqs 3", {"max_num_seqs": 3}),
        ("demo --mem-fraction-static 0.5 --seed 1", {"gpu_memory_utilization": 0.5, "seed": 1}),
        ("--served-model-name a b --model demo", {"served_model_name": ("a", "b")}),
        ("demo --enable_prefix_caching --max_model_len=9", {"enable_prefix_caching": True, "max_model_len": 9}),
        ("demo --no-disable-log-requests", {"enable_log_requests": True}),
        ("demo --uvicorn-log-level warning --disable-uvicorn-access-log", {}),
        ("demo --disable-access-log-for-endpoints /health,/metrics", {}),
        ("demo --shutdown-timeout 10", {"drain_timeout": 10.0}),
        ('demo --allowed-headers ["*"] --allowed-methods ["*"]', {}),
        ("demo --enable-auto-tool-choice --tool-call-parser hermes --reasoning-parser qwen3", {}),
    ],
)
def test_what_means_the_same_is_accepted_with_a_line(
    argv: str, expected: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    assert parse_args(argv.split(), {}) == Options(**({"model": "demo"} | expected))  # type: ignore[arg-type]
    assert caplog.records and all(record.levelno == logging.WARNING for record in caplog.records)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("demo --cpu-offload-gb 4", "--cpu-offload-gb is an option of vLLM: weights are not offloaded"),
        ("demo --max-logprobs 21", "--max-logprobs is an option of vLLM: top_logprobs is at most 20"),
        ("demo --max-logprobs=-1", "--max-logprobs is an option of vLLM: top_logprobs is at most 20"),
        ("demo --tool-call-parser ernie45", "the chat template shows the format, and --dialect selects another"),
        ("demo --reasoning-parser minimax_m2_append_think", "--dialect selects another"),
        ("demo --root-path /llm", "let the proxy remove the prefix"),
        ("demo -O3", "omit it; nothing is compiled"),
        ("demo -ngl 99", "-ngl is an option of llama.cpp: not needed"),
        ("demo --headless", "--node-rank N"),
        ("demo -p 8080", "--port is the port"),
        ("demo --data-parallel-size-local 2", "--data-parallel-split"),
        ("demo --ctx-size", "--max-model-len"),
        ("demo --tp", "--tp: expected one argument"),
        ("demo --keep-alive 5m", "--keep-alive is an option of Ollama: not needed; the model stays loaded"),
        ("run llama", "Ollama's `run MODEL` is `serve-llm chat MODEL`"),
        ("demo --enable-prefix-caching --zzz", "unknown option --zzz"),
    ],
)
def test_the_rest_is_answered(argv: str, words: str) -> None:
    with pytest.raises(OptionError) as raised:
        parse_args(argv.split(), {})
    assert words in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(("engine", "flag"), FLAGS, ids=lambda value: getattr(value, "names", (value,))[0])
def test_every_row_does_what_it_says(engine: str, flag) -> None:  # type: ignore[no-untyped-def]
    for name in flag.names:
        assert name not in KNOWN, "it is an option here"
        if not (flag.is_accepted or flag.depends_on_value):
            with pytest.raises(OptionError, match=re.escape(flag.answer)):
                translate_arguments(["demo", name, "x"], KNOWN)
            continue
        value = flag.neutral[0] if flag.neutral else VALUES.get(flag.ours, "2") if flag.has_value else None
        argv = [name] if value is None else [name, value]
        argv += NEEDS.get(flag.ours, [])
        if flag.ours != "MODEL":
            argv = ["demo", *argv]
        assert parse_args(argv, {}).model, "the words here are a valid command line"
        if flag.depends_on_value:
            with pytest.raises(OptionError, match=re.escape(flag.answer)):
                parse_args(["demo", name, "zzz"], {})
    for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", flag.answer):
        assert option in KNOWN, f"the answer names {option}"


def test_no_flag_is_in_two_tables_with_different_answers() -> None:
    for (_, one), (_, other) in itertools.combinations(FLAGS, 2):
        assert set(one.names).isdisjoint(other.names) or one.answer == other.answer, (one.names, other.names)


def test_what_most_scripts_for_vllm_set_is_accepted_with_one_notice(caplog: pytest.LogCaptureFixture) -> None:
    options = make_options("demo", swap_space=4, disable_log_stats=True, max_logprobs=20)
    assert options == Options(model="demo")
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == [
        "swap_space: no effect",
        "disable_log_stats: no effect",
    ]
    caplog.clear()
    assert make_options("demo", disable_log_stats=False) == Options(model="demo") and not caplog.records


def test_files_variables_and_keywords(tmp_path: Path) -> None:
    file = tmp_path / "o.yaml"
    file.write_text("disable-radix-cache: true\ntp_size: 2\ntrust-remote-code: false\n")
    options = parse_args(["demo", "--config", str(file)], {"SERVE_LLM_CONTEXT_LENGTH": "1k"})
    assert (options.enable_prefix_caching, options.tensor_parallel_size, options.max_model_len) == (False, 2, 1000)
    scripts = {"trust_remote_code": True, "tokenizer_mode": "auto", "swap_space": 0, "cpu_offload_gb": None}
    assert make_options("demo", **scripts) == Options(model="demo")
    assert make_options("demo", disable_radix_cache=False) == Options(model="demo")
    for name, value in (("cpu_offload_gb", 4), ("enable_chunked_prefill", False), ("tool_call_parser", "none")):
        with pytest.raises(OptionError, match=f"{name} is an option of vLLM: "):
            make_options("demo", **{name: value})
    off = {"enable_sleep_mode": False, "hf_overrides": {}, "calculate_kv_scales": "false", "allowed_methods": ["*"]}
    assert make_options("demo", **off) == Options(model="demo"), "what is not wanted needs no counterpart"
    with pytest.raises(OptionError, match="enable_sleep_mode is an option of vLLM"):
        make_options("demo", enable_sleep_mode=True)
    with pytest.raises(OptionError, match="trust_remote_code: expected true or false"):
        make_options("demo", trust_remote_code="perhaps")


NAMES = (Path(__file__).parent / "peer_flag_names.txt").read_text().splitlines()[1:]


def test_every_option_of_vllm_and_llama_cpp_is_known_or_answered() -> None:
    assert len(NAMES) > 600
    assert [name for name in NAMES if name not in KNOWN and find_peer_flag(name) is None] == []


def test_a_pattern_does_not_hide_a_typing_error() -> None:
    for argv, words in (
        ("demo --speculative-conig x", "unknown option --speculative-conig; did you mean --speculative-config?"),
        ("demo --cp-threads 1", "unknown option --cp-threads; did you mean --cpu-threads?"),
        ("demo --dry-run", "unknown option --dry-run"),
        ("demo --hicache-ratio 2", "--hicache-ratio is an option of another engine: --kv-offload-memory is"),
        ("demo --compilation-config.mode 3", "--compilation-config.mode is an option of vLLM: omit it; nothing is"),
        ("demo --speculative-config.method ngram", "give --speculative-config as one JSON object"),
    ):
        with pytest.raises(OptionError) as raised:
            parse_args(argv.split(), {})
        assert words in str(raised.value)


def test_a_mistyped_flag_of_another_engine_is_not_taken_for_the_opposite_of_ours() -> None:
    for argument, meant in (
        ("--disable-log-request", "--disable-log-requests"),
        ("--enable-prefix-cachin", "--enable-prefix-caching"),
    ):
        with pytest.raises(OptionError, match=rf"unknown option {argument}; did you mean {meant}\?"):
            parse_args(["demo", argument], {})
    with pytest.raises(OptionError, match=r"did you mean disable_log_requests\?"):
        make_options("demo", disable_log_request=True)


def test_commands_of_other_engines_name_ours() -> None:
    assert {"run", "pull", "list", "ps", "show", "rm", "complete"} <= set(PEER_COMMANDS)
    for command, answer in PEER_COMMANDS.items():
        assert command in answer and ("serve-llm" in answer or "counterpart" in answer)


def test_variables_of_other_engines_are_named(caplog: pytest.LogCaptureFixture) -> None:
    log_unread({"VLLM_API_KEY": "secret", "OLLAMA_HOST": "", "VLLM_PORT": "tcp://10.0.0.1:80", "HF_TOKEN": "x"})
    assert [record.getMessage() for record in caplog.records] == [
        "VLLM_API_KEY is set but not read; here: `--api-key`, or the variable `SERVE_LLM_API_KEY`"
    ]


def test_other_variables_of_other_engines_are_named_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    log_unread({"VLLM_XYZ": "1", "LLAMA_ARG_PORT": "8080", "VLLM_LLM_SERVICE_HOST": "10.0.0.1", "VLLMX": "1"})
    assert [record.getMessage() for record in caplog.records] == [
        "LLAMA_ARG_PORT, VLLM_XYZ: variables of other engines are not read; options are set by SERVE_LLM_<OPTION> "
        "(docs/from-other-engines.md)"
    ]


@pytest.fixture(scope="module")
def peers_page() -> ModuleType:
    return load_script(ROOT / "tools" / "peers_page.py")


def test_the_page_has_every_row(peers_page: ModuleType) -> None:
    page = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("from-*.md")))
    for kind in ("vLLM", "SGLang", "llama.cpp", "Ollama", "commands", "variables", "fields", "metrics"):
        assert f"<!-- {kind}: begin (make docs) -->\n{peers_page.table(kind)}\n<!-- {kind}: end -->" in page, (
            "make docs"
        )
    for _, flag in FLAGS:
        assert all(f"`{name}`" in page for name in flag.names)


def test_the_page_names_what_exists(peers_page: ModuleType) -> None:
    for names in peers_page.SAME.values():
        assert {f"--{name}" for name in names} <= KNOWN
    metrics = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    for name in peers_page.METRICS:
        assert f"| `{name}` |" in metrics
    for answer in PEER_VARIABLES.values():
        assert set(re.findall(r"--[a-z-]+", answer)) <= KNOWN


def test_the_fields_beside_ollamas_exist() -> None:
    page = (ROOT / "docs" / "from-ollama.md").read_text(encoding="utf-8").partition("## Fields")[2]
    rows = [
        row.split(" | ") for row in page.partition("\n\n| In Ollama's answer")[0].splitlines() if row.startswith("| `")
    ]
    named = {name for theirs, ours in rows for name in re.findall(r"`([a-z_]+)[`:]", ours)}
    for theirs, ours in rows:
        if ours.startswith("the same"):
            named |= set(re.findall(r"[a-z_]{3,}", theirs)) - {"options"}
    known = {*ChatRequest.model_fields, *CompletionRequest.model_fields}
    assert len(named) > 20 and named - known == {"system"}
