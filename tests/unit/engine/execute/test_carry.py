"""Ids that were sampled last and have not come to the host yet."""

import torch

from serve_llm.engine.execute.carry import Carry

CPU = torch.device("cpu")


def test_each_row_reads_what_was_stored_for_it_last() -> None:
    carry = Carry(5, CPU)
    carry.store(torch.tensor([11, 12, 13]), torch.tensor([4, 0, 2]))
    carry.store(torch.tensor([99]), torch.tensor([0]))
    ids, rows = torch.tensor([7, -1, -1, 8, -1]), torch.tensor([0, 4, 0, 2, 2])
    assert carry.fill(ids, rows).tolist() == [7, 11, 99, 8, 13]
    assert ids.tolist() == [7, -1, -1, 8, -1], "a captured step fills its input again and again"


def test_a_row_without_a_finite_logit_has_some_id_of_the_vocabulary() -> None:
    carry = Carry(2, CPU)
    carry.store(torch.tensor([-1, 3]), torch.tensor([0, 1]))
    assert carry.fill(torch.tensor([-1, -1]), torch.tensor([0, 1])).tolist() == [0, 3]
