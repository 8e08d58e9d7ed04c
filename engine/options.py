"""What the user said: every option once, with its type, default, meaning and parser.

The command line, `--help`, the environment, the YAML file, `LLM(...)`'s keywords and docs/options.md all come from the
fields of `Options`. What the options mean for a given model and machine is `config.resolve`'s business. Torch-free and
quick to import, so that `--help` answers at once; may be imported by anyone.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar, cast

import msgspec

from serve_llm.engine import values
from serve_llm.engine.errors import OptionError
from serve_llm.engine.fields import Fields, help_text, option_name
from serve_llm.engine.fields import option as _option

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")
Kind = TypeVar("Kind", bound="DataclassInstance")

ENVIRONMENT_PREFIX = "SERVE_LLM_"

# Kubernetes sets these for a Service whose name begins with serve-llm; they are addresses, not options.
_KUBERNETES_NAME = re.compile(r"_SERVICE_(HOST|PORT)(_|$)|_PORT_\d+_(TCP|UDP|SCTP)(_|$)")
_KUBERNETES_VALUE = re.compile(r"(tcp|udp|sctp)://")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the user said. Immutable, made of plain values, fit for the wire (msgspec).

    Build it with `from_kwargs` or `parse_args`, which check each value; nothing checks it after that.
    """

    model: str = field(
        metadata={
            "parse": values.text,
            "help": "checkpoint directory, Hugging Face id, or `demo` for the bundled toy model",
        }
    )
    host: str = _option("127.0.0.1", values.text, "address to listen on; 0.0.0.0 lets other machines in")
    port: int = _option(8000, values.whole(0, 65535), "port to listen on; 0 takes a free one")
    dtype: str = _option(
        "auto",
        values.choice("auto", "bfloat16", "float16", "float32"),
        "number type of weights and activations; auto: the checkpoint's, with float16 becoming bfloat16 on a CPU",
        shown="auto|bfloat16|float16|float32",
    )
    max_model_len: int | None = _option(
        None,
        values.positive(values.parse_count),
        "longest prompt and output together, in tokens (default: the model's)",
    )
    max_num_seqs: int = _option(256, values.positive(values.parse_count), "most sequences computed in one step")
    max_num_batched_tokens: int | None = _option(
        None,
        values.positive(values.parse_count),
        "most tokens computed in one step (default: 2048 on a CPU, 8192 on a GPU)",
    )
    gpu_memory_utilization: float = _option(
        0.9, values.share, "share of the GPU's memory that weights and KV cache may take"
    )
    kv_cache_memory: int | None = _option(
        None,
        values.positive(values.parse_bytes),
        "size of each engine's KV cache, such as 8GiB (default: a fixed share of the free memory on a CPU, what "
        "--gpu-memory-utilization leaves on a GPU)",
        shown="BYTES",
    )
    block_size: int | None = _option(
        None, values.block_size, "tokens per KV cache block: 8, 16, 32, 64, 128 or 256 (default: 16)"
    )
    enable_prefix_caching: bool = _option(
        True, values.boolean, "compute a prompt's beginning once for all requests that share it", flag="prefix_caching"
    )
    seed: int | None = _option(
        None,
        values.whole(0, 2**64 - 1),
        "makes the seeds that requests without one get, and dummy weights, the same in every run "
        "(default: a random seed for each such request)",
    )
    served_model_name: tuple[str, ...] = _option(
        (),
        values.texts,
        "names that requests may call the model by, the first one used in answers (default: the model as given); "
        "on the command line, put the model before this option",
        shown="NAME",
        repeat=True,
    )
    tokenizer: str | None = _option(
        None, values.text, "directory or Hugging Face id of the tokenizer (default: the model's own)"
    )
    chat_template: str | None = _option(
        None, values.text, "file with a Jinja chat template (default: the model's own)", shown="FILE"
    )
    revision: str | None = _option(None, values.text, "branch, tag or commit of a Hugging Face model (default: main)")
    download_dir: str | None = _option(
        None, values.text, "where Hugging Face models are stored (default: Hugging Face's own cache)", shown="DIRECTORY"
    )
    load_format: str = _option(
        "auto",
        values.choice("auto", "dummy"),
        "auto: read safetensors; dummy: random weights, for tests",
        shown="auto|dummy",
    )
    generation_config: str = _option(
        "auto",
        values.choice("auto", "none"),
        "auto: the model's generation_config.json gives the sampling defaults; none: OpenAI's defaults",
        shown="auto|none",
    )
    api_key: tuple[str, ...] = _option(
        (), values.texts, "key that every route but /health and /ready needs; may be repeated", shown="KEY", secret=True
    )
    log_level: str = _option(
        "info",
        values.choice("debug", "info", "warning", "error"),
        "least important message that is logged",
        shown="debug|info|warning|error",
    )
    device: str = _option(
        "auto", values.choice("auto", "cpu", "cuda"), "auto: a GPU if there is one, else the CPU", shown="auto|cpu|cuda"
    )
    tensor_parallel_size: int = _option(
        1,
        values.positive(values.parse_count),
        "ranks that share out every layer; any number, it need not divide the model's heads",
        short="tp",
    )
    pipeline_parallel_size: int = _option(
        1, values.positive(values.parse_count), "stages, each of which has some of the layers", short="pp"
    )
    tensor_parallel_split: tuple[float, ...] | None = _option(
        None,
        values.positive_numbers,
        "shares of the ranks of a tensor-parallel group, such as 3,1 for devices of unequal size (default: even)",
        shown="SHARE,SHARE,...",
    )
    pipeline_parallel_layers: tuple[int, ...] | None = _option(
        None,
        values.positive_counts,
        "layers of each stage, such as 9,8,7 (default: such that the dearest stage is as cheap as can be)",
        shown="LAYERS,LAYERS,...",
    )
    distributed_executor_backend: str | None = _option(
        None,
        values.choice("inprocess", "mp", "ray"),
        "what runs the ranks: the engine's own process (one rank), processes of this host, or Ray "
        "(default: inprocess for one rank, else mp if this host has enough devices, else ray)",
        shown="inprocess|mp|ray",
    )
    data_parallel_size: int = _option(
        1,
        values.whole(1, 1024),
        "engines behind one front end, each with the whole model, a share of the machine and a KV cache of its own",
        short="dp",
    )
    metrics_prefix: str = _option(
        "serve_llm_", values.metric_prefix, "beginning of every metric's name; `vllm:` serves dashboards made for vLLM"
    )

    @classmethod
    def from_kwargs(cls, model: str, **options: object) -> Options:
        """Options given in Python, as by `LLM(model, max_model_len="32k")`; None means the default.
        Raises OptionError for an unknown name or a value that is not allowed."""
        given: Given = {"model": (model, "model")}
        for name, value in options.items():
            given |= _named(name, value, name)
        return build(cls, given)


