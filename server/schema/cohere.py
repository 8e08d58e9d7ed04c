"""POST /v2/embed, Cohere's API for embeddings: request and reply.

Unknown fields have no effect; the response names them in a header.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from serve_llm.common.options.limits import Limits
from serve_llm.server.http.errors import InvalidRequest, Unsupported
from serve_llm.server.schema.common import Ignored, Strings, TranslatedBody
from serve_llm.server.schema.pooling import Dimensions, NamedText, PoolingBody, check_count, name_texts

EmbeddingType = Literal["float", "base64", "binary", "ubinary"]


class CohereContent(TranslatedBody):
    type: str = Field(description="text; others are refused.")
    text: str | None = None


class CohereInput(TranslatedBody):
    content: Annotated[list[CohereContent], Field(fail_fast=True)]


class CohereEmbedRequest(TranslatedBody):
    model: str | None = Field(default=None, description="A served model's name; the served model when absent.")
    texts: Strings | None = None
    inputs: Annotated[list[CohereInput], Field(fail_fast=True)] | None = Field(
        default=None, description="Instead of texts: lists of texts that are joined as lines."
    )
    images: object | None = Field(default=None, description="Refused: only texts are embedded.")
    input_type: Ignored = Field(default=None, description="No effect: the client adds the prompt of a query itself.")
    embedding_types: list[EmbeddingType | Literal["int8", "uint8"]] | None = Field(
        default=None, description="float when absent. binary and ubinary hold 8 signs in a number. Others are refused."
    )
    output_dimension: Dimensions | None = Field(
        default=None, description="Cut embeddings to this many numbers, if the model was trained for it."
    )
    truncate: Literal["NONE", "START", "END"] | None = Field(
        default=None, description="Where texts that are too long are cut; NONE refuses them. END when absent."
    )
    max_tokens: int | None = Field(default=None, ge=1, description="Cut each text to this many tokens.")
    priority: int | None = Field(default=None, description="Smaller values run first; between -2**31 and 2**31 - 1.")

    def name_texts(self, limits: Limits) -> list[NamedText]:
        """Return what is embedded, with its place in the body. Raises InvalidRequest, Unsupported."""
        if self.images:
            raise Unsupported("images are not supported, only texts", "images")
        name = "texts" if self.inputs is None else "inputs"
        if (self.texts is None) == (self.inputs is None):
            raise InvalidRequest("exactly one of texts and inputs is required", "texts")
        texts = self.texts if self.inputs is None else [_join(one, index) for index, one in enumerate(self.inputs)]
        if not texts:
            raise InvalidRequest(f"{name} must not be empty", name)
        check_count(texts, limits, name)
        return name_texts(name, texts)

    def list_types(self) -> list[EmbeddingType]:
        """List the forms of the vectors in the reply. Raises Unsupported."""
        types: list[EmbeddingType] = []
        for index, name in enumerate(self.embedding_types or ("float",)):
            if name == "int8" or name == "uint8":
                message = f"embeddings of type {name} are not supported: their range depends on the model"
                raise Unsupported(message, f"embedding_types[{index}]")
            types.append(name)
        return list(dict.fromkeys(types))

    def to_pooling_body(self) -> PoolingBody:
        return PoolingBody(
            truncate_prompt_tokens=None if self.truncate == "NONE" else self.max_tokens or -1,
            truncation_side="left" if self.truncate == "START" else "right",
            priority=self.priority,
        )


def _join(one: CohereInput, index: int) -> str:
    texts = []
    for number, part in enumerate(one.content):
        place = f"inputs[{index}].content[{number}]"
        if part.type != "text":
            raise Unsupported(f"{place}: content of type {part.type[:200]!r} is not supported, only text", place)
        if part.text is None:
            raise InvalidRequest(f"{place}.text is required", f"{place}.text")
        texts.append(part.text)
    return "\n".join(texts)


class CohereEmbedReply(BaseModel):
    id: str
    response_type: Literal["embeddings_by_type"]
    embeddings: dict[EmbeddingType, list[list[float] | list[int] | str]]
    texts: list[str]
    meta: dict[str, Any] = Field(description="billed_units.input_tokens: the number of tokens.")
