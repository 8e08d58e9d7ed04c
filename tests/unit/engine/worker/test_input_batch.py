"""The ids sampled last, on the device."""

import torch

from serve_llm.engine.worker.input_batch import LastTokenIds

CPU = torch.device("cpu")


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