Given = dict[str, tuple[object, str]]
"""Field name -> (value as given, where it was given in the words of an error message)."""


def fields() -> tuple[dataclasses.Field[object], ...]:
    """The fields of Options in the order of --help."""
    return dataclasses.fields(Options)


def parse_args(argv: Sequence[str], environ: Mapping[str, str]) -> Options:
    """Options from the command line (without the program's name), which beats the --config file, which beats the
    environment (SERVE_LLM_<OPTION>), which beats the defaults.

    Raises OptionError (one line that names the option), SystemExit after --help and --version."""
    return merge(read_command_line(make_parser(), fields(), argv), environ)


def read_command_line(parser: argparse.ArgumentParser, options: Fields, argv: Sequence[str]) -> dict[str, object]:
    """What was given, by field name. Raises OptionError for what is not among the options."""
    found, unknown = parser.parse_known_args(list(argv))
    given = cast(dict[str, object], vars(found))
    if unknown:
        flag = unknown[0].partition("=")[0]
        if not flag.startswith("-"):
            raise OptionError(f"unexpected argument {flag!r}: one model is served, given first")
        raise OptionError(f"unknown option {flag}{_nearest(flag, '--', options, parser.prog)}")
    if given.pop("version", False):
        from importlib.metadata import version  # costs more than all other imports here

        sys.stdout.write(f"serve-llm {version('serve-llm')}\n")
        raise SystemExit(0)
    return given


def merge(given: dict[str, object], environ: Mapping[str, str]) -> Options:
    """Options from a command line's, by field name, with the file that its `config` names, and the environment."""
    file = given.pop("config", None)
    merged = _from_environment(environ)
    if file is not None:
        merged |= _from_file(Path(str(file)))
    merged |= by_flag(Options, given)
    return build(Options, merged)


def by_flag(kind: type[Kind], given: Mapping[str, object]) -> Given:
    """Values with the names under which a command line gave them."""
    flags = {option.name: f"--{option_name(option)}" for option in dataclasses.fields(kind)} | {"model": "model"}
    return {name: (value, flags[name]) for name, value in given.items()}


