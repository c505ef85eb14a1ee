"""scripts/benchmark.py end to end at toy sizes, without timings."""

import argparse
import functools
import importlib
import json
import os
import statistics
import sys
from pathlib import Path

import pytest
import torch
from commands import PLUGIN, ROOT, run
from corpus import ENGLISH, GERMAN
from fairseq.tasks.translation import TranslationTask

pytestmark = pytest.mark.long

LAYER = "--{0}-layers 1 --{0}-embed-dim 16 --{0}-ffn-embed-dim 32 --{0}-attention-heads 2"
LANGUAGE_MODEL = [
    *LAYER.format("decoder").split(),
    *("--decoder-input-dim", "16", "--decoder-output-dim", "16"),
    *("--tokens-per-sample", "32", "--max-tokens", "128"),
]
TRANSLATION = [*LAYER.format("encoder").split(), *LAYER.format("decoder").split()]
TRANSLATION += ["--max-tokens", "128"]
SHORT = ["--rounds", "3", "--warmup", "1"]
STOCK, PRODUCTS, BEST = "softmax (fairseq)", "matrix products", "best baseline"
EXPRESSION, PLAIN, AUTO = (f"MultiMax ({word})" for word in ("torch expression", "plain", "auto"))


@pytest.fixture(scope="module")
def modules():
    """(benchmark, benchmarks.measurement)."""
    sys.path.insert(0, str(ROOT / "scripts"))
    yield importlib.import_module("benchmark"), importlib.import_module("benchmarks.measurement")
    sys.path.remove(str(ROOT / "scripts"))


@pytest.fixture
def benchmark(modules, monkeypatch, tmp_path, capsys):
    """benchmark(*arguments) -> (the JSON of a run in this process, its output)."""
    # Silenced warnings would stay silent in later tests.
    monkeypatch.setattr(modules[0], "quiet", lambda: None)

    def run_here(*arguments):
        common = ["--device", "cpu", "--no-memory", "--out", str(tmp_path / "out")]
        words = [*map(str, arguments)]
        cut = words.index("--") if "--" in words else len(words)
        monkeypatch.setattr(sys, "argv", ["benchmark.py", *words[:cut], *common, *words[cut:]])
        modules[0].main()
        return check_files(tmp_path / "out", words[0]), capsys.readouterr().out

    return run_here


def check_files(folder, name):
    """Check the output files and return the JSON."""
    base = f"benchmark-{name}"
    if (folder / f"{base}.png").exists():
        assert (folder / f"{base}.png").read_bytes().startswith(b"\x89PNG")
        assert "</svg>" in (folder / f"{base}.svg").read_text(encoding="utf-8")
    found = json.loads((folder / f"{base}.json").read_text(encoding="utf-8"))
    assert {"python", "torch", "fairseq-fixed", "multimax-fairseq"} <= found["versions"].keys()
    assert {"command", "commit", "device", "threads", "dtype", "date"} <= found.keys()
    return found


def check_case(case, contestants, references, quantities=("seconds",), rounds=3):
    assert list(case["contestants"]) == contestants
    assert case["references"] == references
    for name, entry in case["contestants"].items():
        assert len(entry["rounds"]) == rounds
        assert all(turn["seconds"] > 0 for turn in entry["rounds"])
        for quantity in quantities:
            assert entry[quantity]["lower"] <= entry[quantity]["median"] <= entry[quantity]["upper"]
            assert list(entry[quantity]["ratios"]) == references
            if name in references:
                assert entry[quantity]["ratios"][name]["median"] == 1


# --- the measuring -----------------------------------------------------------------------------


