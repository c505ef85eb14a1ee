"""scripts/attention_statistics.py."""

import importlib
import math
import sys

import pytest
import torch
from commands import ROOT


@pytest.fixture
def statistics():
    sys.path.insert(0, str(ROOT / "scripts"))
    yield importlib.import_module("attention_statistics").AttentionStatistics()
    sys.path.remove(str(ROOT / "scripts"))


def test_means_weigh_queries_equally_and_skip_excluded_entries(statistics):
    scores = torch.tensor([[1.0, 2.0, 9.0], [0.0, 5.0, 3.0], [7.0, 7.0, 7.0]])
    valid = torch.tensor([[True, True, False], [True, True, True], [False, False, False]])
    probs = torch.tensor([[0.5, 0.5, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    statistics.add(scores[None, None], probs[None, None], valid[None, None])
    means = statistics.means()
    assert means["zeros"] == pytest.approx((0 + 2 / 3) / 2)
    assert means["entropy"] == pytest.approx((math.log(2) + 0) / 2)
    assert means["first_key"] == pytest.approx((0.5 + 0) / 2)
    assert means["largest_score"] == 5.0


def test_means_cover_all_batches(statistics):
    valid = torch.ones(1, 2, dtype=torch.bool)
    for probs in ([[1.0, 0.0]], [[0.5, 0.5]], [[0.5, 0.5]]):
        statistics.add(torch.tensor([[3.0, 1.0]]), torch.tensor(probs), valid)
    assert statistics.means()["first_key"] == pytest.approx(2 / 3)
