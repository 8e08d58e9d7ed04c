"""Options as somebody gave them, by whatever name and spelling: found among those there are, checked, put together.

Torch-free and quick to import, like the options themselves.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import msgspec

from serve_llm.engine import values
from serve_llm.engine.errors import OptionError
from serve_llm.engine.fields import Fields, option_name
from serve_llm.engine.options import ENVIRONMENT_PREFIX, Options, fields

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")
Kind = TypeVar("Kind", bound="DataclassInstance")

Given = dict[str, tuple[object, str]]
"""Field name -> (value as given, where it was given in the words of an error message)."""


def named(name: str, value: object, where: str, prefix: str = "") -> Given:
    """One option by the name that a file, the environment or a keyword gives it: the field's, the flag's, or no_ and a
    yes-or-no flag's. A value of None says nothing."""
    plain = name.replace("-", "_")
    for option in fields():
        flag = option_name(option).replace("-", "_")
        if plain in (option.name, flag):
            return {} if value is None else {option.name: (value, where)}
        if isinstance(option.default, bool) and plain == f"no_{flag}":
            return {} if value is None else {option.name: (not _parsed(values.boolean, value, where), where)}
    raise OptionError(f"unknown option {where}{nearest(plain, prefix)}")


def nearest(name: str, prefix: str, options: Fields | None = None, program: str = "serve-llm") -> str:
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
    checked: dict[str, object] = {}
    for option in dataclasses.fields(kind):
        if option.name in given:
            value, where = given[option.name]
            checked[option.name] = _parsed(option.metadata["parse"], value, where, option.metadata.get("secret", False))
    if kind is Options and "model" not in checked:
        if not checked.get("node_rank"):
            raise OptionError(
                "no model: give a checkpoint directory, a Hugging Face id, or `demo` for the bundled model"
            )
        checked["model"] = ""  # node 0 says which
    options = msgspec.convert(checked, kind)
    if isinstance(options, Options):
        _check_nodes(options)
        _check_model_impl(options)
        if (options.ssl_keyfile is None) != (options.ssl_certfile is None):
            raise OptionError("--ssl-keyfile and --ssl-certfile are needed together")
    return options


def _check_model_impl(options: Options) -> None:
    """Raises OptionError where transformers' own code cannot do what is asked."""
    if options.model_impl == "auto":
        return
    refused = {
        "--tensor-parallel-size": options.tensor_parallel_size > 1,
        "--pipeline-parallel-size": options.pipeline_parallel_size > 1,
        "--distributed-executor-backend": options.distributed_executor_backend not in (None, "inprocess"),
        "--enable-expert-parallel": options.enable_expert_parallel,
        "--quantization": options.quantization != "auto",
        "--allow-unknown-config": bool(options.allow_unknown_config),
    }
    if wrong := [name for name, is_refused in refused.items() if is_refused]:
        raise OptionError(
            "--model-impl: transformers' own code, which runs as one rank in the engine's process, does not go with "
            f"{', '.join(wrong)}"
        )


def _check_nodes(options: Options) -> None:
    """Raises OptionError where the options for several hosts do not fit together."""
    if options.node_rank >= options.nnodes:
        raise OptionError(
            f"--node-rank: {options.node_rank} is none of 0 to {options.nnodes - 1} (--nnodes {options.nnodes})"
        )
    if options.nnodes == 1:
        return
    if options.master_addr is None:
        raise OptionError(f"--nnodes: {options.nnodes} hosts need --master-addr HOST:PORT, the same on all of them")
    if options.data_parallel_size > 1:
        raise OptionError("--data-parallel-size: several engines over several hosts need Ray; leave out --nnodes")
    num_ranks = options.tensor_parallel_size * options.pipeline_parallel_size
    if options.node_rank == 0 and num_ranks < options.nnodes:
        raise OptionError(
            f"--nnodes: {options.nnodes} hosts for {num_ranks} rank{'s' if num_ranks > 1 else ''} "
            "(--tensor-parallel-size times --pipeline-parallel-size), so some would have none"
        )
