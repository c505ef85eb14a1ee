"""user_dir/continuous_documents.py: the model finds the interval between the markers."""

import copy
import importlib.util
import itertools

import pytest
import torch
from commands import ROOT

from multimax_fairseq.modules import ContinuousAttention, Normalizer

pytestmark = pytest.mark.long

BOTH = ("softmax", "sparsemax")
FOUND = (0.95, 0.9, 0.7)  # accuracy, means inside the interval, density mass inside it


@pytest.fixture(scope="module")
def example():
    file = ROOT / "user_dir" / "continuous_documents.py"
    spec = importlib.util.spec_from_file_location("continuous_documents", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shares(accuracy, found, mass):
    return accuracy, found.double().mean().item(), mass.mean().item()


def drawn(example, count=3, seed=3):
    return example.draw(count, torch.Generator().manual_seed(seed))[0]


def small(example, attention, density, **options):
    torch.manual_seed(1)
    options = {"num_bases": 32, "size": 8, "hidden": 4, **options}
    return example.DocumentClassifier(
        example.WORDS, example.CLASSES, attention, density, **options
    ).double()


@pytest.fixture(scope="module")
def trained(example):
    """{(attention, density): model} with each attention and each density once."""
    kinds = (("continuous", "sparsemax"), ("combined", "softmax"))
    return {kind: example.train(*kind, steps=70) for kind in kinds}


def test_train_finds_the_marked_interval(example, trained):
    for model in trained.values():
        accuracy, found, mass = shares(*example.evaluate(model))
        assert accuracy > FOUND[0] and found > FOUND[1] and mass > FOUND[2]
    model = trained["continuous", "sparsemax"]
    # The parabola is zero outside of a part of the document.
    _, _, variance = model(drawn(example, 100))
    assert ((1.5 * variance) ** (1 / 3) < 0.25).double().mean() > 0.9

    # The same model with the densities of other documents, and with all in the middle.
    hook = model.moments.register_forward_hook(lambda *call: call[-1].roll(1, 0))
    assert all(share < 0.6 for share in shares(*example.evaluate(model)))
    hook.remove()
    kept = copy.deepcopy(model.moments)
    torch.nn.init.zeros_(model.moments.weight)
    model.moments.bias.data = torch.tensor([0.0, -4.0])
    assert all(share < 0.6 for share in shares(*example.evaluate(model)))
    model.moments = kept


def test_main_prints_each_model(example, trained, monkeypatch, capsys):
    kinds = [*itertools.product(("continuous", "combined"), BOTH)]
    models = itertools.cycle(trained.values())
    asked, used = [], []
    monkeypatch.setattr(
        example, "train", lambda *kind: asked.append(kind) or used.append(next(models)) or used[-1]
    )
    example.main()
    assert asked == kinds
    lines = capsys.readouterr().out.splitlines()
    for model, line, (attention, density) in zip(used, lines, kinds, strict=True):
        accuracy, found, mass = shares(*example.evaluate(model))
        assert line.startswith(f"{attention} {density}: accuracy {accuracy:.2f}, ")
        assert f"in {found:.0%} of" in line and line.endswith(f" {mass:.0%} of it")


def test_train_without_markers_stays_at_chance(example):
    """Without the markers, both classes are equally likely, so the interval is necessary."""
    model = example.train("continuous", "softmax", steps=60, seen=example.OPEN)
    accuracy, found, mass = shares(*example.evaluate(model, count=500))
    assert 0.4 < accuracy < 0.6 and found < 0.5 and mass < 0.5


@pytest.mark.parametrize(
    "attention, density", [("discrete", "sparsemax"), ("continuous", "sparsemax")]
)
def test_train_learns_the_papers_models(example, attention, density):
    """Any state can carry the class, so the test does not check where the density is."""
    model = example.train(attention, density, steps=60, seen=None)
    assert example.evaluate(model)[0] > 0.9


@pytest.mark.parametrize(
    "attention, density, seen",
    [
        ("discrete", "softmax", None),
        ("continuous", "sparsemax", 3),
        ("continuous", "softmax", None),
        ("combined", "sparsemax", 3),
    ],
)
def test_document_classifier_ignores_padding(example, attention, density, seen):
    model = small(example, attention, density, seen=seen)
    documents = drawn(example, 8)
    assert (documents == 0).any()
    batch = model(torch.nn.functional.pad(documents, (0, 5)))
    for index, document in enumerate(documents):
        alone = model(document[document != 0][None])
        for padded, plain in zip(batch, alone, strict=True):
            torch.testing.assert_close(padded[index], plain[0])
    batch[0].logsumexp(-1).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all() and parameter.grad.any(), name


@pytest.mark.parametrize("density", BOTH)
@pytest.mark.parametrize("context", ["continuous", "combined"])
def test_document_classifier_equals_continuous_attention(example, context, density):
    model = small(example, context, density)
    documents = drawn(example)
    kept = {}
    for name in ("encoder", "score", "moments", "classifier"):
        if hasattr(model, name):
            getattr(model, name).register_forward_hook(
                lambda _, given, made, name=name: kept.update({name: (given[0], made)})
            )
    model(documents)
    states, _ = torch.nn.utils.rnn.pad_packed_sequence(kept["encoder"][1][0], batch_first=True)
    query, key = torch.ones(3, 1, 1, 1).double(), states[:, None]
    size = None
    if context == "continuous":
        query = kept["moments"][0][:, None, None]
        size = query.shape[-1]
    else:
        key = kept["score"][1][:, None]
    module = ContinuousAttention(
        Normalizer("softmax"), density, context, size, 32, example.WIDTHS, example.RIDGE
    )
    if size:
        module.predicted = model.moments
    mask = (documents == 0)[:, None, None]
    expected, _ = module.attend(query, key, states[:, None], mask, scale=1.0)
    # The module computes predicted moments in float32.
    torch.testing.assert_close(kept["classifier"][0], expected[:, 0, 0], rtol=1e-5, atol=1e-6)


def test_document_classifier_has_the_papers_sizes(example):
    sizes = {}
    for attention in example.ATTENTIONS:
        model = example.DocumentClassifier(50, 2, attention)
        sizes[attention] = sum(parameter.numel() for parameter in model.parameters())
    states = 50 * 300 + 2 * 4 * 128 * (300 + 128 + 2) + 256 * 2 + 2
    assert sizes["combined"] == sizes["discrete"] == states + 256 * 128 + 128 + 128
    assert sizes["continuous"] == states + 128 * (256 * 3 + 1) + 128 * 2 + 2


def test_document_classifier_refuses_wrong_arguments(example):
    for options, sentence in (
        ({"attention": "both"}, "unknown attention 'both': choose one of discrete, continuous"),
        ({"density": "entmax"}, "unknown density 'entmax': choose one of softmax, sparsemax"),
        ({"num_bases": 31}, "num_bases must be even, half of each width, got 31"),
    ):
        with pytest.raises(ValueError, match=sentence):
            example.DocumentClassifier(10, 2, **options)
    model = small(example, "combined", "softmax")
    for document in ([0, 0], [0, 5], [5, 0, 5]):
        with pytest.raises(ValueError, match="its padding, 0, behind all words, got") as caught:
            model(torch.tensor([[4] * len(document), document]))
        assert str(caught.value).endswith(str(document))
