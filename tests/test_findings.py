"""The sentences that open a report."""

import numpy as np
import pandas as pd
import pytest
import synthetic_collection

from multimax_fairseq.analysis import collection
from multimax_fairseq.analysis.findings import findings

SMALL = {"updates": (40,), "layers": 2, "heads": 2}


def write(folder, **changes):
    """Write a collection; `changes` are {table: {column: values}}."""
    synthetic_collection.write(folder, "multimax", **SMALL)
    for name, columns in changes.items():
        table = pd.read_csv(folder / f"{name}.csv")
        for column, values in columns.items():
            table[column] = values
        table.to_csv(folder / f"{name}.csv", index=False)
    return collection.read(folder)


def sentence(found, words):
    (only,) = [each for each in findings(found) if words in each]
    return only


def test_findings_name_the_sparsest_head_and_the_zeros(tmp_path):
    found = write(tmp_path, heads={"sparsity": np.linspace(0.9, 0.1, 12), "density": 0.75})
    text = sentence(found, "sparsest")
    start = (
        "The sparsest of 12 heads is head 1 of layer 1 in encoder self-attention (sparsity 0.90),"
    )
    assert text.startswith(start)
    assert "(0.10); on average 25% of a head's weights" in text


def test_findings_give_the_perplexity_with_and_without_sigma(tmp_path):
    nll = {"nll": 2.0, "nll_without_modulator": 2.5}
    text = sentence(write(tmp_path, output=nll), "perplexity")
    assert f"perplexity of {np.exp(2):.2f} per token" in text
    assert f"with sigma removed from its output layer, {np.exp(2.5):.2f}." in text


@pytest.mark.parametrize("shift, better", [(0.1, 6), (-0.1, 0)])
def test_findings_compare_multi_modality_at_equal_sparsity(tmp_path, shift, better):
    """On every layer's scores softmax has multi-modality 1 - sparsity, the model `shift` more."""
    found = write(tmp_path)
    table = found.temperatures
    count = table.groupby(["kind", "layer"])["sparsity"].transform("size")
    position = table.groupby(["kind", "layer"]).cumcount()
    table["sparsity"] = np.where(table["temperature"].isna(), 0.5, position / count)
    table["multi_modality"] = 1 - table["sparsity"] + shift * table["temperature"].isna()
    assert f"In {better} of 6 attention layers" in sentence(found, "attention layers")


def test_findings_locate_where_sigma_turns(tmp_path):
    found = write(tmp_path, heads={"past_turning_point": 0.0})
    assert "Sigma increases on all" in sentence(found, "Sigma")
    table = found.parameters
    symbols = ["t_b1", "t_b2", "t_d1", "t_d2", "b1", "b2", "d1", "d2"]
    sigma = dict(zip(symbols, [1, 1, 1, 0.75, 0, 0, 0, 1], strict=True))
    table["value"] = table["name"].map(sigma)
    last = (found.heads["kind"] == "cross") & (found.heads["layer"] == 1)
    found.heads.loc[last, "past_turning_point"] = 0.03
    text = sentence(found, "Sigma")
    # sigma(x) = x - (x - 1)^2 / 4 turns at 3.
    assert "layer 2 in cross-attention: on scores above 3.0, which are 3.0% of its" in text


def test_findings_count_positional_heads(tmp_path):
    confidence = [0.8, 0.9, *[0.1] * 10]
    found = write(tmp_path, heads={"confidence": confidence, "offset": [-1, -1, *[0] * 10]})
    text = sentence(found, "relative position")
    assert text.startswith("2 of 12 heads") and text.endswith("most often -1.")


def test_findings_give_intervals_in_which_sigma_decreases(tmp_path):
    found = write(tmp_path, heads={"past_turning_point": 0.5})
    sigma = {"t_b1": 3.0, "t_d1": -1.0, "b1": 2.0, "d1": 3.0}
    table = found.parameters
    table["value"] = table["name"].map(lambda name: sigma.get(name, float(name.startswith("t_"))))
    assert "on scores above 3.0, which are 50.0%" in sentence(found, "Sigma")
    sigma |= {"t_b1": 1.0, "t_b2": 1.0, "t_d2": 1.25, "d2": 1.0, "d1": 0.0, "t_d1": -0.5}
    table["value"] = table["name"].map(lambda name: sigma.get(name, float(name.startswith("t_"))))
    # 1 - 1.5 + (x - 1) / 2 < 0 between 0 and 2.
    assert "on scores from 0.0 to 2.0, which" in sentence(found, "Sigma")


def test_findings_do_not_compare_softmax_with_itself(tmp_path):
    synthetic_collection.write(tmp_path, "softmax", **SMALL)
    assert not [each for each in findings(collection.read(tmp_path)) if "attention layers" in each]