def make_parser(
    program: str = "serve-llm",
    description: str = "Serve a language model behind the OpenAI API. Other commands: `serve-llm plan MODEL` says "
    "whether a model fits, and how to spread it over GPUs and machines, before anything is loaded; `serve-llm check "
    "[MODEL]` finds out whether this host, or several together, can serve.",
    options: Fields | None = None,
) -> argparse.ArgumentParser:
    """The shape of a command line with these options (default: all of the daemon's); values stay text, `build` parses
    them like those of the other sources."""
    parser = _Parser(
        prog=program,
        description=description,
        epilog=f"Each option can also be set by {ENVIRONMENT_PREFIX}<OPTION>, for example "
        f"{ENVIRONMENT_PREFIX}MAX_MODEL_LEN=32k, or in the --config file; the command line beats the file, and the "
        "file beats the environment.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="show the version and leave")
    parser.add_argument("--config", metavar="FILE.yaml", help="file with options by name, such as `max-model-len: 32k`")
    for option in fields() if options is None else options:
        text = help_text(option).replace("%", "%%")
        flag, shown = f"--{option_name(option)}", option.metadata.get("shown") or option.name.upper()
        if option.name == "model":
            parser.add_argument("model", nargs="?", help=text)
        elif isinstance(option.default, bool):
            parser.add_argument(flag, dest=option.name, action=argparse.BooleanOptionalAction, help=text)
        elif option.metadata["repeat"]:
            parser.add_argument(flag, action="extend", nargs="+", metavar=shown, help=text)
        elif isinstance(option.default, tuple):
            parser.add_argument(flag, action="append", metavar=shown, help=text)
        else:
            names = [flag, *(f"-{short}" for short in (option.metadata["short"],) if short)]
            parser.add_argument(*names, dest=option.name, metavar=shown, help=text)
    return parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise OptionError(message.removeprefix("argument "))


def _from_environment(environ: Mapping[str, str]) -> Given:
    given: Given = {}
    for name, value in environ.items():
        if not name.startswith(ENVIRONMENT_PREFIX):
            continue
        if _KUBERNETES_NAME.search(name) or _KUBERNETES_VALUE.match(value):
            continue
        given |= _named(name.removeprefix(ENVIRONMENT_PREFIX).lower(), value, name, ENVIRONMENT_PREFIX)
    return given


def _from_file(path: Path) -> Given:
    import yaml  # only who has a file pays for it

    try:
        content = cast(object, yaml.safe_load(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise OptionError(f"--config {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise OptionError(f"--config {path}: not YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise OptionError(f"--config {path}: expected lines such as `max-model-len: 32k`")
    given: Given = {}
    for name, value in content.items():
        given |= _named(str(name), value, f"{name} in {path}")
    return given


def _named(name: str, value: object, where: str, prefix: str = "") -> Given:
    """One option by the name that a file, the environment or a keyword gives it: the field's, the flag's, or no_ and a
    yes-or-no flag's. A value of None says nothing."""
    plain = name.replace("-", "_")
    for option in fields():
        flag = option_name(option).replace("-", "_")
        if plain in (option.name, flag):
            return {} if value is None else {option.name: (value, where)}
        if isinstance(option.default, bool) and plain == f"no_{flag}":
            return {} if value is None else {option.name: (not _parsed(values.boolean, value, where), where)}
    raise OptionError(f"unknown option {where}{_nearest(plain, prefix)}")


def _nearest(name: str, prefix: str, options: Fields | None = None, program: str = "serve-llm") -> str:
    """'; did you mean ...?' in the spelling of the place where the unknown name stood."""
    options = fields() if options is None else options
    names = {option_name(option) for option in options}
    names |= {f"no-{option_name(option)}" for option in options if isinstance(option.default, bool)}
    if prefix == "--":
        names = (names | {"config", "version", "help"}) - {"model"}
    close = difflib.get_close_matches(name.strip("-").replace("_", "-").lower(), sorted(names), n=1)
    if not close:
        return f"; see {program} --help"
    spelled = close[0] if prefix == "--" else close[0].replace("-", "_")
    return f"; did you mean {prefix}{spelled.upper() if prefix == ENVIRONMENT_PREFIX else spelled}?"


def _parsed(parse: Callable[[object], T], value: object, where: str, secret: bool = False) -> T:
    try:
        return parse(value)
    except ValueError as error:
        raise OptionError(f"{where}: {error}{'' if secret else f', not {value!r}'}") from None


def build(kind: type[Kind], given: Given) -> Kind:
    """The options of one kind, each value checked. Raises OptionError."""
    if kind is Options and "model" not in given:
        raise OptionError("no model: give a checkpoint directory, a Hugging Face id, or `demo` for the bundled model")
    checked: dict[str, object] = {}
    for option in dataclasses.fields(kind):
        if option.name in given:
            value, where = given[option.name]
            checked[option.name] = _parsed(option.metadata["parse"], value, where, option.metadata.get("secret", False))
    return msgspec.convert(checked, kind)
