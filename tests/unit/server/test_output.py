"""The text of a choice does not depend on how tokens are grouped and when deltas are taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from serve_llm.common.types import EngineCoreOutput, FinishReason
from serve_llm.server.dialects.parser import DialectParser
from serve_llm.server.dialects.pieces import ContentPiece, Piece
from serve_llm.server.dialects.tool import Tool
from serve_llm.server.generate.delta import Delta, TokenEntry
from serve_llm.server.generate.detokenize import Detokenizer, DetokenizerFactory
from serve_llm.server.generate.output import OutputProcessor, merge_pieces
from serve_llm.server.prompt.model import ServedModel
from serve_llm.server.sampling_params import SamplingParams
from support.fakes import logprobs_of
from support.tools import DIALECT, write_call

EOS = 1
PROMPT = [40, 41]


@dataclass
class Folded:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    entries: list[TokenEntry] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    last: Delta | None = None

    def add(self, delta: Delta) -> None:
        assert delta.first == (self.last is None)
        assert self.last is None or self.last.finish_reason is None, "a delta after the final one"
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.entries += delta.entries
        self.pieces += delta.ordered_pieces
        self.last = delta


def run(
    model: ServedModel,
    ids: list[int],
    params: SamplingParams,
    sizes: list[int],
    takes: list[bool],
    echo: str | None = None,
    parser: DialectParser | None = None,
) -> tuple[Folded, OutputProcessor]:
    """Push ids in outputs of these sizes, the last with LENGTH; take a delta after the outputs that `takes` marks."""
    processor = OutputProcessor(0, PROMPT, params, DetokenizerFactory(model.tokenizer), (EOS,), echo, parser)
    folded, start, number = Folded(), 0, 0
    while processor.finish_reason is None:
        size = sizes[number % len(sizes)]
        part = ids[start : start + size]
        start += size
        output = EngineCoreOutput(0, part, FinishReason.LENGTH if start >= len(ids) else None)
        if params.logprobs is not None:
            output.logprobs = [logprobs_of(token_id, params.logprobs) for token_id in part]
        if number == 0 and (params.prompt_logprobs is not None or (echo is not None and params.logprobs is not None)):
            output.prompt_logprobs = [logprobs_of(token_id, 1) for token_id in PROMPT[1:]]
        processor.push(output)
        if takes[number % len(takes)] and processor.finish_reason is None:
            folded.add(processor.take())
        number += 1
    folded.add(processor.take())
    return folded, processor


SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=5)
TAKES = st.lists(st.booleans(), min_size=1, max_size=7)
TEXTS = st.text("abc \u00e9\u65e5\U0001f600", min_size=1, max_size=30)


@given(
    text=TEXTS,
    stops=st.lists(st.text("abc \u00e9\u65e5", min_size=1, max_size=3), max_size=3),
    include=st.booleans(),
    logprobs=st.sampled_from([None, 0, 2]),
    min_tokens=st.integers(0, 5),
    sizes=SIZES,
    takes=TAKES,
)
def test_the_text_does_not_depend_on_when_deltas_are_taken(
    model: ServedModel,
    text: str,
    stops: list[str],
    include: bool,
    logprobs: int | None,
    min_tokens: int,
    sizes: list[int],
    takes: list[bool],
) -> None:
    ids = model.tokenizer.encode(text, add_special_tokens=False)
    params = SamplingParams(
        stop=stops, include_stop_str_in_output=include, logprobs=logprobs, min_tokens=min_tokens, max_tokens=1000
    )
    folded, processor = run(model, ids, params, sizes, takes)
    at_once, reference = run(model, ids, params, [1], [False])
    assert folded.text == at_once.text
    assert folded.token_ids == at_once.token_ids
    assert folded.entries == at_once.entries
    assert folded.last is not None and at_once.last is not None
    assert (folded.last.finish_reason, folded.last.stop_reason) == (
        at_once.last.finish_reason,
        at_once.last.stop_reason,
    )
    assert processor.num_tokens == reference.num_tokens == len(folded.token_ids)
    if not stops:
        assert folded.text == text


TURNS = st.lists(
    st.sampled_from(["<think>\n", "\n</think>\n\n", "a", "b ", "</tool", write_call("clock", at="ab"), "\n", " <"]),
    min_size=1,
    max_size=6,
).map("".join)


@given(
    text=TURNS,
    stops=st.lists(st.sampled_from(["b a", "<", "a"]), max_size=2),
    logprobs=st.sampled_from([None, 0]),
    sizes=SIZES,
    takes=TAKES,
)
def test_reasoning_and_calls_do_not_depend_on_when_deltas_are_taken(
    model: ServedModel, text: str, stops: list[str], logprobs: int | None, sizes: list[int], takes: list[bool]
) -> None:
    ids = model.tokenizer.encode(text, add_special_tokens=False)
    params = SamplingParams(stop=stops, logprobs=logprobs, max_tokens=1000)
    tools = [Tool("clock")]
    folded, processor = run(model, ids, params, sizes, takes, None, DialectParser(DIALECT, tools, generator=Random(0)))
    at_once, reference = run(model, ids, params, [1], [False], None, DialectParser(DIALECT, tools, generator=Random(0)))
    assert (folded.text, folded.token_ids, folded.entries) == (at_once.text, at_once.token_ids, at_once.entries)
    assert list(merge_pieces(folded.pieces)) == at_once.pieces
    assert folded.last is not None and at_once.last is not None
    assert folded.last.num_calls == at_once.last.num_calls
    assert processor.num_reasoning_tokens == reference.num_reasoning_tokens
    assert "".join(piece.text for piece in folded.pieces if isinstance(piece, ContentPiece)) == folded.text


def test_a_stop_string_across_tokens_cuts_text_and_count(model: ServedModel) -> None:
    ids = model.tokenizer.encode("one two three four", add_special_tokens=False)
    folded, processor = run(model, ids, SamplingParams(stop="wo th"), [1], [True])
    assert folded.text == "one t"
    assert folded.last is not None and folded.last.stop_reason == "wo th"
    assert folded.last.finish_reason is FinishReason.STOP
    needed = next(n for n in range(len(ids)) if "wo th" in model.tokenizer.decode(ids[:n]))
    assert processor.num_tokens == needed


def test_tokens_after_a_stop_string_are_not_counted(model: ServedModel) -> None:
    ids = model.tokenizer.encode("one two three four", add_special_tokens=False)
    one_by_one = run(model, ids, SamplingParams(stop=" two"), [1], [True])[1]
    at_once = run(model, ids, SamplingParams(stop=" two"), [100], [True])[1]
    assert at_once.num_tokens == one_by_one.num_tokens < len(ids)


def test_an_eos_id_counts_without_text_or_stop_reason(model: ServedModel) -> None:
    processor = OutputProcessor(0, PROMPT, SamplingParams(), DetokenizerFactory(model.tokenizer), (EOS,), None)
    word = model.tokenizer.encode("a", add_special_tokens=False)
    processor.push(EngineCoreOutput(0, [*word, EOS], FinishReason.STOP, EOS))
    delta = processor.take()
    assert (delta.text, delta.token_ids, delta.stop_reason) == ("a", [*word, EOS], None)
    assert processor.num_tokens == 2


def test_a_stop_id_is_the_stop_reason_and_shown_only_on_request(model: ServedModel) -> None:
    a, b = (model.tokenizer.encode(text, add_special_tokens=False) for text in ("a", "b"))
    for include, text in ((False, "a"), (True, "ab")):
        params = SamplingParams(stop_token_ids=b, include_stop_str_in_output=include)
        processor = OutputProcessor(0, PROMPT, params, DetokenizerFactory(model.tokenizer), (EOS,), None)
        processor.push(EngineCoreOutput(0, list(a)))
        processor.push(EngineCoreOutput(0, b, FinishReason.STOP, b[0]))
        delta = processor.take()
        assert (delta.text, delta.stop_reason) == (text, b[0])


def test_logprobs_are_released_and_cut_with_their_text(model: ServedModel) -> None:
    ids = model.tokenizer.encode("x = 1; y = 2", add_special_tokens=False)
    folded, _ = run(model, ids, SamplingParams(logprobs=1, stop="; y"), [1], [True])
    assert folded.text == "x = 1"
    texts = [model.tokenizer.token_text(entry.token_id) for entry in folded.entries]
    assert "".join(texts).startswith("x = 1") and all(entry.offset < len("x = 1") for entry in folded.entries)
    assert [entry.offset for entry in folded.entries] == [len("".join(texts[:n])) for n in range(len(texts))]


def test_echo_precedes_the_text_with_its_logprobs(model: ServedModel) -> None:
    ids = model.tokenizer.encode("cd", add_special_tokens=False)
    prompt_text = model.tokenizer.decode(PROMPT)
    folded, _ = run(model, ids, SamplingParams(logprobs=1), [1], [True], echo=prompt_text)
    assert folded.text == prompt_text + "cd"
    assert [entry.token_id for entry in folded.entries] == PROMPT + ids
    assert folded.entries[0].logprobs is None and folded.entries[1].logprobs is not None
    assert folded.entries[len(PROMPT)].offset == len(prompt_text)


def test_prompt_logprobs_come_once_and_only_on_request(model: ServedModel) -> None:
    for asked, found in ((1, [logprobs_of(PROMPT[1], 1)]), (None, None)):
        processor = OutputProcessor(
            0, PROMPT, SamplingParams(prompt_logprobs=asked), DetokenizerFactory(model.tokenizer), (), None
        )
        processor.push(EngineCoreOutput(0, [50], prompt_logprobs=[logprobs_of(PROMPT[1], 1)]))
        assert processor.take().prompt_logprobs == found
        processor.push(EngineCoreOutput(0, [50]))
        assert processor.take().prompt_logprobs is None


def test_no_tokens_at_all(model: ServedModel) -> None:
    half_character = model.tokenizer.encode("\U0001f600", add_special_tokens=False)[:1]
    processor = OutputProcessor(0, half_character, SamplingParams(), DetokenizerFactory(model.tokenizer), (), "p")
    processor.push(EngineCoreOutput(0, [], FinishReason.LENGTH))
    delta = processor.take()
    assert (delta.text, delta.token_ids, delta.finish_reason) == ("p", [], FinishReason.LENGTH)


class CountingFactory(DetokenizerFactory):
    """Records the ids that detokenizers get as their context."""

    contexts: list[list[int]]

    def create(
        self, prompt_ids: Sequence[int], skip_special_tokens: bool, keep_delimiters: bool = False
    ) -> Detokenizer:
        self.contexts.append(list(prompt_ids))
        return super().create(prompt_ids, skip_special_tokens, keep_delimiters)


def test_a_prompt_is_decoded_only_if_text_follows(model: ServedModel) -> None:
    factory = CountingFactory(model.tokenizer)
    factory.contexts = []
    for max_tokens in (0, 1):
        OutputProcessor(0, PROMPT, SamplingParams(max_tokens=max_tokens), factory, (EOS,))
    assert factory.contexts == [[], PROMPT]