@pytest.mark.parametrize("settles", [False, True])
def test_measure_rotates_the_contestants(modules, monkeypatch, settles):
    _, measurement = modules
    steps = 2 if settles else 1
    monkeypatch.setenv("MULTIMAX_BACKEND", "plain")
    turns = []

    def contestant(name, backend):
        def step(number):
            turns.append((number, name, os.environ["MULTIMAX_BACKEND"]))
            return {"tokens": 10 * number, "steps": len(turns)}

        return measurement.Contestant(lambda: measurement.Ready(step, dict), name, backend)

    backends = {"a": "auto", "b": "plain", "c": "cpp"}
    named = {name: contestant(name, backend) for name, backend in backends.items()}
    case = measurement.Case("toy", 0, named, ["a"], ["tokens/s"], settles=settles)
    args = argparse.Namespace(dtype="float32", device="cpu", memory=False, warmup=1, rounds=3)
    (found,) = measurement.measure(lambda _: [case], args)
    orders = ["abc", "bca", "cab", "abc"]
    expected = [(n, c, backends[c]) for n, order in enumerate(orders) for c in order]
    assert turns == [turn for turn in expected for _ in range(steps)]
    assert os.environ["MULTIMAX_BACKEND"] == "plain"
    for entry in found["contestants"].values():
        assert [turn["tokens"] for turn in entry["rounds"]] == [10, 20, 30]
        # Counts are those of the last step of a turn.
        assert all(turn["steps"] % steps == 0 for turn in entry["rounds"])


def test_summary_takes_the_median_ratio(modules):
    _, measurement = modules
    seconds = {"a": [1.0, 10.0, 4.0], "b": [2.0, 30.0, 2.0]}
    rounds = {name: [{"seconds": s} for s in column] for name, column in seconds.items()}
    case = measurement.Case("toy", 0, {}, ["a"], ["seconds"])
    found = measurement.summary(case, rounds, {"a": {}, "b": {}}, {})["contestants"]["b"]["seconds"]
    assert found["median"] == statistics.median(seconds["b"])
    assert found["ratios"]["a"] == {"median": 2.0, "lower": 1.25, "upper": 2.5}


@pytest.mark.parametrize("quantity, best", [("seconds", "b"), ("tokens/s", "a")])
def test_summary_finds_the_best_baseline(modules, quantity, best):
    _, measurement = modules
    seconds = {"a": [4.0, 4.0, 1.0], "b": [2.0, 2.0, 9.0], "ours": [1.0, 1.0, 1.0]}
    tokens = {"a": 9, "b": 1, "ours": 1}
    rounds = {n: [{"seconds": s, "tokens": tokens[n]} for s in each] for n, each in seconds.items()}
    case = measurement.Case("toy", 0, {}, [measurement.BEST], [quantity], ["a", "b"])
    found = measurement.summary(case, rounds, dict.fromkeys(seconds, {}), {})
    assert found[measurement.BEST] == best
    entry = found["contestants"][best][quantity]["ratios"][measurement.BEST]
    assert entry == {"median": 1.0, "lower": 1.0, "upper": 1.0}


def test_output_measures_peak_memory(tmp_path):
    words, logits = 4000, 256 * 4000 * 4
    program = ["python", ROOT / "scripts" / "benchmark.py", "output", "--device", "cpu"]
    sizes = ["--tokens", "256", "--width", "16", "--vocabulary", words, *SHORT]
    printed = run(tmp_path, *program, *sizes, "--out", "out")
    (case,) = check_files(tmp_path / "out", "output")["cases"]
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("peak memory is read from Linux's /proc; the rest of this run was checked")
    assert "peak MB" in printed
    peaks = {name: entry["peak_memory"] for name, entry in case["contestants"].items()}
    assert peaks["matrix products"] > 0.9 * logits
    assert peaks[EXPRESSION] > 4 * logits
    gradients = {name: entry["gradients"] for name, entry in case["contestants"].items()}
    assert gradients["softmax (fused)"] == (256 + words) * 16 * 4
    assert gradients["MultiMax (fused)"] == gradients["softmax (fused)"] + 8 * 4


# --- the four parts ----------------------------------------------------------------------------


