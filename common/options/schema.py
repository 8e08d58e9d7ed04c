"""Every option, once: its type, default, help text and parser.

`EngineOptions` (engine_schema.py) is all that an engine process receives; `Options` adds what only the server uses. The
command line, `--help`, the environment, the YAML file, the keywords of `LLM(...)` and docs/options.md all follow these
fields (`sources`). Must stay quick to import, so that `--help` answers at once.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from serve_llm.common.options.engine_schema import EngineOptions
from serve_llm.common.options.fields import choice_option, option
from serve_llm.common.options.limits import Limits, parse_limits
from serve_llm.common.options.parsers import (
    DEFAULT_QUEUE,
    at_least_one,
    check_address,
    int_between,
    parse_boolean,
    parse_count,
    parse_duration,
    parse_lora_modules,
    parse_metrics_prefix,
    parse_origins,
    parse_queue,
    parse_responses_store,
    parse_sampling_defaults,
    parse_seconds,
    parse_template_kwargs,
    parse_text,
    parse_texts,
    parse_traces_endpoint,
)


@dataclass(frozen=True, kw_only=True)
class Options(EngineOptions):
    """All options of the daemon: the engine's, and those of HTTP, text and admission. Immutable, made of plain values.

    Build it with `sources.parse_args` or `sources.make_options`, which check every value.
    """

    enable_log_requests: bool = option(
        False,
        parse_boolean,
        "log a line for each request, at level info: its id, route, model, API key's number and digest, prompt tokens "
        "and parameters, but no text",
    )
    max_log_len: int | None = option(
        None,
        at_least_one(parse_count),
        "with --enable-log-requests, also log this many characters of each prompt (default: none)",
        metavar="CHARACTERS",
    )
    host: str = option("127.0.0.1", parse_text, "address to listen on; 0.0.0.0 accepts other machines")
    port: int = option(8000, int_between(0, 65535), "port to listen on; 0 chooses a free one")
    front_ends: int = option(
        1,
        int_between(1, 64),
        "processes that answer clients; use more than one if many streams saturate one process (docs/front-ends.md)",
    )
    front_end_addr: str | None = option(
        None,
        check_address,
        "where front ends on other hosts (`serve-llm front-end`) join; needs --cluster-secret (docs/front-ends.md)",
        metavar="HOST:PORT",
    )
    ssl_keyfile: str | None = option(
        None, parse_text, "file with the private key (PEM): serve HTTPS, with --ssl-certfile", metavar="FILE"
    )
    ssl_certfile: str | None = option(None, parse_text, "file with the certificate and its chain (PEM)", metavar="FILE")
    api_key: tuple[str, ...] = option(
        (),
        parse_texts,
        "key that every route but /health, /ready and the page at / requires; may be repeated; one that begins with "
        "admin: may also load and unload adapters (--enable-lora) and scale (--data-parallel-max)",
        metavar="KEY",
        secret=True,
    )
    page: bool = option(True, parse_boolean, "serve the page at / with a chat, the API's routes and the server's state")
    allowed_origins: tuple[str, ...] = option(
        (),
        parse_origins,
        "origin of web pages whose scripts may call the server (CORS), such as https://chat.example.com, or * for all; "
        "may be repeated (default: none)",
        metavar="ORIGIN",
    )
    served_model_name: tuple[str, ...] = option(
        (),
        parse_texts,
        "names of the model in requests; responses repeat the one asked for, or use the first (default: the model as "
        "given); on the command line, put the model before this option",
        metavar="NAME",
        nargs=True,
    )
    lora_modules: tuple[str, ...] = option(
        (),
        parse_lora_modules,
        "adapter to serve, as NAME=DIRECTORY or NAME=ORGANISATION/NAME of the Hugging Face Hub; may be repeated",
        metavar="NAME=DIRECTORY",
        nargs=True,
    )
    chat_template: str | None = option(
        None, parse_text, "file with a Jinja chat template (default: the model's own)", metavar="FILE"
    )
    default_chat_template_kwargs: str | None = option(
        None,
        parse_template_kwargs,
        'variables of the chat template for requests that do not set them in chat_template_kwargs: {"enable_thinking": '
        "false} turns the reasoning of many models off (default: the template's own)",
        metavar="JSON",
    )
    trust_request_chat_template: bool = option(
        False, parse_boolean, "allow chat templates in requests; they are rendered in a separate process"
    )
    reasoning_field: str = choice_option(
        "reasoning",
        "reasoning|reasoning_content",
        "name of the reasoning in chat completions; some clients read only reasoning_content",
    )
    dialect: str | None = option(
        None,
        parse_text,
        "how the model writes reasoning and tool calls: a name or a JSON file (docs/dialects.md), or none (default: "
        "the model's response_template, otherwise found from its chat template)",
        metavar="NAME|FILE",
    )
    generation_config: str = choice_option(
        "auto",
        "auto|none",
        "auto: the model's generation_config.json gives the sampling defaults and suppress_tokens; "
        "none: OpenAI's defaults",
        synonyms={"vllm": "none"},
    )
    override_generation_config: str | None = option(
        None,
        parse_sampling_defaults,
        'sampling defaults in place of those of the model\'s generation_config.json: {"temperature": 0.5}; other keys: '
        "top_p, top_k, min_p, repetition_penalty (default: none)",
        metavar="JSON",
    )
    max_queue: tuple[int, int] = option(
        DEFAULT_QUEUE,
        parse_queue,
        "requests, and prompt tokens, that may wait for their first token; further requests get 503 (default: 2048,4M)",
        metavar="REQUESTS[,TOKENS]",
    )
    request_timeout: float | None = option(
        None,
        parse_seconds,
        "seconds that a request may take, from its arrival to its end (default: no limit); a client may ask for less",
        metavar="SECONDS",
    )
    responses_store: str = option(
        "off",
        parse_responses_store,
        "where /v1/responses keeps responses: off, memory, or an SQLite file, which survives a restart",
        metavar="off|memory|FILE",
    )
    batches_dir: str | None = option(
        None,
        parse_text,
        "directory with the files and batches of /v1/files and /v1/batches (default: no such routes)",
        metavar="DIRECTORY",
    )
    unknown_fields: str = choice_option(
        "refuse",
        "refuse|ignore",
        "what to do with unknown fields of completions, chat completions, tokenize, batches and the routes for "
        "embeddings, scores and classes; ignore: only name them in the header x-ignored-fields, as the other routes do",
    )
    limit: tuple[str, ...] = option(
        (),
        parse_limits,
        "change a limit on one request or on stored objects, such as body-bytes=1MiB; may be repeated; "
        "docs/options.md lists the names",
        metavar="NAME=VALUE",
    )
    drain_timeout: float = option(
        30.0, parse_duration, "seconds for open requests to finish after SIGTERM or SIGINT; 0: none", metavar="SECONDS"
    )
    metrics_prefix: str = option(
        "serve_llm_", parse_metrics_prefix, "prefix of all metric names; `vllm:` serves dashboards made for vLLM"
    )
    otlp_traces_endpoint: str | None = option(
        None,
        parse_traces_endpoint,
        "URL to which OpenTelemetry traces of requests are sent, by OTLP over HTTP, or file:///PATH, to which they are "
        "appended as lines of JSON (default: no traces)",
        metavar="URL",
        alias="otlp-endpoint",
    )

    @property
    def limits(self) -> Limits:
        return Limits.parse(self.limit)

    @property
    def has_front_ends(self) -> bool:
        """Whether processes other than the server's answer clients."""
        return self.front_ends > 1 or self.front_end_addr is not None

    def for_engine(self) -> EngineOptions:
        """The engine's part, which is all that an engine process receives."""
        return EngineOptions(**{field.name: getattr(self, field.name) for field in dataclasses.fields(EngineOptions)})


OPTION_FIELDS: tuple[dataclasses.Field[object], ...] = dataclasses.fields(Options)
"""The fields of Options in the order of --help."""
