"""Bodies made from our own OpenAPI document, right and wrong: each gets an answer that the document describes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.serving import Served

Schema = dict[str, Any]
PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")

junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3),
    max_leaves=5,
)


def values(schema: Schema, schemas: dict[str, Schema]) -> st.SearchStrategy[Any]:
    """What a schema allows, as far as the document's own keywords go."""
    if "$ref" in schema:
        return values(schemas[schema["$ref"].rpartition("/")[2]], schemas)
    for name in ("anyOf", "oneOf"):
        if name in schema:
            return st.one_of([values(one, schemas) for one in schema[name]])
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum") or [schema["const"]])
    low, high = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum")
    match schema.get("type"):
        case "object":
            names = schema.get("properties", {})
            required = {name: values(names[name], schemas) for name in schema.get("required", ())}
            optional = {name: values(one, schemas) for name, one in names.items() if name not in required}
            return st.fixed_dictionaries(required, optional=optional)
        case "array":
            return st.lists(values(schema.get("items", {}), schemas), max_size=3)
        case "integer":
            return st.integers(low if low is not None else -9, high if high is not None else 5000)
        case "number":
            return st.floats(low if low is not None else -3, high if high is not None else 3)
        case "string":
            return st.text(max_size=9)
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
    return junk


@pytest.mark.parametrize("path", PATHS)
def test_every_answer_is_a_described_one(serve: Callable[..., Served], path: str) -> None:
    served = serve("abc def")
    document = served.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    described = document["paths"][path]["post"]
    schema = described["requestBody"]["content"]["application/json"]["schema"]

    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        values(schema, schemas),
        st.dictionaries(
            st.sampled_from([*schemas[schema["$ref"].rpartition("/")[2]]["properties"], "x"]), junk, max_size=2
        ),
    )
    def check(right: dict[str, Any], wrong: dict[str, Any]) -> None:
        for body in (right, right | wrong):
            if isinstance(body.get("n"), int):
                body["n"] = min(body["n"], 3)
            reply = served.post(path, json.dumps(body).encode())
            assert str(reply.status) in described["responses"], (body, reply.content)
            if reply.status != 200:
                assert set(reply.json()["error"]) == {"message", "type", "param", "code"}

    check()
    assert served.gate.num_open == 0 and not served.engine.open
