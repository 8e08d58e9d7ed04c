"""Masks of allowed ids. Threads fill them while a device computes a step: only sampling waits for them.

If the CPU itself computes the step, masks known to be cheap are filled before it instead. Filling them at the same time
takes as much processor time and interrupts the threads of the step, which costs several times as much.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

import numpy as np
from llguidance import LLTokenizer
from llguidance.numpy import fill_next_token_bitmask

from serve_llm.common.grammar import matcher_error
from serve_llm.engine.structured_output.state import ConstraintState

if TYPE_CHECKING:  # the engine starts workers before it loads torch
    from serve_llm.engine.sampling.grammar_mask import Mask

MIN_ROWS = 4  # minimum number of masks for a thread; fewer are done before another thread has woken up
MAX_THREADS = 8


class MaskFiller:
    """Fills the masks of rows in its own threads: some for costly grammars, others for those that must not wait."""

    def __init__(self, vocab_size: int, fill_cheap_at_once: bool) -> None:
        """vocab_size: number of logits. fill_cheap_at_once: fill masks known to be cheap in the calling thread."""
        self._num_words = -(-vocab_size // 32)
        self._fill_cheap_at_once = fill_cheap_at_once
        self._num_threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
        self._executor = ThreadPoolExecutor(self._num_threads, "mask")
        self._costly_executor = ThreadPoolExecutor(max(1, self._num_threads // 2), "costly mask")

    def start(self, states: Sequence[ConstraintState], tokenizer: LLTokenizer) -> None:
        """Start to fill the next masks of requests whose state has changed."""
        in_threads: list[ConstraintState] = []
        at_once: list[ConstraintState] = []
        for state in states:
            if not state.needs_mask:
                state.mask = None
                continue
            state.mask = Future()
            if state.is_costly:
                self._costly_executor.submit(self._fill_all, [state], tokenizer)
            elif self._fill_cheap_at_once and state.mask_seconds is not None:
                at_once.append(state)
            else:
                in_threads.append(state)
        num_jobs = min(self._num_threads, -(-len(in_threads) // MIN_ROWS))
        for index in range(num_jobs):
            self._executor.submit(self._fill_all, in_threads[index::num_jobs], tokenizer)
        self._fill_all(at_once, tokenizer)

    def start_drafts(
        self, state: ConstraintState, draft_ids: Sequence[int], tokenizer: LLTokenizer
    ) -> list[Future[Mask]]:
        """Start to fill the masks after each id of a draft; after an id that cannot come, a mask allows none."""
        masks: list[Future[Mask]] = [Future() for _ in draft_ids]
        if masks:
            self._executor.submit(self._fill_drafts, state, draft_ids, masks, tokenizer)
        return masks

    def _fill_drafts(
        self, state: ConstraintState, draft_ids: Sequence[int], masks: Sequence[Future[Mask]], tokenizer: LLTokenizer
    ) -> None:
        try:
            assert state.mask is not None
            state.mask.result()  # submitted before, so it is being filled
            state = state.copy()
            for draft_id, mask in zip(draft_ids, masks, strict=True):
                if not (state.error or state.has_ended or state.is_complete):
                    state.advance(draft_id)
                has_next = not (state.error or state.has_ended or state.is_complete)
                mask.set_result(self._fill(state, tokenizer) if has_next else np.zeros(self._num_words, np.int32))
        except BaseException as error:  # raised when the masks are waited for
            for mask in masks:
                if not mask.done():
                    mask.set_exception(error)

    def _fill_all(self, states: Sequence[ConstraintState], tokenizer: LLTokenizer) -> None:
        for state in states:
            assert state.mask is not None
            started = time.thread_time()
            try:
                mask = self._fill(state, tokenizer)
            except BaseException as error:  # raised when the mask is waited for
                state.mask.set_exception(error)
                continue
            state.mask_seconds = time.thread_time() - started
            state.mask.set_result(mask)

    def _fill(self, state: ConstraintState, tokenizer: LLTokenizer) -> Mask:
        """Return the mask of one row; if its grammar fails, it allows no id and `state.error` is set."""
        masks = np.zeros((1, -(-tokenizer.vocab_size // 32)), np.int32)
        mask: Mask = masks[0, : self._num_words]
        if state.forced_ids:
            _set_bit(mask, state.forced_ids[0], True)
            return mask
        if state.error:
            return mask
        if state.matcher is None:  # after drafts that are forced
            mask[:] = -1
            return mask
        fill_next_token_bitmask(state.matcher, masks, 0)
        if state.matcher.is_error():
            state.error = matcher_error(state.matcher)
            mask[:] = 0
            return mask
        # The request decides which ids end a text, not the tokenizer.
        for token_id in tokenizer.eos_tokens:
            _set_bit(mask, token_id, False)
        if state.matcher.is_accepting():
            for token_id in state.sampling.stop_token_ids:
                _set_bit(mask, token_id, True)
        return mask


def wait_for_any(states: Sequence[ConstraintState], seconds: float) -> None:
    """Wait until one of the masks is ready, at most `seconds`."""
    wait([state.mask for state in states if state.mask is not None], seconds, FIRST_COMPLETED)


def _set_bit(words: Mask, token_id: int, value: bool) -> None:
    if token_id >= 32 * len(words):
        return
    word = words[token_id // 32 : token_id // 32 + 1].view(np.uint32)
    bit = np.uint32(1 << token_id % 32)
    if value:
        word |= bit
    else:
        word &= ~bit
