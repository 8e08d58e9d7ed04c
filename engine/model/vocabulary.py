"""The embedding and the LM head of one rank. If they are tied and packed, they share memory."""

from __future__ import annotations

from functools import cached_property

from torch import Tensor
from torch.nn import functional

from serve_llm.engine.model.build import ModelBuilder, WeightSlice
from serve_llm.engine.model.lora import LoRAPart
from serve_llm.engine.model.quantization_spec import GroupQuantForm
from serve_llm.engine.model.spec import ModelSpec
from serve_llm.kernels.embedding_table import EmbeddingTable, LookUp, zeros
from serve_llm.kernels.linear import Linear
from serve_llm.kernels.linear_grouped import GroupQuantWeight


class VocabularyTables:
    """Loads the embedding and the LM head. A rank with both must load the embedding first."""

    def __init__(self, spec: ModelSpec, builder: ModelBuilder) -> None:
        self._spec = spec
        self._builder = builder
        self._shape = spec.vocab_size, spec.embedding_size or spec.hidden_size
        self._part = WeightSlice(0, builder.shard.vocabulary(spec.vocab_size))
        self._tied: Tensor | EmbeddingTable | None = None  # the embedding, if it is also the head's weight

    def load_embedding(self, has_head: bool) -> LookUp:
        """Return a function that looks up rows by their numbers on this rank: (tokens,) int64 -> (tokens, embedding
        size). has_head: whether the rank also has the LM head."""
        spec = self._spec
        is_tied = spec.tie_word_embeddings and has_head
        bias = self._bias if is_tied else None
        table = self._load_table(bias)
        weight = None if table is not None else self._load("embedding.weight")
        self._tied = (table or weight) if is_tied else None
        if table is not None:
            return table.look_up
        assert weight is not None
        return (lambda ids: functional.embedding(ids, weight)) if len(weight) else zeros(self._shape[1], weight.dtype)

    def load_head(self) -> Linear:
        """Return a function from hidden states (rows, embedding size) to this rank's part of the logits."""
        builder = self._builder
        tied = self._tied
        builder.scoped("head").describe("VocabParallelLMHead" + ("" if tied is None else " (tied to the embedding)"))
        head = self._load_linear()
        if builder.lora is None:
            return head
        part = LoRAPart(self._shape, range(self._shape[1]), self._part.range)
        return builder.lora.wrap_head(head, self._bias, part)

    def _load_linear(self) -> Linear:
        spec = self._spec
        builder = self._builder
        tied = self._tied
        if isinstance(tied, EmbeddingTable):
            return tied.multiply
        name = "embedding.weight" if spec.tie_word_embeddings else "head.weight"
        grouped = self._load_grouped(name, spec.head_form)
        if grouped is not None:
            return builder.kernels.pack_grouped(grouped, self._bias, builder.dtype)
        weight = self._load(name) if tied is None else tied
        if spec.int8_lm_head:
            return builder.kernels.pack_int8(*builder.kernels.quantise_int8(weight), self._bias)
        return builder.kernels.pack(weight, self._bias)

    def _load_table(self, bias: Tensor | None) -> EmbeddingTable | None:
        """Load the embedding, packed like the head that is tied to it; None if it stays in the model's dtype."""
        builder = self._builder
        grouped = self._load_grouped("embedding.weight", self._spec.embedding_form)
        if grouped is not None:
            return builder.kernels.pack_grouped_table(grouped, bias, builder.dtype)
        if not self._spec.int8_embedding:
            return None
        weight = builder.load(f"{builder.prefix}embedding.weight", self._shape, self._part)
        numbers, scales = builder.kernels.quantise_int8(weight)
        builder.describe_share("embedding.weight", numbers, self._shape)
        return builder.kernels.pack_int8_table(numbers, scales, bias, builder.dtype)

    def _load_grouped(self, name: str, form: GroupQuantForm | None) -> GroupQuantWeight | None:
        """form: the form in which the checkpoint stores it, or to which it is rounded."""
        if form is None:
            return None
        builder = self._builder
        full_name = builder.prefix + name
        if builder.grouped is not None and builder.grouped.rounds_to_int4:
            grouped: GroupQuantWeight | None = builder.quantise(builder.load(full_name, self._shape, self._part), form)
        else:
            grouped = builder.load_grouped(full_name, self._shape, self._part)
        if grouped is not None:
            builder.describe_share(name, grouped.codes, self._shape, f"{form.bits} bits in groups")
        return grouped

    def _load(self, name: str) -> Tensor:
        return self._builder.table(name, *self._shape, part=self._part)

    @cached_property
    def _bias(self) -> Tensor | None:
        """The head's bias."""
        if not self._spec.lm_head_bias:
            return None
        return self._builder.parameter("head.bias", self._spec.vocab_size, part=self._part)
