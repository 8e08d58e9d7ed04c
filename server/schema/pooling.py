"""Embeddings, reranking, scores, classification and raw vectors: requests and replies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, Field

from serve_llm.common.options.limits import Limits
from serve_llm.server.http.errors import InvalidRequest, Unsupported
from serve_llm.server.prompt.chat_turn import ChatTurn
from serve_llm.server.sampling_params import SamplingParams
from serve_llm.server.schema.chat import ChatRequest, Messages, TemplateBody
from serve_llm.server.schema.common import (
    Ignored,
    RequestBody,
    RequestId,
    Strings,
    TranslatedBody,
    check_cache_salt,
    ranged,
)
from serve_llm.server.schema.completions import CompletionRequest, Prompt
from serve_llm.server.schema.peer_fields import check_neutral, neutral

_GENERATION_FIELDS = {*ChatRequest.model_fields, *CompletionRequest.model_fields} - {
    *TemplateBody.model_fields,
    "messages",
    "prompt",
}
Dimensions = Annotated[int, Field(ge=1, le=2**31 - 1)]


class PoolingBody(RequestBody):
    """Fields that all these requests share."""

    model: str | None = Field(default=None, description="A served model's name; the served model when absent.")
    truncate_prompt_tokens: int | None = ranged(
        "truncate_prompt_tokens",
        "Cut each text to this many tokens, special tokens included; -1: to the model's length.",
    )
    truncation_side: Literal["left", "right"] | None = Field(
        default=None, description="The side on which texts are cut; right when absent."
    )
    truncate: bool | Literal["NONE", "START", "END"] | None = Field(
        default=None,
        description="true or END: cut the end of texts that are longer than the model's length; START: their "
        "beginning. false and NONE: refuse them, as when absent.",
    )
    add_special_tokens: bool | None = Field(default=None, description="True when absent. Does not concern ids.")
    priority: int | None = Field(default=None, description="Smaller values run first; between -2**31 and 2**31 - 1.")
    cache_salt: str | None = Field(default=None, description="Prefixes are shared between equal salts only.")
    request_id: RequestId | None = None
    user: Ignored = None
    padding: object | None = neutral("do_not_pad")
    mm_processor_kwargs: object | None = neutral({})
    media_io_kwargs: object | None = neutral({})

    @classmethod
    def explain_unknown(cls, name: str) -> str | None:
        if name in _GENERATION_FIELDS:
            return "it concerns generated text, and this route generates none"
        return None

    def check(self, limits: Limits) -> None:
        """Check what types cannot express. Raises InvalidRequest, Unsupported."""
        for name in self.model_fields_set:
            check_neutral(name, getattr(self, name), type(self).model_fields[name])
        if self.truncate_prompt_tokens is not None and not 1 <= self.truncate_prompt_tokens < 2**31:
            if self.truncate_prompt_tokens != -1:
                raise InvalidRequest(
                    f"truncate_prompt_tokens must be -1 or at least 1, not {self.truncate_prompt_tokens}",
                    "truncate_prompt_tokens",
                )
        if self.truncate in (False, "NONE") and self.truncate_prompt_tokens is not None:
            raise InvalidRequest("truncate and truncate_prompt_tokens contradict each other", "truncate")
        if self.truncate == "START" and self.truncation_side == "right":
            raise InvalidRequest("truncate and truncation_side contradict each other", "truncate")
        if self.priority is not None and not -(2**31) <= self.priority < 2**31:
            raise InvalidRequest("priority must fit into 32 bits", "priority")
        check_cache_salt(self.cache_salt)

    @property
    def max_tokens_per_text(self) -> int | None:
        """Maximum tokens per text; longer ones are cut; -1: the model's length. None: they are refused."""
        if self.truncate_prompt_tokens is None and self.truncate in (True, "START", "END"):
            return -1
        return self.truncate_prompt_tokens

    @property
    def cut_side(self) -> Literal["left", "right"]:
        return "left" if self.truncate == "START" else self.truncation_side or "right"

    @property
    def ineffective_fields(self) -> list[str]:
        """The fields that have a meaning elsewhere but no effect here."""
        given = self.model_fields_set
        return [
            name for name in ("input_type", "max_chunks_per_doc") if name in given and getattr(self, name) is not None
        ]