@pytest.mark.parametrize("mask", ["none", "causal", "padding", "both"])
def test_attention_compares_all_contestants(benchmark, mask):
    found, printed = benchmark(
        "attention", "--shape", "2x2x12x8", "3x1x7x4", "--mask", mask, *SHORT
    )
    for case in found["cases"]:
        names = ["softmax (torch)", "softmax (plain)", EXPRESSION, PLAIN, AUTO]
        check_case(case, [*names, PRODUCTS], [BEST, PRODUCTS, EXPRESSION])
        assert case[BEST] == names[0]
        assert case["agreement"].keys() == {"softmax (plain)", PLAIN, AUTO}
        assert all(agreed["difference"] < 1e-5 for agreed in case["agreement"].values())
    assert f"attention 3x1x7x4, mask: {mask}" in printed


def test_attention_measures_other_mappings(benchmark):
    found, _ = benchmark("attention", "--shape", "2x2x12x8", "--rivals", *SHORT)
    (case,) = found["cases"]
    assert case["references"] == [BEST, PRODUCTS, AUTO]
    gradients = {name: entry["gradients"] for name, entry in case["contestants"].items()}
    mappings = (("ssmax", 2), ("softmax1", 0), ("sink", 2), ("topk", 0), ("alpha_entmax", 2))
    for name, learned in mappings:
        assert case["agreement"][f"{name} (auto)"]["difference"] < 1e-5
        assert gradients[f"{name} (auto)"] == 3 * 2 * 2 * 12 * 8 * 4 + learned * 4
    zeros = {name: entry["zeros"] for name, entry in case["contestants"].items()}
    # Query t has t scores, and top-k gives the 8 largest of them a weight.
    assert zeros["topk (auto)"] == pytest.approx((1 + 2 + 3 + 4) / 78)
    assert zeros["softmax1 (auto)"] == 0 < zeros["entmax15 (auto)"] < zeros["sparsemax (auto)"]
    assert zeros[AUTO] is None


def test_attention_measures_a_trained_model(benchmark, data):
    words = ("--checkpoint", data / "model.pt", "--data", data / "data-bin", *SHORT)
    found, printed = benchmark("attention", *words)
    layers = [case["case"].split(",")[0] for case in found["cases"]]
    expected = ("encoder.layers.0.self_attn", "decoder.layers.0.self_attn")
    assert layers == [*expected, "decoder.layers.0.encoder_attn"]
    for case in found["cases"]:
        names = ["softmax (torch)", "multimax, trained", "multimax, random scores"]
        check_case(case, names, [BEST])
        assert case[BEST] == names[0]
        assert case["contestants"][names[1]]["zeros"] == 0
    assert "multimax, trained" in printed


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_attention_runs_in_low_precision(benchmark, dtype):
    found, _ = benchmark(
        "attention", "--shape", "2x2x12x8", "--mask", "both", "--dtype", dtype, *SHORT
    )
    (case,) = found["cases"]
    assert found["dtype"] == dtype and case["agreement"].keys() == {"softmax (plain)", PLAIN, AUTO}
    # Two bytes per number, and eight parameters of the modulator.
    gradients = {name: entry["gradients"] for name, entry in case["contestants"].items()}
    assert gradients["softmax (plain)"] == 3 * 2 * 2 * 12 * 8 * 2
    assert gradients[AUTO] == gradients["softmax (plain)"] + 8 * 2


@pytest.mark.parametrize("part", ["attention", "output"])
def test_compile_adds_a_compiled_baseline(benchmark, monkeypatch, part):
    without_compiler = functools.partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", without_compiler)
    sizes = {"attention": "--shape 2x2x12x8 --mask both"}
    sizes["output"] = "--tokens 9 --width 8 --vocabulary 20 --label-smoothing 0.1"
    found, _ = benchmark(part, *sizes[part].split(), "--compile", *SHORT)
    assert found["cases"][0]["agreement"]["softmax (compiled)"]["difference"] < 1e-5


