"""scripts/attention_statistics.py and scripts/model_statistics.py."""

import importlib
import math

import pytest
import torch
from commands import ROOT


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")


@pytest.fixture
def statistics():
    return importlib.import_module("attention_statistics").AttentionStatistics()


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


def test_calibration_error_is_the_gap_between_confidence_and_accuracy():
    calibration = importlib.import_module("model_statistics").Calibration()
    # 10 words at confidence 0.9, 7 of them right; 30 at 0.6, all right.
    for top, words, right in ((0.9, 10, 7), (0.6, 30, 30)):
        log_probs = torch.tensor([top, 1 - top]).log().expand(words, 2)
        calibration.add(log_probs, (torch.arange(words) >= right).long())
    assert calibration.error() == pytest.approx((10 * 0.2 + 30 * 0.4) / 40)


def test_kurtosis_of_a_uniform_distribution_is_nine_fifths():
    kurtosis = importlib.import_module("model_statistics").kurtosis
    assert float(kurtosis(torch.linspace(-3, 5, 10**5))) == pytest.approx(1.8, rel=1e-4)