class InputBody(PoolingBody, TemplateBody):
    """Either input or messages."""

    input: Prompt | None = None
    messages: Messages | None = Field(default=None, description="A conversation, of which one vector is made.")

    def check(self, limits: Limits) -> None:
        super().check(limits)
        if (self.input is None) == (self.messages is None):
            raise InvalidRequest("exactly one of input and messages is required", "input")
        for name in TemplateBody.model_fields:
            if self.messages is None and getattr(self, name) is not None:
                raise InvalidRequest(f"{name} needs messages", name)

    def inputs(self, limits: Limits) -> list[str | list[int]]:
        """One text, or list of ids, per vector. Raises InvalidRequest."""
        value = self.input
        if isinstance(value, str):
            return [value]
        if not value:
            raise InvalidRequest("input must not be empty", "input")
        if isinstance(value[0], int):
            return [value]
        check_count(value, limits, "input")
        return list(value)

    def to_turn(self, limits: Limits) -> ChatTurn:
        """Build the turn for the messages; by default it opens no reply. Raises InvalidRequest, Unsupported."""
        turn = self.build_turn(self.messages or [], SamplingParams(), limits)
        return replace(turn, add_generation_prompt=bool(self.add_generation_prompt))


class VectorFormat(PoolingBody):
    encoding_format: Literal["float", "base64"] | None = Field(
        default=None, description="Numbers, or the base64 text of little-endian float32; numbers when absent."
    )
    dimensions: Dimensions | None = Field(
        default=None, description="Cut embeddings to this many numbers, if the model was trained for it."
    )
    embed_dtype: object | None = neutral("float32")
    endianness: object | None = neutral("native", "little")
    embedding_type: object | None = neutral("float", hint="use encoding_format")
    late_chunking: object | None = neutral(False)
    normalize: bool | None = Field(default=None, description="Scale embeddings to length 1, whatever the model does.")
    use_activation: bool | None = Field(default=None, description="Another name of normalize.")
    input_type: Ignored = Field(default=None, description="No effect: the client adds the prompt of a query itself.")

    def scales_vectors(self, has_unit_length: bool, default: bool = False) -> bool:
        """Whether embeddings are to be scaled to length 1. has_unit_length: they already are. Raises InvalidRequest,
        Unsupported."""
        if None not in (self.normalize, self.use_activation) and self.normalize != self.use_activation:
            raise InvalidRequest("normalize and use_activation contradict each other", "normalize")
        name = "use_activation" if self.normalize is None else "normalize"
        wanted = getattr(self, name)
        if wanted is False and has_unit_length:
            raise Unsupported(f"{name}: false is not supported: the embeddings of this model have length 1", name)
        return (default if wanted is None else wanted) and not has_unit_length


class EmbeddingRequest(VectorFormat, InputBody):
    pass


class PoolingRequest(VectorFormat, InputBody):
    """The model's own vectors: embeddings of texts or tokens, or the logits of a classifier."""

    task: str | None = Field(
        default=None,
        description="embed, classify or token_classify (classes of each token), whichever the model does, as when "
        "absent; with an embedding model also token_embed: a vector of each token, of length 1 unless normalize is "
        "false.",
    )
    use_activation: bool | None = Field(
        default=None, description="A classifier's probabilities instead of logits; for embeddings as normalize."
    )


class ClassificationRequest(InputBody):
    use_activation: bool | None = Field(default=None, description="Probabilities instead of logits; true when absent.")


class NamedText(NamedTuple):
    place: str  # as errors name it: documents[1]
    text: str


def name_texts(field: str, value: str | list[str]) -> list[NamedText]:
    if isinstance(value, str):
        return [NamedText(field, value)]
    return [NamedText(f"{field}[{index}]", text) for index, text in enumerate(value)]


