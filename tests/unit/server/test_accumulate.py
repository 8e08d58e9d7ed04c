"""One choice's text: the fold of its deltas is the same however tokens come and whenever they are taken."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from serve_llm.engine.types import FinishReason, Output
from serve_llm.server.prompt.model import ServedModel
from serve_llm.server.prompt.params import SamplingParams
from serve_llm.server.reply.accumulate import Accumulator
from serve_llm.server.reply.delta import Delta, TokenEntry
from serve_llm.server.reply.detokenize import DetokenizerFactory
from support.fakes import logprobs_of

EOS = 1
PROMPT = [40, 41]


@dataclass
class Folded:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    entries: list[TokenEntry] = field(default_factory=list)
    last: Delta | None = None

    def add(self, delta: Delta) -> None:
        assert delta.first == (self.last is None)
        assert self.last is None or self.last.finish_reason is None, "a delta after the final one"
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.entries += delta.entries
        self.last = delta


def run(
    model: ServedModel,
    ids: list[int],
    params: SamplingParams,
    sizes: list[int],
    takes: list[bool],
    echo: str | None = None,
) -> tuple[Folded, Accumulator]:
    """Push ids in outputs of these sizes, with LENGTH at the end, and take after those outputs that `takes` says."""
    accumulator = Accumulator(0, PROMPT, params, DetokenizerFactory(model.tokenizer), (EOS,), echo)
    folded, start, number = Folded(), 0, 0
    while accumulator.finish_reason is None:
        size = sizes[number % len(sizes)]
        part = ids[start : start + size]
        start += size
        output = Output(0, part, FinishReason.LENGTH if start >= len(ids) else None)
        if params.logprobs is not None:
            output.logprobs = [logprobs_of(token_id, params.logprobs) for token_id in part]
        if number == 0 and (params.prompt_logprobs is not None or (echo is not None and params.logprobs is not None)):
            output.prompt_logprobs = [logprobs_of(token_id, 1) for token_id in PROMPT[1:]]
        accumulator.push(output)
        if takes[number % len(takes)] and accumulator.finish_reason is None:
            folded.add(accumulator.take())
        number += 1
    folded.add(accumulator.take())
    return folded, accumulator


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
def test_the_fold_does_not_depend_on_when_it_is_taken(
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
    folded, accumulator = run(model, ids, params, sizes, takes)
    at_once, reference = run(model, ids, params, [1], [False])
    assert folded.text == at_once.text
    assert folded.token_ids == at_once.token_ids
    assert folded.entries == at_once.entries
    assert folded.last is not None and at_once.last is not None
    assert (folded.last.finish_reason, folded.last.stop_reason) == (
        at_once.last.finish_reason,
        at_once.last.stop_reason,
    )
    assert accumulator.num_tokens == reference.num_tokens == len(folded.token_ids)
    if not stops:
        assert folded.text == text


def test_a_stop_string_over_token_borders_cuts_and_counts(model: ServedModel) -> None:
    ids = model.tokenizer.encode("one two three four", add_special_tokens=False)
    folded, accumulator = run(model, ids, SamplingParams(stop="wo th"), [1], [True])
    assert folded.text == "one t"
    assert folded.last is not None and folded.last.stop_reason == "wo th"
    assert folded.last.finish_reason is FinishReason.STOP
    needed = next(n for n in range(len(ids)) if "wo th" in model.tokenizer.decode(ids[:n]))
    assert accumulator.num_tokens == needed


def test_tokens_behind_the_stop_string_in_one_output_are_not_counted(model: ServedModel) -> None:
    ids = model.tokenizer.encode("one two three four", add_special_tokens=False)
    one_by_one = run(model, ids, SamplingParams(stop=" two"), [1], [True])[1]
    at_once = run(model, ids, SamplingParams(stop=" two"), [100], [True])[1]
    assert at_once.num_tokens == one_by_one.num_tokens < len(ids)


def test_an_eos_id_is_counted_but_is_no_text_and_no_stop_reason(model: ServedModel) -> None:
    accumulator = Accumulator(0, PROMPT, SamplingParams(), DetokenizerFactory(model.tokenizer), (EOS,), None)
    word = model.tokenizer.encode("a", add_special_tokens=False)
    accumulator.push(Output(0, [*word, EOS], FinishReason.STOP, EOS))
    delta = accumulator.take()
    assert (delta.text, delta.token_ids, delta.stop_reason) == ("a", [*word, EOS], None)
    assert accumulator.num_tokens == 2


def test_a_stop_id_is_named_and_shown_only_if_wanted(model: ServedModel) -> None:
    a, b = (model.tokenizer.encode(text, add_special_tokens=False) for text in ("a", "b"))
    for include, text in ((False, "a"), (True, "ab")):
        params = SamplingParams(stop_token_ids=b, include_stop_str_in_output=include)
        accumulator = Accumulator(0, PROMPT, params, DetokenizerFactory(model.tokenizer), (EOS,), None)
        accumulator.push(Output(0, a))
        accumulator.push(Output(0, b, FinishReason.STOP, b[0]))
        delta = accumulator.take()
        assert (delta.text, delta.stop_reason) == (text, b[0])


def test_logprobs_come_with_their_text_and_end_with_it(model: ServedModel) -> None:
    ids = model.tokenizer.encode("x = 1; y = 2", add_special_tokens=False)
    folded, _ = run(model, ids, SamplingParams(logprobs=1, stop="; y"), [1], [True])
    assert folded.text == "x = 1"
    texts = [model.tokenizer.token_text(entry.token_id) for entry in folded.entries]
    assert "".join(texts).startswith("x = 1") and all(entry.offset < len("x = 1") for entry in folded.entries)
    assert [entry.offset for entry in folded.entries] == [len("".join(texts[:n])) for n in range(len(texts))]


def test_echo_stands_in_front_with_its_logprobs(model: ServedModel) -> None:
    ids = model.tokenizer.encode("cd", add_special_tokens=False)
    prompt_text = model.tokenizer.decode(PROMPT)
    folded, _ = run(model, ids, SamplingParams(logprobs=1), [1], [True], echo=prompt_text)
    assert folded.text == prompt_text + "cd"
    assert [entry.token_id for entry in folded.entries] == PROMPT + ids
    assert folded.entries[0].logprobs is None and folded.entries[1].logprobs is not None
    assert folded.entries[len(PROMPT)].offset == len(prompt_text)


def test_prompt_logprobs_come_once_and_only_if_asked_for(model: ServedModel) -> None:
    for asked, found in ((1, [logprobs_of(PROMPT[1], 1)]), (None, None)):
        accumulator = Accumulator(
            0, PROMPT, SamplingParams(prompt_logprobs=asked), DetokenizerFactory(model.tokenizer), (), None
        )
        accumulator.push(Output(0, [50], prompt_logprobs=[logprobs_of(PROMPT[1], 1)]))
        assert accumulator.take().prompt_logprobs == found
        accumulator.push(Output(0, [50]))
        assert accumulator.take().prompt_logprobs is None


def test_no_tokens_at_all(model: ServedModel) -> None:
    half_character = model.tokenizer.encode("\U0001f600", add_special_tokens=False)[:1]
    accumulator = Accumulator(0, half_character, SamplingParams(), DetokenizerFactory(model.tokenizer), (), "p")
    accumulator.push(Output(0, [], FinishReason.LENGTH))
    delta = accumulator.take()
    assert (delta.text, delta.token_ids, delta.finish_reason) == ("p", [], FinishReason.LENGTH)
