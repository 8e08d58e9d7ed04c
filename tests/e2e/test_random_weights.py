"""Whatever a model prefers to write, its text is valid: random weights and the demo model with random schemas."""

from __future__ import annotations

import json
import random

import jsonschema
import pytest

from serve_llm import LLM, SamplingParams, StructuredOutputs
from support.matrix import mostly_slow
from support.random_schemas import Schema, build_schema

TEMPERATURE = 1.5
MAX_TOKENS = 400


def close(schema: object) -> object:
    """Return the schema without properties of arbitrary names, of which a random text would write endlessly many."""
    if isinstance(schema, list):
        return [close(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: close(part) for name, part in schema.items()}
    return closed | {"additionalProperties": False} if closed.get("type") == "object" else closed


@pytest.mark.slow
@pytest.mark.parametrize("load_format", mostly_slow(["dummy", "auto"], ["dummy"]), ids=["random weights", "demo"])
@pytest.mark.parametrize(
    ("num_schemas", "num_each"), [(10, 4), pytest.param(250, 8, marks=pytest.mark.slow)], ids=["few", "thousands"]
)
def test_complete_texts_are_valid(load_format: str, num_schemas: int, num_each: int) -> None:
    schemas: list[Schema] = [close(build_schema(random.Random(number))) for number in range(num_schemas)]  # type: ignore[misc]
    params = [
        SamplingParams(
            structured_outputs=StructuredOutputs(json=schema),
            temperature=TEMPERATURE,
            max_tokens=MAX_TOKENS,
            n=num_each,
            seed=number,
        )
        for number, schema in enumerate(schemas)
    ]
    with LLM("demo", load_format=load_format, kv_cache_memory="64MiB", max_num_seqs=32) as llm:
        outputs = llm.generate(["import os\n"] * num_schemas, params, use_tqdm=False)
    num_complete = 0
    for schema, output in zip(schemas, outputs, strict=True):
        validator = jsonschema.Draft202012Validator(schema)
        for choice in output.outputs:
            if choice.finish_reason == "stop":
                num_complete += 1
                assert validator.is_valid(json.loads(choice.text)), (schema, choice.text)
    assert num_complete > 0.9 * num_schemas * num_each
