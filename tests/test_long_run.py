"""Memory and the number of torch.compile graphs stay bounded in long runs."""

import os
import random
import re
import statistics
import subprocess
from pathlib import Path

import fork_server
import pytest
import torch
from commands import PLUGIN, programs_first, run
from torch._dynamo.testing import CompileCounterWithBackend

import multimax_fairseq as mm

pytestmark = pytest.mark.long

SMALL = "--{0}-layers 2 --{0}-embed-dim 32 --{0}-ffn-embed-dim 64 --{0}-attention-heads 4"
MODELS = {
    "translation": "--arch transformer_iwslt_de_en_multimax --share-all-embeddings "
    f"--criterion label_smoothed_multimax_cross_entropy {SMALL.format('encoder')}",
    "language_modeling": "--arch transformer_lm_multimax --criterion multimax_cross_entropy "
    "--share-decoder-input-output-embed --decoder-input-dim 32 --decoder-output-dim 32 "
    "--tokens-per-sample 64 --sample-break-mode eos",
}


def memory(folder, data, task, updates):
    """Train; return {update: resident bytes} every fifty updates."""
    flags = f"--task {task} {MODELS[task]} {SMALL.format('decoder')} --max-tokens 800 --cpu"
    flags += f" --optimizer adam --lr 1e-3 --max-update {updates} --log-interval 50"
    flags += " --no-save --disable-validation --save-dir none"
    seen = {}
    with subprocess.Popen(
        [fork_server.REAL / "fairseq-train", data, *PLUGIN, *flags.split()],
        cwd=folder,
        env=programs_first(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        for line in process.stdout:
            if found := re.search(r"train_inner .*num_updates=(\d+)", line):
                pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
                seen[int(found[1])] = pages * os.sysconf("SC_PAGE_SIZE")
    assert process.returncode == 0
    return seen


def growth(seen):
    """Return the memory of the last quarter relative to the second quarter."""
    numbers = [seen[update] for update in sorted(seen)]
    quarter = len(numbers) // 4
    return statistics.median(numbers[-quarter:]) / statistics.median(numbers[quarter : 2 * quarter])


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Sentences of 1 to 60 words, so that batch shapes differ; word frequencies decrease."""
    folder = tmp_path_factory.mktemp("ragged")
    chance = random.Random(1)
    for split, count in (("train", 3000), ("valid", 20)):
        for language in ("de", "en"):
            lines = (
                " ".join(f"w{int(chance.paretovariate(0.6)) % 2000}" for _ in range(length))
                for length in (chance.randint(1, 60) for _ in range(count))
            )
            (folder / f"{split}.{language}").write_text("\n".join(lines) + "\n")
    both = "fairseq-preprocess --source-lang de --target-lang en --joined-dictionary --destdir mt"
    run(folder, *both.split(), "--trainpref", "train", "--validpref", "valid")
    one = "fairseq-preprocess --only-source --destdir lm --trainpref train.en --validpref valid.en"
    run(folder, *one.split())
    return folder


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="memory is read from Linux's /proc"
)
@pytest.mark.parametrize("task", MODELS)
def test_train_keeps_memory_constant(data, task):
    seen = memory(data, data / ("mt" if task == "translation" else "lm"), task, 3000)
    print(f"{task}: {len(seen)} readings, {growth(seen):.4f}")
    assert len(seen) == 60
    assert growth(seen) < 1.02, seen


def test_compile_limits_graphs_for_ragged_lengths():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    modulator = mm.Modulator(init_std=0.1)
    weight = torch.randn(40, 8)

    @torch.compile(fullgraph=True, backend=counter)
    def step(x, target):
        context = mm.scaled_dot_product_attention(x, x, x, modulator=modulator, is_causal=True)
        features = context.transpose(1, 2).flatten(2)
        return mm.linear_cross_entropy(features.flatten(0, 1), weight, target)[0]

    tried = [(batch, length) for batch in (2, 3, 5) for length in (2, 7, 16, 30, 31, 64)]
    for batch, length in tried:
        step(torch.randn(batch, 2, length, 4), torch.randint(0, 40, (batch * length,))).backward()
    assert len(tried) == 18 and 1 <= counter.frame_count <= 4, counter.frame_count
    torch._dynamo.reset()