class ScoreRequest(PoolingBody):
    """Pairs of texts, 1 to N or N to N, under one of several pairs of names."""

    queries: str | Strings | None = None
    documents: str | Strings | None = None
    items: str | Strings | None = Field(default=None, description="Another name of documents.")
    text_1: str | Strings | None = Field(default=None, description="Another name of queries.")
    text_2: str | Strings | None = Field(default=None, description="Another name of documents.")
    data_1: str | Strings | None = Field(default=None, description="Another name of queries.")
    data_2: str | Strings | None = Field(default=None, description="Another name of documents.")
    instruction: str | None = Field(
        default=None, description="What makes a document relevant, for models that read it."
    )
    max_tokens_per_query: int | None = Field(default=None, ge=1, description="Cut each query to this many tokens.")
    max_tokens_per_doc: int | None = Field(default=None, ge=1, description="Cut each document to this many tokens.")
    chat_template_kwargs: object | None = neutral({})
    use_activation: bool | None = Field(default=None, description="Scores after the activation; true when absent.")

    def pairs(self, limits: Limits) -> list[tuple[NamedText, NamedText]]:
        """Raises InvalidRequest."""
        names = (("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2"))
        given = [pair for pair in names if all(getattr(self, name) is not None for name in pair)]
        fields = {name for pair in names for name in pair if getattr(self, name) is not None}
        if len(given) != 1 or fields != set(given[0]):
            options = ", ".join(" and ".join(pair) for pair in names)
            raise InvalidRequest(
                f"exactly one of these pairs is required: {options}", given[0][0] if given else "queries"
            )
        first_name, second_name = given[0]
        sides = []
        for name in given[0]:
            value = getattr(self, name)
            if value == []:
                raise InvalidRequest(f"{name} must not be empty", name)
            sides.append(name_texts(name, value))
            check_count(sides[-1], limits, name)
        first, second = sides
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second):
            raise InvalidRequest(
                f"{first_name} must hold one text, or as many as {second_name}: {len(second)}, not {len(first)}",
                first_name,
            )
        return list(zip(first, second, strict=True))


class RerankDocument(TranslatedBody):
    text: str


def _read_document(document: object) -> str:
    text = document.get("text") if isinstance(document, dict) else document
    if not isinstance(text, str):
        raise ValueError("a document must be a text, or an object with a text as `text`")
    return text


Document = Annotated[str, BeforeValidator(_read_document, json_schema_input_type=str | RerankDocument)]


class RerankRequest(PoolingBody):
    """A query and documents, in the fields of Cohere and Jina."""

    query: str
    documents: Annotated[list[Document], Field(fail_fast=True)] = Field(
        description="Texts, or objects of which only `text` is read."
    )
    top_n: int | None = Field(default=None, ge=0, description="Return only the best ones; 0 and absent: all.")
    return_documents: bool | None = Field(default=None, description="Repeat the documents' texts; true when absent.")
    return_embeddings: object | None = neutral(False)
    rank_fields: object | None = neutral(["text"], hint="only the field text of a document is read")
    max_tokens_per_query: int | None = Field(default=None, ge=1, description="Cut the query to this many tokens.")
    max_tokens_per_doc: int | None = Field(default=None, ge=1, description="Cut each document to this many tokens.")
    instruction: str | None = Field(
        default=None, description="What makes a document relevant, for models that read it."
    )
    use_activation: bool | None = Field(default=None, description="Scores after the activation; true when absent.")
    chat_template_kwargs: object | None = neutral({})
    max_chunks_per_doc: Ignored = Field(default=None, description="No effect: documents are not split.")

    def pairs(self, limits: Limits) -> list[tuple[NamedText, NamedText]]:
        """The query with each document. Raises InvalidRequest."""
        if not self.documents:
            raise InvalidRequest("documents must not be empty", "documents")
        check_count(self.documents, limits, "documents")
        query = NamedText("query", self.query)
        return [(query, document) for document in name_texts("documents", self.documents)]


def check_count(values: Sequence[object], limits: Limits, name: str) -> None:
    if len(values) > limits.prompts:
        raise InvalidRequest(f"{name} may hold at most {limits.prompts} texts, not {len(values)}", name)


class PoolingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class PoolingReply(BaseModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    usage: PoolingUsage


class Embedding(BaseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingReply(PoolingReply):
    data: list[Embedding]


class PooledVector(BaseModel):
    object: Literal["pooling"]
    index: int
    data: list[float] | list[list[float]] | str


class PooledVectorReply(PoolingReply):
    data: list[PooledVector]


class Classification(BaseModel):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassificationReply(PoolingReply):
    data: list[Classification]


class Score(BaseModel):
    object: Literal["score"]
    index: int
    score: float


class ScoreReply(PoolingReply):
    data: list[Score]


class RankedDocument(BaseModel):
    index: int
    document: RerankDocument | None = None
    relevance_score: float


class RerankReply(BaseModel):
    id: str
    model: str
    usage: PoolingUsage
    results: list[RankedDocument]
