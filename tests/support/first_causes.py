"""Start-up faults and the error that each must end with: the table of tests/e2e/test_first_cause.py."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

from serve_llm.common.errors import CapacityError, EngineError, ModelError, OptionError
from support.faults import FAULTS

OPTIONS, MODEL, CAPACITY, ENGINE = (kind.exit_code for kind in (OptionError, ModelError, CapacityError, EngineError))
ONE = ("demo", "--kv-cache-memory", "16MiB", "--max-num-seqs", "16")
TWO = (*ONE, "-tp", "2", "--device", "cpu")
HERE = ("demo", "--device", "cpu")


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault at start. `line` is a pattern for the whole last line after "serve-llm: "; {model} and {port} in it and
    in the arguments are the damaged checkpoint and a port that is taken."""

    name: str
    code: int
    line: str
    arguments: tuple[str, ...] = ("{model}",)
    damage: Callable[[Path], object] = lambda model: None
    environ: dict[str, str] = dataclasses.field(default_factory=dict)
    is_bug: bool = False  # whether there is a traceback as well


def configured(**changes: object) -> Callable[[Path], None]:
    """Damage config.json; None removes a key."""

    def change(model: Path) -> None:
        config = json.loads((model / "config.json").read_text()) | changes
        kept = {key: value for key, value in config.items() if value is not None}
        (model / "config.json").write_text(json.dumps(kept))

    return change


def cut(name: str, share: float) -> Callable[[Path], None]:
    """Truncate a file, as if only its beginning had been copied."""

    def change(model: Path) -> None:
        whole = (model / name).read_bytes()
        (model / name).write_bytes(whole[: int(len(whole) * share)])

    return change


def written(name: str, content: str) -> Callable[[Path], object]:
    return lambda model: (model / name).write_text(content)


def without(name: str) -> Callable[[Path], object]:
    return lambda model: (model / name).unlink()


