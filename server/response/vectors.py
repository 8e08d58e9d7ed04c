"""Bodies of replies made of vectors. Yielded in parts, so that other requests can run while a large reply is
encoded."""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec

from serve_llm.server.prompt.pooling_jobs import ValidPoolingRequest
from serve_llm.server.prompt.vector_settings import Activation, VectorSettings
from serve_llm.server.response.builder import ResponseMeta

Vector = Sequence[float]
BuildBody = Callable[[ValidPoolingRequest, Sequence[bytes], ResponseMeta, VectorSettings], Iterator[bytes]]


def build_embeddings(
    parsed: ValidPoolingRequest, vectors: Sequence[bytes], meta: ResponseMeta, settings: VectorSettings
) -> Iterator[bytes]:
    entries = (
        {"object": "embedding", "index": index, "embedding": _encode_vector(vector, parsed)}
        for index, vector in enumerate(vectors)
    )
    return _list_entries(entries, parsed, meta)


def build_cohere_embeddings(
    parsed: ValidPoolingRequest, vectors: Sequence[bytes], meta: ResponseMeta, settings: VectorSettings
) -> Iterator[bytes]:
    billed = {"input_tokens": _count_usage(parsed)["prompt_tokens"]}
    head = {
        "id": meta.id,
        "response_type": "embeddings_by_type",
        "texts": parsed.documents,
        "meta": {"api_version": {"version": "2"}, "billed_units": billed},
    }
    yield msgspec.json.encode(head)[:-1] + b',"embeddings":{'
    for position, name in enumerate(parsed.embedding_types):
        yield (b"," if position else b"") + msgspec.json.encode(name) + b":["
        for index, vector in enumerate(vectors):
            numbers = cut_vector(vector, parsed.dimensions)
            yield (b"," if index else b"") + msgspec.json.encode(_FORMS[name](numbers))
        yield b"]"
    yield b"}}"


def build_pooled(
    parsed: ValidPoolingRequest, vectors: Sequence[bytes], meta: ResponseMeta, settings: VectorSettings
) -> Iterator[bytes]:
    if parsed.token_vector_size:
        return _list_token_vectors(vectors, parsed, meta, settings.activation)
    if parsed.activate:
        vectors = [array("f", compute_probabilities(vector, settings.activation)).tobytes() for vector in vectors]
    entries = (
        {"object": "pooling", "index": index, "data": _encode_vector(vector, parsed)}
        for index, vector in enumerate(vectors)
    )
    return _list_entries(entries, parsed, meta)


def build_classes(
    parsed: ValidPoolingRequest, vectors: Sequence[bytes], meta: ResponseMeta, settings: VectorSettings
) -> Iterator[bytes]:
    def build_entry(index: int, vector: bytes) -> dict[str, object]:
        probabilities = compute_probabilities(vector, settings.activation if parsed.activate else "none")
        label = settings.find_label(probabilities)
        return {"index": index, "label": label, "probs": probabilities, "num_classes": len(probabilities)}

    entries = (build_entry(index, vector) for index, vector in enumerate(vectors))
    return _list_entries(entries, parsed, meta)


def build_scores(
    parsed: ValidPoolingRequest, vectors: Sequence[bytes], meta: ResponseMeta, settings: VectorSettings
) -> Iterator[bytes]:
    entries = (
        {"object": "score", "index": index, "score": score}
        for index, score in enumerate(compute_scores(parsed, vectors, settings))
    )
    return _list_entries(entries, parsed, meta)


def build_ranking(
    parsed: ValidPoolingRequest, vectors: Sequence[bytes], meta: ResponseMeta, settings: VectorSettings
) -> Iterator[bytes]:
    scores = compute_scores(parsed, vectors, settings)
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    results = []
    for index in order[: parsed.top_n or len(order)]:
        result: dict[str, object] = {"index": index, "relevance_score": scores[index]}
        if parsed.documents is not None:
            result["document"] = {"text": parsed.documents[index]}
        results.append(result)
    yield msgspec.json.encode({"id": meta.id, "model": meta.model, "usage": _count_usage(parsed), "results": results})


def compute_scores(parsed: ValidPoolingRequest, vectors: Sequence[bytes], settings: VectorSettings) -> list[float]:
    """Return one score per pair of texts: the cosine of two embeddings, or a cross-encoder's output."""
    if parsed.pairs:
        read = [read_vector(vector) for vector in vectors]
        return [_compute_cosine(read[one], read[other]) for one, other in parsed.pairs]
    activation = settings.activation if parsed.activate else "none"
    return [compute_probabilities(vector, activation)[-1] for vector in vectors]