@pytest.mark.parametrize("is_causal", [True, False])
def test_attention_products_equal_linear_attention(modules, is_causal):
    """In linear attention, scores are the probabilities."""
    length = 300
    inputs = [torch.randn(1, 2, length, 4, dtype=torch.float64) for _ in range(4)]
    query, key, value = (x.clone().requires_grad_() for x in inputs[:3])
    rows, columns = torch.arange(length)[:, None], torch.arange(length)
    baselines = sys.modules["benchmarks.baselines"]
    block = baselines.BLOCK
    kept = (columns // block <= rows // block) if is_causal else columns >= 0
    output = ((query @ key.mT) * kept) @ value
    wanted = [output, *torch.autograd.grad(output, [query, key, value], inputs[3])]
    found = baselines.attention_products(inputs, is_causal)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.view_as(theirs), theirs.detach())


def test_attention_sweeps_lengths(benchmark, tmp_path):
    found, _ = benchmark("attention", "--shape", "2x2x1x8", "--sweep", "4,8,16", *SHORT)
    assert len(list((tmp_path / "out").iterdir())) == 3  # data and two figures
    assert [case["x"] for case in found["cases"]] == [4, 8, 16]


@pytest.mark.parametrize("smoothing", ["0", "0.1"])
def test_output_sweeps_vocabularies(benchmark, smoothing):
    sizes = ["--tokens", "9", "--width", "8", "--sweep", "20,40"]
    found, _ = benchmark("output", *sizes, "--label-smoothing", smoothing, *SHORT)
    assert [case["x"] for case in found["cases"]] == [20, 40]
    for case in found["cases"]:
        torchs = ["softmax (F.cross_entropy)", "softmax (linear_cross_entropy)"]
        if smoothing != "0" or not hasattr(torch.nn.functional, "linear_cross_entropy"):
            del torchs[1]
        all_logits = "softmax (log_softmax)"
        names = [all_logits, *torchs, PRODUCTS, EXPRESSION, "softmax (fused)", "MultiMax (fused)"]
        check_case(case, names, [BEST, PRODUCTS, all_logits, EXPRESSION])
        assert case[BEST] in (all_logits, *torchs)
        assert case["agreement"].keys() == {*names[-2:], *torchs}
        assert all(agreed["difference"] < 1e-5 for agreed in case["agreement"].values())


def test_compare_refuses_different_results(modules, benchmark, monkeypatch):
    operators = sys.modules["benchmarks.operators"]
    honest = operators.expression
    monkeypatch.setattr(operators, "expression", lambda x, modulator: honest(1.5 * x, modulator))
    with pytest.raises(SystemExit) as refusal:
        benchmark("output", "--tokens", "9", "--width", "8", "--vocabulary", "20", *SHORT)
    assert str(refusal.value).startswith(
        f"benchmark.py: error: MultiMax (fused) against {EXPRESSION}"
    )