def index_of(name: str) -> Callable[[Path], None]:
    """Return the weights that the index places in a different, existing file."""

    def change(model: Path) -> None:
        (model / "model.safetensors").rename(model.parent / "other.safetensors")
        (model / "part.safetensors").touch()
        path = name.format(above=model.parent)
        (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": path}}))

    return change


OPTION_FAULTS = [
    Fault("no model", OPTIONS, "no model: give a checkpoint directory, a Hugging Face id, or `demo` .*", ()),
    Fault(
        "an unknown option",
        OPTIONS,
        r"unknown option --max-modellen; did you mean --max-model-len\?",
        ("demo", "--max-modellen", "3"),
    ),
    Fault(
        "an option's value",
        OPTIONS,
        "--max-model-len: expected a whole number, .*, not 'abc'",
        ("demo", "--max-model-len", "abc"),
    ),
    Fault(
        "an option of the environment",
        OPTIONS,
        r"unknown option SERVE_LLM_DTYP; did you mean SERVE_LLM_DTYPE\?",
        ("demo",),
        environ={"SERVE_LLM_DTYP": "bfloat16"},
    ),
    Fault(
        "a limit",
        OPTIONS,
        "--limit: expected NAME=VALUE, with one of the names header-bytes, .*",
        ("demo", "--limit", "bodies=1"),
    ),
    Fault("an empty key", OPTIONS, r"--api-key: expected some text.*", ("demo", "--api-key", "")),
    Fault(
        "a --config file that is none",
        OPTIONS,
        "--config {model}/config.yaml: not YAML in line 1.*",
        ("demo", "--config", "{model}/config.yaml"),
        written("config.yaml", "port: ["),
    ),
    Fault(
        "contradicting options",
        OPTIONS,
        "--nnodes: 2 hosts need --master-addr HOST:PORT, the same on all of them",
        ("demo", "--nnodes", "2"),
    ),
    Fault(
        "one rank for two",
        OPTIONS,
        "--distributed-executor-backend: inprocess runs one rank, not 2; use mp or ray",
        (*TWO, "--distributed-executor-backend", "inprocess"),
    ),
    Fault(
        "a port out of range",
        OPTIONS,
        "--port: expected a whole number from 0 to 65535, not '70000'",
        ("demo", "--port", "70000"),
    ),
    Fault(
        "a taken port",
        OPTIONS,
        "cannot listen on 127.0.0.1 port {port}: Address already in use; choose another --port",
        ("demo", "--port", "{port}"),
    ),
    Fault(
        "another host's address",
        OPTIONS,
        "cannot listen on 203.0.113.1 port 0: Cannot assign requested address; choose another --host",
        ("demo", "--host", "203.0.113.1"),
    ),
    Fault(
        "no certificate",
        OPTIONS,
        "--ssl-keyfile {model}/key.pem: No such file or directory; give a PEM file .*",
        ("demo", "--ssl-keyfile", "{model}/key.pem", "--ssl-certfile", "{model}/config.json"),
    ),
    Fault(
        "a certificate that is none",
        OPTIONS,
        "--ssl-keyfile {model}/config.json, --ssl-certfile .*; both must be PEM files, .*",
        ("demo", "--ssl-keyfile", "{model}/config.json", "--ssl-certfile", "{model}/config.json"),
    ),
    Fault(
        "a chat template that is none",
        OPTIONS,
        "--chat-template {model}/t.jinja: the chat template is not valid Jinja: .*",
        ("demo", "--chat-template", "{model}/t.jinja"),
        written("t.jinja", "{% for x %}"),
    ),
    Fault(
        "a longer context than the model's",
        OPTIONS,
        "--max-model-len: 1048576 is more than the 2048 tokens that this model allows; lower it, .*",
        ("demo", "--max-model-len", "1M"),
    ),
    Fault(
        "more stages than layers",
        OPTIONS,
        "--pipeline-parallel-size: 9 stages, but the model has only 6 layers; give fewer",
        ("demo", "-pp", "9"),
    ),
    Fault(
        "a number type that the device lacks",
        OPTIONS,
        r"--dtype: float16 is not served on a CPU; use bfloat16 .*",
        (*HERE, "--dtype", "float16"),
    ),
]

MODEL_FAULTS = [
    Fault(
        "no such directory",
        MODEL,
        r"there is no directory /no/such/model: check the path, or give a Hugging Face id \(.*\)",
        ("/no/such/model",),
    ),
    Fault(
        "a file",
        MODEL,
        "{model}/config.json is a file; give the checkpoint directory that holds config.json",
        ("{model}/config.json",),
    ),
    Fault(
        "not a checkpoint",
        MODEL,
        "{model}: no config.json in {model}; it must be a Hugging Face checkpoint directory",
        damage=without("config.json"),
    ),
    Fault(
        "a model that is not in the cache",
        MODEL,
        "org/name: no local directory, and not .* in the cache, while HF_HUB_OFFLINE is set; unset it",
        ("org/name",),
        environ={"HF_HUB_OFFLINE": "1"},
    ),
    Fault(
        "no weights",
        MODEL,
        r"{model}: no \*.safetensors in {model}; convert the weights .*",
        damage=without("model.safetensors"),
    ),
    Fault(
        "no tokenizer",
        MODEL,
        "{model} has no tokenizer: .*; choose one with --tokenizer",
        damage=without("tokenizer.json"),
    ),
    Fault(
        "another model's tokenizer",
        MODEL,
        r"the tokenizer in {model} has ids up to \d+, but the model only 1000: it belongs to another model",
        damage=configured(vocab_size=1000),
    ),
    Fault(
        "config.json cut short",
        MODEL,
        r"{model}/config.json is not valid JSON \(.*\); was it cut short when it was copied\?",
        damage=cut("config.json", 0.5),
    ),
    Fault(
        "an unknown architecture",
        MODEL,
        "architecture MambaForCausalLM is not supported; supported: .*Qwen3ForCausalLM.*; "
        "--model-impl transformers serves many others, slowly",
        damage=configured(architectures=["MambaForCausalLM"]),
    ),
    Fault("a size that is missing", MODEL, "config.json: hidden_size is missing", damage=configured(hidden_size=None)),
    Fault(
        "sizes out of this world",
        MODEL,
        "config.json: num_hidden_layers must be an integer of at most 10000, but .*",
        damage=configured(num_hidden_layers=10**9, layer_types=None),
    ),
    Fault(
        "a key that means another model",
        MODEL,
        "config.json: unknown keys, which may mean another computation: wormholes; .* --allow-unknown-config wormholes",
        damage=configured(wormholes=7),
    ),
    Fault(
        "weights of another number type",
        MODEL,
        "the checkpoint's number type is float8_e4m3fn; choose one with --dtype .*",
        damage=configured(dtype="float8_e4m3fn"),
    ),
    Fault(
        "weights cut short",
        MODEL,
        r"{model}/model.safetensors cannot be read: .*; copy or download it again",
        damage=cut("model.safetensors", 0.5),
    ),
    Fault(
        "weights of other shapes",
        MODEL,
        r"\S+ has shape \[768, 256\], but config.json asks for \[1536, 256\]: are they of the same model\?",
        damage=configured(intermediate_size=1536),
    ),
    Fault(
        "an index that leaves the directory",
        MODEL,
        "{model}/model.safetensors.index.json names '../other.safetensors', which is not a safetensors file of .*",
        damage=index_of("../other.safetensors"),
    ),
]

CAPACITY_FAULTS = [
    Fault(
        "no room for one request",
        CAPACITY,
        "the KV cache has room for 336 tokens, .* lower --max-model-len to at most 336, or raise --kv-cache-memory .*",
        (*HERE, "--kv-cache-memory", "1MiB"),
    ),
    Fault(
        "a cache larger than the memory",
        CAPACITY,
        r"--kv-cache-memory: .* GiB, but only .* GiB of memory are free here; give at most \d+ bytes, .*",
        (*HERE, "--kv-cache-memory", "64TiB"),
    ),
    Fault(
        "more requests than the memory holds",
        CAPACITY,
        "out of memory while allocating the KV cache: .*; lower .*--max-num-seqs.*",
        (*HERE, "--max-num-seqs", "100M"),
    ),
    Fault(
        "more ranks than the memory holds",
        CAPACITY,
        r"100000 ranks on this host take at least [\d,.]+ GiB of memory .*; lower --tensor-parallel-size .*",
        (*HERE, "-tp", "100000"),
    ),
    Fault(
        "a GPU where there is none",
        CAPACITY,
        "--device: cuda was requested, but torch finds no GPU; use --device cpu",
        ("demo", "--device", "cuda"),
        environ={"CUDA_VISIBLE_DEVICES": "-1"},
    ),
    Fault(
        "too few GPUs",
        CAPACITY,
        "--distributed-executor-backend: mp needs 4 GPUs on this host, which has 0; use fewer ranks .*",
        ("demo", "--device", "cuda", "-tp", "4", "--distributed-executor-backend", "mp"),
        environ={"CUDA_VISIBLE_DEVICES": "-1"},
    ),
    Fault(
        "a GPU that is full",
        CAPACITY,
        "out of memory while loading the weights: CUDA out of memory. Tried .*; lower .*",
        ONE,
        environ=FAULTS | {"FAULT_AT_START": "starve 0"},
    ),
]

ENGINE_FAULTS = [
    Fault(
        "an engine that is killed while it starts",
        ENGINE,
        r"the engine process \d+ died while starting by signal SIGKILL; the system may be out of memory: .*",
        ONE,
        environ=FAULTS | {"FAULT_AT_START": "kill 0"},
    ),
    Fault(
        "a rank that fails while it starts",
        ENGINE,
        r"rank 1 \(host \S+, pid \d+\) failed while loading .*: ZeroDivisionError: simulated",
        TWO,
        environ=FAULTS | {"FAULT_AT_START": "raise 1"},
        is_bug=True,
    ),
    Fault(
        "a rank that is killed while it starts",
        ENGINE,
        # Its last message, that it has joined, may be lost when it dies.
        r"rank 1 \(host \S+, pid \d+\) died while (loading .*|joining the others) by signal SIGKILL; "
        r"the system may be out of memory: .*",
        TWO,
        environ=FAULTS | {"FAULT_AT_START": "kill 1"},
    ),
]

ALL = [*OPTION_FAULTS, *MODEL_FAULTS, *CAPACITY_FAULTS, *ENGINE_FAULTS]