def compute_probabilities(vector: bytes, activation: Activation) -> list[float]:
    """Convert the logits of a classifier to probabilities."""
    logits = read_vector(vector)
    match activation:
        case "none":
            return list(logits)
        case "sigmoid":
            return [0.5 * (1.0 + math.tanh(logit / 2)) for logit in logits]
        case "softmax":
            highest = max(logits)
            weights = [math.exp(logit - highest) for logit in logits]
            total = sum(weights)
            return [weight / total for weight in weights]


def read_vector(vector: bytes) -> array[float]:
    """Decode float32 numbers."""
    numbers = array("f")
    numbers.frombytes(vector)
    return numbers


def cut_vector(vector: bytes, dimensions: int | None, *, is_scaled: bool = False) -> array[float]:
    """Return the first numbers of an embedding, scaled to length 1; without `dimensions` all of them, scaled if
    `is_scaled`."""
    numbers = read_vector(vector)
    if not is_scaled and (dimensions is None or dimensions == len(numbers)):
        return numbers
    numbers = numbers[:dimensions]
    length = math.hypot(*numbers) or 1.0
    return array("f", (number / length for number in numbers))


def _compute_cosine(one: Vector, other: Vector) -> float:
    lengths = math.hypot(*one) * math.hypot(*other)
    cosine = math.fsum(map(float.__mul__, one, other)) / (lengths or 1.0)
    return max(-1.0, min(cosine, 1.0))  # rounding may exceed the range


def pack_signs(numbers: Vector) -> list[int]:
    """Pack 8 signs per byte, the first number in the highest bit: 1 for a positive number."""
    bits = [number > 0 for number in numbers]
    bits += [False] * (-len(bits) % 8)
    return [
        sum(bit << (7 - place) for place, bit in enumerate(bits[start : start + 8])) for start in range(0, len(bits), 8)
    ]


def _encode_base64(numbers: array[float]) -> str:
    return base64.b64encode(numbers.tobytes()).decode()


# How Cohere's reply writes numbers.
_FORMS: dict[str, Callable[[array[float]], object]] = {
    "float": array.tolist,
    "base64": _encode_base64,
    "ubinary": pack_signs,
    "binary": lambda numbers: [byte - 128 for byte in pack_signs(numbers)],
}


def _encode_vector(vector: bytes, parsed: ValidPoolingRequest) -> str | list[float]:
    numbers = cut_vector(vector, parsed.dimensions, is_scaled=parsed.is_scaled)
    return _encode_base64(numbers) if parsed.base64 else numbers.tolist()


def _list_token_vectors(
    vectors: Sequence[bytes], parsed: ValidPoolingRequest, meta: ResponseMeta, activation: Activation
) -> Iterator[bytes]:
    """vectors: of all tokens of each text."""
    yield _begin_list(parsed, meta)
    row_bytes = 4 * parsed.token_vector_size

    def build_row(row: bytes) -> array[float]:
        if parsed.activate:
            return array("f", compute_probabilities(row, activation))
        return cut_vector(row, parsed.dimensions, is_scaled=parsed.is_scaled)

    for index, vector in enumerate(vectors):
        yield b'%s{"object":"pooling","index":%d,"data":' % (b"," if index else b"", index)
        rows = (build_row(vector[start : start + row_bytes]) for start in range(0, len(vector), row_bytes))
        yield from _encode_rows_as_base64(rows) if parsed.base64 else _encode_rows(rows)
        yield b"}"
    yield b"]}"


def _encode_rows(rows: Iterable[array[float]]) -> Iterator[bytes]:
    for number, row in enumerate(rows):
        yield (b"," if number else b"[") + msgspec.json.encode(row.tolist())
    yield b"]"


def _encode_rows_as_base64(rows: Iterable[array[float]]) -> Iterator[bytes]:
    """Encode one text of all rows."""
    yield b'"'
    rest = b""
    for row in rows:
        rest += row.tobytes()
        end = len(rest) // 3 * 3
        yield base64.b64encode(rest[:end])
        rest = rest[end:]
    yield base64.b64encode(rest) + b'"'


def _begin_list(parsed: ValidPoolingRequest, meta: ResponseMeta) -> bytes:
    head = {
        "id": meta.id,
        "object": "list",
        "created": meta.created,
        "model": meta.model,
        "usage": _count_usage(parsed),
    }
    return msgspec.json.encode(head)[:-1] + b',"data":['


def _list_entries(
    entries: Iterable[Mapping[str, object]], parsed: ValidPoolingRequest, meta: ResponseMeta
) -> Iterator[bytes]:
    yield _begin_list(parsed, meta)
    for index, entry in enumerate(entries):
        yield (b"," if index else b"") + msgspec.json.encode(entry)
    yield b"]}"


def _count_usage(parsed: ValidPoolingRequest) -> dict[str, int]:
    num_tokens = sum(map(len, parsed.request.prompts))
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
