"""Jobs of requests whose result is vectors: embeddings, classes, scores. See `prompt.jobs`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple, TypeVar

import msgspec

from serve_llm.common.options.limits import Limits
from serve_llm.server.http.errors import InvalidRequest, Unsupported
from serve_llm.server.prompt.chat_turn import render_turn
from serve_llm.server.prompt.context import JobContext, parse_openai_body
from serve_llm.server.prompt.reranker_prompt import encode_reranker_prompts
from serve_llm.server.prompt.tokenizer import Encoded, Side
from serve_llm.server.prompt.validate import TextRequest, check_text, check_volume, prepare_pooling, read_field
from serve_llm.server.schema.cohere import CohereEmbedRequest
from serve_llm.server.schema.common import parse_lenient_body
from serve_llm.server.schema.pooling import (
    ClassificationRequest,
    EmbeddingRequest,
    InputBody,
    NamedText,
    PoolingBody,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)

PooledBody = TypeVar("PooledBody", bound=PoolingBody)

UNLIMITED = 2**31 - 1  # tokens
SERVED = {
    "none": "this model generates text; with --convert embed it makes embeddings as well",
    "embed": "this model makes embeddings and has no classes",
    "classify": "this model is a classifier and makes no embeddings",
    "token_classify": "this model classifies tokens: /pooling returns the classes of each token",
}


class ValidPoolingRequest(msgspec.Struct, kw_only=True):
    """A valid request for vectors, and how to build the reply from them."""

    request: TextRequest
    model: str  # name for the reply
    base64: bool = False
    embedding_types: list[str] = []  # forms of the vectors in Cohere's reply
    dimensions: int | None = None  # cut embeddings to this size
    is_scaled: bool = False  # scale embeddings to length 1
    activate: bool = True  # logits become probabilities
    token_vector_size: int = 0  # numbers of the vector of each token; 0: each text has one vector
    pairs: list[tuple[int, int]] = []  # indices of the prompts whose embeddings are compared; empty for a cross-encoder
    documents: list[str] | None = None  # repeated in the reply
    top_n: int = 0  # 0: all
    request_id: str = ""  # for the response's id
    ignored_fields: list[str] = []  # parts of the body without effect


def embed(content: bytes, context: JobContext) -> ValidPoolingRequest:
    body, ignored = _parse(EmbeddingRequest, content, context)
    _check_task(context, "embed")
    return _build_vectors(body, context, ignored)


def embed_cohere(content: bytes, context: JobContext) -> ValidPoolingRequest:
    body, ignored = parse_lenient_body(CohereEmbedRequest, content, context.limits)
    _check_task(context, "embed")
    name = context.model.check_name(body.model)
    named = body.name_texts(context.limits)
    options = body.to_pooling_body()
    options.check(context.limits)
    _check_dimensions(body.output_dimension, context, "output_dimension")
    encoded = _Texts(options, context).encode_all(named)
    return ValidPoolingRequest(
        request=_prepare(encoded, options, context, [place for place, _ in named]),
        model=name,
        dimensions=body.output_dimension,
        embedding_types=list(body.list_types()),
        documents=[text for _, text in named],
        ignored_fields=ignored + ([] if body.input_type is None else ["input_type"]),
    )


def pool(content: bytes, context: JobContext) -> ValidPoolingRequest:
    body, ignored = _parse(PoolingRequest, content, context)
    task = context.model_info.pooling_task
    if task == "none":
        raise Unsupported(SERVED["none"])
    embeds_tokens = task == "embed" and context.model_info.token_vector_size > 0
    if body.task not in (None, task) and not (body.task == "token_embed" and embeds_tokens):
        others = " or token_embed" if embeds_tokens else ""
        raise Unsupported(f"task must be {task}{others} with this model", "task")
    if body.task == "token_embed" or task == "token_classify":
        return _build_token_vectors(body, context, ignored)
    return _build_vectors(body, context, ignored)


def classify(content: bytes, context: JobContext) -> ValidPoolingRequest:
    body, ignored = _parse(ClassificationRequest, content, context)
    _check_task(context, "classify")
    body.check(context.limits)
    name = context.model.check_name(body.model)
    return ValidPoolingRequest(
        request=_prepare_inputs(body, context),
        model=name,
        activate=body.use_activation is not False,
        request_id=body.request_id or "",
        ignored_fields=ignored,
    )


def score(content: bytes, context: JobContext) -> ValidPoolingRequest:
    body, ignored = _parse(ScoreRequest, content, context)
    return _compare_texts(body, context, ignored)


def rerank(content: bytes, context: JobContext) -> ValidPoolingRequest:
    body, ignored = _parse(RerankRequest, content, context)
    result = _compare_texts(body, context, ignored)
    result.documents = None if body.return_documents is False else body.documents
    result.top_n = body.top_n or 0
    return result


def _compare_texts(body: ScoreRequest | RerankRequest, context: JobContext, ignored: list[str]) -> ValidPoolingRequest:
    body.check(context.limits)
    name = context.model.check_name(body.model)
    _check_scores(context)
    encoded = _encode_scores(body, context)
    return ValidPoolingRequest(
        request=_prepare(encoded.prompts, body, context, encoded.places),
        model=name,
        pairs=encoded.pairs,
        activate=body.use_activation is not False,
        request_id=body.request_id or "",
        ignored_fields=ignored,
    )


class _EncodedPairs(NamedTuple):
    prompts: list[Encoded]
    places: list[str]  # one per prompt, for errors
    pairs: list[tuple[int, int]]  # like `ValidPoolingRequest.pairs`


def _encode_scores(body: ScoreRequest | RerankRequest, context: JobContext) -> _EncodedPairs:
    """Raises InvalidRequest, ContextTooLong."""
    given = body.pairs(context.limits)
    texts = _Texts(body, context)
    queries = texts.cut_all([query for query, _ in given], body.max_tokens_per_query)
    documents = texts.cut_all([document for _, document in given], body.max_tokens_per_doc)
    if context.model_info.pooling_task != "embed":
        pairs = list(zip(queries, documents, strict=True))
        places = [f"{document.place} with {query.place}" for query, document in pairs]
        return _EncodedPairs(texts.encode_pairs(pairs, body.instruction), places, [])
    unique: dict[str, NamedText] = {}
    for one in (*queries, *documents):
        unique.setdefault(one.text, one)
    positions = {text: index for index, text in enumerate(unique)}
    return _EncodedPairs(
        texts.encode_all([(one.place, one.text) for one in unique.values()]),
        [one.place for one in unique.values()],
        [(positions[query.text], positions[document.text]) for query, document in zip(queries, documents, strict=True)],
    )


def _parse(kind: type[PooledBody], content: bytes, context: JobContext) -> tuple[PooledBody, list[str]]:
    """Return the body, and the names of its fields without effect. Raises InvalidRequest, TooLarge."""
    body, ignored = parse_openai_body(kind, content, context)
    return body, ignored + body.ineffective_fields


class _Texts:
    """Encodes the texts of one request. Raises InvalidRequest, ContextTooLong."""

    def __init__(self, body: PoolingBody, context: JobContext) -> None:
        self._context = context
        self._side: Side = body.cut_side
        is_rendered = isinstance(body, InputBody) and body.messages is not None
        adds_by_default = not is_rendered  # a template adds them itself
        self._adds_special_tokens = adds_by_default if body.add_special_tokens is None else body.add_special_tokens
        self._is_cut = body.max_tokens_per_text is not None
        longest = context.model_info.max_model_len
        asked = body.max_tokens_per_text
        self._max_tokens = longest if asked in (None, -1) or asked is None else min(asked, longest)
        takes_prompt = context.model_info.pooling_task == "embed" and not is_rendered
        self._prompt = context.model.vectors.prompt if takes_prompt else ""

    def encode_all(self, inputs: Sequence[tuple[str, str | list[int]]] | Sequence[NamedText]) -> list[Encoded]:
        """inputs: (place, text or ids). Errors name the place."""
        texts = [(place, self._prompt + text) for place, text in inputs if isinstance(text, str)]
        for place, text in texts:
            self._check_length(text, place)
        encoded = iter(self._encode([(text, None) for _, text in texts]))
        return [next(encoded) if isinstance(text, str) else (self._cut_ids(text), None) for _, text in inputs]

    def encode_pairs(self, pairs: Sequence[tuple[NamedText, NamedText]], instruction: str | None) -> list[Encoded]:
        model = self._context.model
        if instruction is not None and not model.vectors.has_token_classes:
            raise Unsupported("this model reads no instruction", "instruction")
        for place, text in (*chain.from_iterable(pairs), NamedText("instruction", instruction or "")):
            self._check_length(text, place)
        texts = [(query.text, document.text) for query, document in pairs]
        if not model.vectors.has_token_classes:
            return self._encode(texts)
        prompts = encode_reranker_prompts(model.tokenizer, texts, instruction, self._token_limit, self._side)
        return [(ids, None) for ids in prompts]

    def cut_all(self, texts: Sequence[NamedText], max_tokens: int | None) -> list[NamedText]:
        """Return the beginning of each text with at most this many tokens."""
        if max_tokens is None:
            return list(texts)
        different = list(dict.fromkeys(texts))
        encodings = self._context.model.tokenizer.rust.encode_batch(
            [one.text for one in different], add_special_tokens=False
        )
        cut = {}
        for one, encoding in zip(different, encodings, strict=True):
            end = None if len(encoding) <= max_tokens else encoding.offsets[max_tokens - 1][1]
            cut[one] = NamedText(one.place, one.text[:end])
        return [cut[one] for one in texts]

    def _encode(self, texts: Sequence[tuple[str, str | None]]) -> list[Encoded]:
        model = self._context.model
        if model.vectors.lowercase:
            texts = [(text.lower(), None if second is None else second.lower()) for text, second in texts]
        encoded = model.tokenizer.encode_truncated(texts, self._token_limit, self._side, self._adds_special_tokens)
        eos_id = model.tokenizer.eos_id
        if not model.vectors.adds_eos or not self._adds_special_tokens or eos_id is None:
            return encoded
        return [
            (ids if ids[-1:] == [eos_id] else [*ids[: self._token_limit - 1], eos_id], start) for ids, start in encoded
        ]

    @property
    def _token_limit(self) -> int:
        """Return the maximum tokens of a text, special tokens included; longer texts are cut."""
        return self._max_tokens if self._is_cut else UNLIMITED

    def _check_length(self, text: str, place: str) -> None:
        check_text(text, self._context.model, self._context.model_info, self._is_cut, read_field(place), place)

    def _cut_ids(self, ids: list[int]) -> list[int]:
        if not self._is_cut:
            return ids
        return ids[: self._max_tokens] if self._side == "right" else ids[-self._max_tokens :]


def _check_task(context: JobContext, task: str) -> None:
    if task == "classify" and context.model_info.pooling_task == "none":
        raise Unsupported(
            "this model generates text and has no classes; --classifier-from-token makes classes of tokens"
        )
    if context.model_info.pooling_task != task:
        raise Unsupported(SERVED[context.model_info.pooling_task])


def _check_scores(context: JobContext) -> None:
    model_info = context.model_info
    if model_info.pooling_task in ("none", "token_classify"):
        raise Unsupported(SERVED[model_info.pooling_task])
    is_token_classifier = context.model.vectors.has_token_classes
    if model_info.pooling_task == "classify" and model_info.vector_size != 1 and not is_token_classifier:
        raise Unsupported(
            f"this model has {model_info.vector_size} classes; scores need an embedding model or a classifier with one "
            "class"
        )


def _build_vectors(
    body: EmbeddingRequest | PoolingRequest, context: JobContext, ignored: list[str]
) -> ValidPoolingRequest:
    body.check(context.limits)
    name = context.model.check_name(body.model)
    _check_dimensions(body.dimensions, context)
    request = _prepare_inputs(body, context)
    if context.model_info.pooling_task == "classify":
        return _build_request(body, name, request, ignored, activate=bool(body.use_activation))
    is_scaled = body.scales_vectors(context.model.vectors.has_unit_length)
    return _build_request(body, name, request, ignored, is_scaled=is_scaled)


def _build_token_vectors(body: PoolingRequest, context: JobContext, ignored: list[str]) -> ValidPoolingRequest:
    size = context.model_info.token_vector_size
    body.check(context.limits)
    name = context.model.check_name(body.model)
    if body.dimensions != size:
        _check_dimensions(body.dimensions, context)
    request = _prepare_inputs(body, context)
    request.pools_tokens = True
    num_numbers = size * sum(map(len, request.prompts))
    if num_numbers > context.limits.token_vector_numbers:
        raise InvalidRequest(
            f"the vectors of all tokens have {num_numbers} numbers, more than {context.limits.token_vector_numbers}: "
            "send fewer or shorter texts",
            "input",
        )
    if context.model_info.pooling_task == "token_classify":
        activate = bool(body.use_activation)
        return _build_request(body, name, request, ignored, activate=activate, token_vector_size=size)
    is_scaled = body.scales_vectors(has_unit_length=False, default=True)
    return _build_request(body, name, request, ignored, is_scaled=is_scaled, token_vector_size=size)


def _build_request(
    body: EmbeddingRequest | PoolingRequest,
    model: str,
    request: TextRequest,
    ignored: list[str],
    is_scaled: bool = False,
    activate: bool = False,
    token_vector_size: int = 0,
) -> ValidPoolingRequest:
    return ValidPoolingRequest(
        request=request,
        model=model,
        is_scaled=is_scaled,
        activate=activate,
        token_vector_size=token_vector_size,
        base64=body.encoding_format == "base64",
        dimensions=body.dimensions,
        request_id=body.request_id or "",
        ignored_fields=ignored,
    )


def _check_dimensions(dimensions: int | None, context: JobContext, param: str = "dimensions") -> None:
    size = context.model_info.vector_size
    if dimensions is None or dimensions == size:
        return
    allowed = context.model.vectors.dimensions
    if allowed is None or context.model_info.pooling_task != "embed":
        raise Unsupported(f"{param}: this model was not trained for shorter embeddings; omit it, or give {size}", param)
    if allowed and dimensions not in allowed:
        sizes = ", ".join(map(str, allowed))
        raise InvalidRequest(f"{param} must be one of {sizes}, not {dimensions}", param)
    if dimensions > size:
        raise InvalidRequest(f"{param} must be at most {size}, not {dimensions}", param)


def _prepare_inputs(body: InputBody, context: JobContext) -> TextRequest:
    if body.messages is None:
        inputs = body.inputs(context.limits)
        places = ["input"] if len(inputs) == 1 else [f"input[{index}]" for index in range(len(inputs))]
    else:
        inputs = [render_turn(body.to_turn(context.limits), context)]
        places = ["messages"]
    encoded = _Texts(body, context).encode_all(list(zip(places, inputs, strict=True)))
    return _prepare(encoded, body, context, places)


def _prepare(encoded: Sequence[Encoded], body: PoolingBody, context: JobContext, places: Sequence[str]) -> TextRequest:
    """places: of each prompt, for errors."""
    starts = [start for _, start in encoded]
    request = prepare_pooling(
        [ids for ids, _ in encoded],
        context.model_info,
        places=places,
        second_text_starts=None if all(start is None for start in starts) else starts,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
    )
    _check_limits(request, context.limits, read_field(places[-1]))
    return request


def _check_limits(request: TextRequest, limits: Limits, param: str) -> None:
    if len(request.prompts) > limits.choices:
        raise InvalidRequest(f"{param}: {len(request.prompts)} texts are more than {limits.choices}", param)
    check_volume(request, limits, param)