def test_train_measures_random_text(benchmark):
    found, _ = benchmark("train", "--vocabulary", "50", *SHORT, "--", *LANGUAGE_MODEL)
    (case,) = found["cases"]
    check_case(case, [STOCK, PLAIN, AUTO], [STOCK, PLAIN], ["tokens/s"])
    tokens = [[turn["tokens"] for turn in e["rounds"]] for e in case["contestants"].values()]
    assert tokens == [[128, 128, 128]] * 3
    assert case["agreement"][AUTO]["difference"] < 1e-5


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with data-bin, and the checkpoint of a translation model, model.pt."""
    folder = tmp_path_factory.mktemp("benchmark")
    for language, text in (("de", GERMAN), ("en", ENGLISH)):
        for split in ("train", "test"):
            (folder / f"{split}.{language}").write_text(text, encoding="utf-8")
    languages = ["--source-lang", "de", "--target-lang", "en", "--joined-dictionary"]
    prefixes = ["--trainpref", "train", "--testpref", "test", "--destdir", "data-bin"]
    run(folder, "fairseq-preprocess", *languages, *prefixes)
    run(
        *(folder, "fairseq-train", "data-bin", *PLUGIN, *TRANSLATION, "--cpu"),
        *("--arch", "transformer_iwslt_de_en_multimax", "--multimax-init-std", "0.3"),
        *("--optimizer", "adam", "--lr", "0.005", "--max-update", "4", "--disable-validation"),
        *("--save-dir", ".", "--no-epoch-checkpoints", "--num-workers", "0"),
    )
    (folder / "checkpoint_last.pt").rename(folder / "model.pt")
    return folder


def test_train_measures_translation(benchmark, data):
    variant = "--cross-attention continuous_sparsemax"
    words = (data / "data-bin", *SHORT, "--variant", variant, "--", *TRANSLATION)
    found, printed = benchmark("train", *words)
    contestants, references = [STOCK, PLAIN, AUTO, variant], [STOCK, PLAIN, AUTO]
    check_case(found["cases"][0], contestants, references, ["tokens/s"])
    assert found["cases"][0]["agreement"][AUTO]["difference"] < 1e-5
    assert "training step, translation" in printed


def test_generate_compares_hypotheses(benchmark, data):
    arguments = [data / "data-bin", "--checkpoint", data / "model.pt", "--max-tokens", "64"]
    found, printed = benchmark("generate", *arguments, *SHORT)
    (case,) = found["cases"]
    loop, int8 = "softmax (our loop)", "MultiMax (int8)"
    contestants = [name for name in case["contestants"] if "CTranslate2" not in name]
    assert contestants == [STOCK, loop, PLAIN, AUTO, int8]
    check_case(case, list(case["contestants"]), [STOCK, PLAIN], case["quantities"])
    assert case["quantities"] == ["tokens/s", "hypotheses/s"]
    assert f"{AUTO} against {PLAIN}: 0 of 24 hypotheses differ" in printed
    assert f"{loop} against {STOCK}: 0 of 24 hypotheses differ" in printed


def test_generate_refuses_different_hypotheses(benchmark, data, monkeypatch):
    honest = TranslationTask.inference_step

    def inference_step(*arguments, **options):
        found = honest(*arguments, **options)
        if os.environ["MULTIMAX_BACKEND"] == "auto":
            found[0][0]["tokens"] = torch.tensor([2])
        return found

    monkeypatch.setattr(TranslationTask, "inference_step", inference_step)
    arguments = ["--checkpoint", data / "model.pt", "--max-tokens", "10000", *SHORT]
    with pytest.raises(SystemExit, match="1 of 24 hypotheses differ"):
        benchmark("generate", data / "data-bin", *arguments)


def test_benchmark_refuses_wrong_arguments(benchmark, data, tmp_path):
    state = torch.load(data / "model.pt", weights_only=False)
    state["cfg"]["model"].attention_normalizer = "softmax"
    for name in [name for name in state["model"] if "normalizer.modulator" in name]:
        del state["model"][name]
    torch.save(state, tmp_path / "softmax.pt")
    softmax = ["generate", data / "data-bin", "--checkpoint", tmp_path / "softmax.pt"]
    for arguments, part in (
        (softmax, "softmax.pt holds no translation model with MultiMax attention"),
        (["train"], "either DATA-BIN or --vocabulary"),
        (["train", tmp_path / "nowhere"], "nowhere' does not exist"),
        (["train", tmp_path], "has no dictionary"),
        (["train", "--vocabulary", "4"], "at least 5"),
        (["output", "--", "--lr", "1"], "no options after --"),
        (["generate", data / "data-bin", "--checkpoint", data / "none.pt"], "does not exist"),
        (["attention", "--checkpoint", data / "model.pt"], "needs both --checkpoint and --data"),
        (
            ["attention", "--checkpoint", data / "model.pt", "--data", data, "--rivals"],
            "--checkpoint determines the shapes",
        ),
    ):
        with pytest.raises(SystemExit, match=part) as refusal:
            benchmark(*arguments)
        assert str(refusal.value).startswith("benchmark.py: error: ")
