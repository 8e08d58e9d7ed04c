"""What workers keep for requests between steps, and the last sampled ids on the device."""

import numpy as np
import torch

from serve_llm.common.types import Sampling
from serve_llm.engine.scheduler.output import NewRequestData, ScheduledTokens, SchedulerOutput
from serve_llm.engine.scheduler.sequence import KVCacheSpec
from serve_llm.engine.worker.input_batch import LAST_SAMPLED, InputBatch, LastTokenIds

CPU = torch.device("cpu")


def admit(req_index: int, token_ids: list[int], num_prompt: int, prompt_logprobs: int | None = None) -> NewRequestData:
    return NewRequestData(req_index, token_ids, num_prompt, Sampling(max_tokens=9, seed=0), prompt_logprobs)


def test_ids_and_blocks_of_many_requests_are_added_in_one_step() -> None:
    batch = InputBatch([KVCacheSpec(4, None), KVCacheSpec(8, 6)], max_num_seqs=5, max_model_len=32)
    first = [ScheduledTokens(3, 0, 4, ([7], [9]), True, []), ScheduledTokens(1, 0, 3, ([5], [6]), True, [])]
    batch.apply(SchedulerOutput([admit(3, [10, 11, 12, 13], 4), admit(1, [20, 21, 22], 3)], first))
    second = [
        ScheduledTokens(1, 3, 1, (), True, [23]),
        ScheduledTokens(3, 4, 4, ([8], []), True, [14, 15], None, (16, 17)),
    ]
    batch.apply(SchedulerOutput([], second))
    assert batch.known_ids(1).tolist() == [20, 21, 22, 23]
    assert batch.known_ids(3).tolist() == [10, 11, 12, 13, 14, 15], "drafts are not known yet"
    arrays = batch.gather(second)
    assert arrays.all_known and arrays.ids.tolist() == [23, 14, 15, 16, 17]
    assert arrays.slots[0].tolist() == [5 * 4 + 3, 8 * 4, 8 * 4 + 1, 8 * 4 + 2, 8 * 4 + 3]
    assert arrays.slots[1].tolist() == [6 * 8 + 3, *range(9 * 8 + 4, 9 * 8 + 8)]
    ahead = [ScheduledTokens(1, 4, 1, ([4], []), True, [])]
    batch.apply(SchedulerOutput([], ahead))
    assert batch.gather(ahead).ids.tolist() == [LAST_SAMPLED]


def test_the_next_request_at_an_index_has_nothing_of_the_last_one() -> None:
    batch = InputBatch([KVCacheSpec(4, None)], max_num_seqs=1, max_model_len=32)
    chunk = ScheduledTokens(0, 0, 2, ([3],), True, [])
    batch.apply(SchedulerOutput([admit(0, [1, 2, 3, 4, 5], 2, prompt_logprobs=1)], [chunk]))
    assert batch[0].prompt_ids.tolist() == [1, 2] and batch[0].later_ids[:3].tolist() == [3, 4, 5]
    assert batch.wants_prompt_logprobs(chunk)
    assert not batch.wants_prompt_logprobs(ScheduledTokens(0, 2, 1, (), True, [])), "no token of the prompt"
    batch.apply(SchedulerOutput([admit(0, [6, 7, 8], 3)], [chunk]))
    assert batch[0].prompt_ids.tolist() == [6, 7, 8] and not batch.wants_prompt_logprobs(chunk)
    assert np.array_equal(batch.known_ids(0), [6, 7, 8])


def test_each_request_reads_its_last_id() -> None:
    last_ids = LastTokenIds(5, CPU)
    last_ids.store(torch.tensor([11, 12, 13]), torch.tensor([4, 0, 2]))
    last_ids.store(torch.tensor([99]), torch.tensor([0]))
    ids, req_indices = torch.tensor([7, -1, -1, 8, -1]), torch.tensor([0, 4, 0, 2, 2])
    assert last_ids.fill(ids, req_indices).tolist() == [7, 11, 99, 8, 13]
    assert ids.tolist() == [7, -1, -1, 8, -1], "a captured step fills its input again and again"


def test_a_failed_sample_leaves_a_valid_id() -> None:
    last_ids = LastTokenIds(2, CPU)
    last_ids.store(torch.tensor([-1, 3]), torch.tensor([0, 1]))
    assert last_ids.fill(torch.tensor([-1, -1]), torch.tensor([0, 1])).tolist() == [0, 3]
