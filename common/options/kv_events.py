"""The value of `--kv-events-config`: a JSON object with vLLM's keys. Must stay quick to import."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields

from serve_llm.common.options.parsers import parse_object

TRANSPORTS = ("tcp://", "ipc://", "inproc://")


@dataclass(frozen=True, kw_only=True)
class KVEventsConfig:
    """Where events of the prefix cache are published."""

    enable_kv_cache_events: bool = False
    publisher: str = "zmq"  # "zmq" | "null": nothing is published
    endpoint: str = "tcp://*:5557"  # the port is that of engine 0; each further engine has the next one
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000  # batches kept for `replay_endpoint`
    hwm: int = 100_000  # batches that a slow subscriber may lag behind
    max_queue_size: int = 100_000  # batches that may wait to be sent
    topic: str = ""

    @property
    def is_enabled(self) -> bool:
        return self.enable_kv_cache_events and self.publisher == "zmq"

    @classmethod
    def parse(cls, text: str) -> KVEventsConfig:
        """text: the result of `parse_kv_events_config`."""
        return cls(**json.loads(text))


def parse_kv_events_config(value: object) -> str:
    """Return the value with its defaults as JSON. value: an object or its JSON text."""
    given = parse_object(value, '{"enable_kv_cache_events": true, "topic": "kv-events"}')
    kinds = {field.name: field.type for field in fields(KVEventsConfig)}
    unknown = [str(key) for key in given if key not in kinds]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is not supported; the keys are {', '.join(kinds)}")
    given = {key: item for key, item in given.items() if item is not None}
    for key, item in given.items():
        _check(key, str(kinds[key]), item)
    return json.dumps(asdict(KVEventsConfig(**given)))


def _check(key: str, kind: str, value: object) -> None:
    if kind == "bool" and not isinstance(value, bool):
        raise ValueError(f"{key} must be true or false")
    if kind == "int" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(f"{key} must be a whole number of at least 1")
    if kind.startswith("str") and not isinstance(value, str):
        raise ValueError(f"{key} must be a text")
    if key == "publisher" and value not in ("zmq", "null"):
        raise ValueError(f"publisher {value!r} is not supported; use 'zmq' or 'null'")
    if key.endswith("endpoint") and not str(value).startswith(TRANSPORTS):
        raise ValueError(f"{key} {value!r} must begin with one of {', '.join(TRANSPORTS)}")
