"""The offline class, as in the README, with a real engine process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from serve_llm import LLM, RequestOutput, SamplingParams
from serve_llm.common.errors import EngineError, OptionError
from serve_llm.server.generate.generation import Generation
from serve_llm.server.http.errors import GenerationFailed, InvalidRequest
from serve_llm.server.prompt.validate import TextRequest
from serve_llm.server.response.metrics_snapshot import CounterValue, GaugeValue, HistogramValue

PROMPTS = ["class Stack:\n    def __init__(self):\n", "def main():\n", "import os\n"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", max_model_len="1k", kv_cache_memory="64MiB") as llm:
        yield llm


def test_outputs_have_the_shape_that_users_know(llm: LLM) -> None:
    outputs = llm.generate(
        PROMPTS, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    )
    assert [output.prompt for output in outputs] == PROMPTS
    for output in outputs:
        assert isinstance(output, RequestOutput) and output.finished
        (choice,) = output.outputs
        assert choice.text and choice.finish_reason == "length" and len(choice.token_ids) == 12
        assert choice.logprobs is not None and len(choice.logprobs) == 12
        assert all(token_id in found for token_id, found in zip(choice.token_ids, choice.logprobs, strict=True))
        assert choice.cumulative_logprob == pytest.approx(
            sum(found[i].logprob for i, found in zip(choice.token_ids, choice.logprobs, strict=True))
        )
        assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(output.prompt_token_ids)


def test_prompts_in_every_form_give_the_same(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=8)
    (text,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
    ids = text.prompt_token_ids
    for prompts in (ids, [ids], {"prompt": PROMPTS[0]}, {"prompt_token_ids": ids}):
        (output,) = llm.generate(prompts, params, use_tqdm=False)
        assert output.outputs[0].token_ids == text.outputs[0].token_ids


def test_cached_prefixes_are_shared_between_equal_salts_only(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=1)
    text = "def salted(number):\n" * 20
    cached = []
    for salt in ("a", "b", "a"):
        (output,) = llm.generate({"prompt": text, "cache_salt": salt}, params, use_tqdm=False)
        cached.append(output.num_cached_tokens)
    assert cached[0] == cached[1] == 0 and cached[2]


def test_any_iterable_of_prompts(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=2)
    outputs = llm.generate((prompt for prompt in PROMPTS), params, use_tqdm=False)
    assert [output.prompt for output in outputs] == PROMPTS
    message = {"role": "user", "content": "import os"}
    assert len(llm.chat(iter([message]), params, use_tqdm=False)) == 1
    assert len(llm.chat(([message] for _ in range(2)), params, use_tqdm=False)) == 2


def test_params_for_each_prompt_and_seeds(llm: LLM) -> None:
    params = [SamplingParams(seed=seed, max_tokens=10, n=2) for seed in (1, 1, 2)]
    first, second, third = llm.generate([PROMPTS[0]] * 3, params, use_tqdm=False)
    choices = [[choice.token_ids for choice in output.outputs] for output in (first, second, third)]
    assert choices[0] == choices[1] != choices[2]
    assert choices[0][0] != choices[0][1]
    with pytest.raises(InvalidRequest, match="2 sampling_params for 3 prompts"):
        llm.generate(PROMPTS, params[:2])


def test_chat_and_defaults(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Write a function that adds two numbers."}]
    one = llm.chat(messages, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    two = llm.chat([messages, messages], SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    assert [output.outputs[0].text for output in two] == [one[0].outputs[0].text] * 2
    assert llm.generate("x", use_tqdm=False)[0].outputs[0].finish_reason in ("length", "stop")


def test_a_template_for_one_call(llm: LLM) -> None:
    messages = [{"role": "user", "content": "import os"}]
    params = SamplingParams(max_tokens=1)
    (given,) = llm.chat(messages, params, use_tqdm=False, chat_template="{{ messages[0].content }}")
    assert given.prompt_token_ids == llm.get_tokenizer().encode("import os", add_special_tokens=False)
    with pytest.raises(InvalidRequest, match="the chat template is not valid Jinja"):
        llm.chat(messages, params, use_tqdm=False, chat_template="{% broken")
    shape = "{% if messages[0].content is string %}a{% else %}{{ messages[0].content[0].text }}{% endif %}"
    asked = {"chat_template": shape, "use_tqdm": False}
    (parts,) = llm.chat(messages, params, **asked, chat_template_content_format="openai")
    assert parts.prompt_token_ids == given.prompt_token_ids
    with pytest.raises(InvalidRequest, match="chat_template_content_format must be one of auto, string, openai"):
        llm.chat(messages, params, **asked, chat_template_content_format="parts")


def test_the_tokenizer_counts_and_renders_as_the_engine_does(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    (output,) = llm.generate(PROMPTS[0], SamplingParams(max_tokens=1), use_tqdm=False)
    assert tokenizer(PROMPTS[0])["input_ids"] == output.prompt_token_ids
    messages = [{"role": "user", "content": "import os"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    (answer,) = llm.chat(messages, SamplingParams(max_tokens=1), use_tqdm=False)
    assert ids == answer.prompt_token_ids


def test_stop_strings_end_the_text(llm: LLM) -> None:
    whole = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=30), use_tqdm=False)[0].outputs[0].text
    stop = whole[5:9]
    params = SamplingParams(temperature=0, max_tokens=30, stop=stop)
    choice = llm.generate(PROMPTS[0], params, use_tqdm=False)[0].outputs[0]
    assert choice.text == whole[: whole.index(stop)]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)


def test_mistakes_are_named_and_cost_nothing(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="max_tokens"):
        llm.generate("x", SamplingParams(max_tokens=5000))
    with pytest.raises(InvalidRequest, match="temperature"):
        SamplingParams(temperature=-1)
    with pytest.raises(OptionError, match="max_model_length; did you mean max_model_len"):
        LLM("demo", max_model_length=5)
    assert llm.generate("x", SamplingParams(max_tokens=1), use_tqdm=False)[0].finished


def test_metrics_and_a_reset_of_the_prefix_cache(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3)
    prompt = {"prompt_token_ids": list(range(100, 164))}
    before = {metric.name: metric for metric in llm.get_metrics()}
    cached = [llm.generate(prompt, params, use_tqdm=False)[0].num_cached_tokens for _ in range(2)]
    assert llm.reset_prefix_cache() is True
    cached += [llm.generate(prompt, params, use_tqdm=False)[0].num_cached_tokens for _ in range(2)]
    assert cached[0] == cached[2] == 0 and cached[1] == cached[3] > 0
    after = {metric.name: metric for metric in llm.get_metrics()}
    tokens, running = after["serve_llm_generation_tokens"], after["serve_llm_num_requests_running"]
    assert isinstance(tokens, CounterValue) and tokens.labels == {"model_name": "demo", "engine": "0"}
    if "serve_llm_generation_tokens" in before:
        assert tokens.value - before["serve_llm_generation_tokens"].value == 12
    assert isinstance(running, GaugeValue) and running.value == 0
    latency = after["serve_llm_e2e_request_latency_seconds"]
    assert isinstance(latency, HistogramValue) and latency.count == latency.buckets["+Inf"] >= 4 and latency.sum > 0
    assert not [name for name in after if "http" in name or "stored_responses" in name]


def test_priorities(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=0, max_tokens=3)
    opened = []
    open_generation = llm._generator.open

    def record(request: TextRequest) -> Generation:
        opened.append(request.priority)
        return open_generation(request)

    monkeypatch.setattr(llm._generator, "open", record)
    plain = llm.generate(PROMPTS, params, use_tqdm=False)
    ordered = llm.generate(PROMPTS, params, use_tqdm=False, priority=[2, -1, 1])
    assert opened == [0, 0, 0, 2, -1, 1]
    assert [one.outputs[0].text for one in ordered] == [one.outputs[0].text for one in plain]
    with pytest.raises(InvalidRequest, match="2 priorities for 3 prompts"):
        llm.generate(PROMPTS, params, priority=[1, 2])
    with pytest.raises(InvalidRequest, match="priority must fit into 32 bits"):
        llm.generate("x", params, priority=[2**31])


def test_wrong_types_never_reach_the_engine(llm: LLM) -> None:
    params = llm.get_default_sampling_params()
    params.max_tokens = 2.0  # type: ignore[assignment]
    params.ignore_eos = True
    (output,) = llm.generate("x", params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 2
    params.top_k = "5"  # type: ignore[assignment]
    for given in (params, [params], [{"top_k": 5}], {"top_k": 5}, 5):
        with pytest.raises(InvalidRequest, match=r"top_k|sampling_params"):
            llm.generate(["x"], given)  # type: ignore[arg-type]


def test_a_lone_surrogate_is_named(llm: LLM) -> None:
    for call in (
        lambda: llm.generate("a\ud800"),
        lambda: llm.chat([{"role": "user", "content": "\ud800"}]),
        lambda: llm.generate("a", SamplingParams(bad_words=["\udc00"])),
    ):
        with pytest.raises(InvalidRequest, match=r"lone surrogate, '\\ud[8c]00' at index \d+"):
            call()


def test_a_request_that_the_engine_cannot_read_fails_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_llm.server.sampling_params.convert_fields", lambda struct: None)
    with pytest.raises(GenerationFailed, match="max_tokens"):
        llm.generate("x", SamplingParams(max_tokens=2.0), use_tqdm=False)  # type: ignore[arg-type]
    assert llm.generate("x", SamplingParams(max_tokens=1), use_tqdm=False)[0].finished


def test_a_closed_engine_says_so() -> None:
    llm = LLM("demo", max_model_len="1k", kv_cache_memory="16MiB", runner="generate", convert="embed")
    llm.close()
    llm.close()
    for call in (lambda: llm.generate("x"), lambda: llm.chat([{"role": "user", "content": "x"}])):
        with pytest.raises(EngineError, match="closed"):
            call()
    with pytest.raises(EngineError, match="closed"):
        llm.embed("x")


def test_a_script_of_four_lines_needs_no_main_guard_and_leaves_nothing(tmp_path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from serve_llm import LLM, SamplingParams\n"
        "llm = LLM('demo', kv_cache_memory='32MiB')\n"
        "outputs = llm.generate(['def main():'], SamplingParams(temperature=0, max_tokens=4))\n"
        "print(repr(outputs[0].outputs[0].text))\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("'") and "Processed prompts: 100%" in done.stderr
