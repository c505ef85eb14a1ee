"""DeiT with MultiMax: the models of user_dir/vit_multimax.py, their training, their analysis."""

import csv
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from commands import BIN, ROOT, kill_after, programs_first, run
from PIL import Image

pytestmark = pytest.mark.long

# scripts/test.sh installs timm there.
VISION = Path(sys.prefix) / "vision"
PATHS = (VISION, ROOT / "tests" / "vision", ROOT / "tests", ROOT / "user_dir", ROOT / "scripts")
WITH_TIMM = {"PYTHONPATH": os.pathsep.join(map(str, PATHS))}
SMALL = "depth=2, embed_dim=24, num_heads=3, img_size=32, num_classes=5"


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Twenty small images of two classes."""
    folder, draw = tmp_path_factory.mktemp("images"), random.Random(1)
    for split, count in (("train", 8), ("val", 2)):
        for colour in ("blue", "red"):
            (folder / split / colour).mkdir(parents=True)
            for number in range(count):
                image = Image.new("RGB", (40, 32), "grey")
                image.paste(colour, (draw.randrange(20), draw.randrange(16), 40, 32))
                image.save(folder / split / colour / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def trained(images, tmp_path_factory):
    """Return the results folder of three epochs, and what the command printed."""
    out = tmp_path_factory.mktemp("trained")
    return out, run(out, *training(images, out), **WITH_TIMM)


def training(images, out, *more):
    words = [str(ROOT / "scripts" / "imagenet.sh"), "--data", str(images), "--out", str(out)]
    words += ["--rows", "tiny_multimax", "--epochs", "3", "--batch-size", "8", "--workers", "1"]
    return [*words, *more]


# Runs each line of its input, Python code as JSON, until it ends.
LOOP = """import json, sys
for line in sys.stdin:
    exec(json.loads(line), {})
    sys.stdout.flush()
"""


@pytest.fixture(scope="module")
def in_timm(tmp_path_factory):
    """in_timm(code) -> the JSON that the code prints; one process imports timm for all."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    folder = tmp_path_factory.mktemp("timm")
    environment = programs_first() | WITH_TIMM
    process = subprocess.Popen([BIN / "python", "-c", LOOP], cwd=folder, env=environment, **pipes)

    def ask(code):
        process.stdin.write(json.dumps(code) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    yield ask
    process.communicate()


# --- the models --------------------------------------------------------------------------------


def test_deit_has_modulators_in_all_attentions_and_in_the_output(in_timm):
    found = in_timm(
        "import json, timm, vit_multimax\n"
        "from multimax_fairseq import Modulator\n"
        "models = {(size, head): timm.create_model(f'deit_{size}_multimax', head=head)\n"
        "          for size in ('tiny', 'small', 'base') for head in ('gap', 'cls')}\n"
        "print(json.dumps([[*key, sum(p.numel() for p in m.parameters()), m.num_prefix_tokens,\n"
        "    [n for n, x in m.named_modules() if isinstance(x, Modulator) and not x.monotone]]\n"
        "    for key, m in models.items()]))",
    )
    names = [f"blocks.{n}.attn.normalizer.modulator" for n in range(12)] + ["head.modulator"]
    # DeiT's parameters with 1,000 classes (Touvron et al. 2021: 5M, 22M, 86M), and 8 per modulator.
    sizes = {"tiny": 5_717_416, "small": 22_050_664, "base": 86_567_656}
    widths = {"tiny": 192, "small": 384, "base": 768}
    assert len(found) == 6
    for size, head, parameters, prefix, modulators in found:
        # The class token and its position.
        without = 0 if head == "cls" else 2 * widths[size]
        assert parameters == sizes[size] + 8 * 13 - without
        assert prefix == (head == "cls") and modulators == names


def test_modulators_of_table_7_equal_equation_6(in_timm):
    error = in_timm(
        "import json, timm, torch, vit_multimax\n"
        "from multimax_fairseq import Modulator\n"
        "from reference import TABLE_7, sigma\n"
        "model = timm.create_model('deit_small_multimax').double()\n"
        "x, worst = torch.linspace(-15, 15, 3001, dtype=torch.float64), 0.0\n"
        "assert len(TABLE_7) == len(model.blocks) == 12\n"
        "for block, values in zip(model.blocks, TABLE_7):\n"
        "    modulator = block.attn.normalizer.modulator\n"
        "    given = Modulator.from_values(*values).double()\n"
        "    modulator.load_state_dict(given.state_dict())\n"
        "    right = torch.from_numpy(sigma(x.numpy(), *values))\n"
        "    worst = max(worst, float((modulator(x) - right).abs().max()))\n"
        "print(json.dumps(worst))",
    )
    assert error < 1e-6


def test_rows_build_their_models(in_timm):
    """Each row's model has the mapping, the modulators and the head that its name says."""
    found = in_timm(
        "import imagenet, json, timm, torch, vit_multimax\n"
        "from multimax_fairseq import Modulator\n"
        "names = {}\n"
        "for row, (_, _, size, options, epochs) in imagenet.ROWS.items():\n"
        f"    model = timm.create_model(f'deit_{{size}}_multimax', {SMALL}, **options)\n"
        "    normalizer = getattr(model.blocks[0].attn, 'normalizer', None)\n"
        "    logits = model(torch.randn(2, 3, 32, 32))\n"
        "    logits.sum().backward()\n"
        "    assert logits.shape == (2, 5)\n"
        "    parts = [m for m in model.modules() if isinstance(m, Modulator)]\n"
        "    names[row] = [size, model.num_prefix_tokens, epochs, len(parts),\n"
        "        getattr(normalizer, 'name', None), str(getattr(normalizer, 'modulator', ''))]\n"
        "print(json.dumps(names))",
    )
    assert found["softmax"] == ["small", 0, 300, 0, None, ""]
    assert found["topk"][3:5] == [0, "topk"] and found["evsoftmax"][3:5] == [0, "evsoftmax"]
    assert [found[row][3] for row in ("attention", "output", "multimax", "low", "both")] == [
        *(2, 1, 3, 3, 3)
    ]
    assert found["multimax_400"][2] == 400 and found["multimax_500"][2] == 500
    assert "order=1" in found["low"][5] and "low" in found["low"][5]
    assert "order=1" in found["both"][5] and "order=1" not in found["multimax"][5]
    for head in ("cls", "gap"):
        assert all(row[1] == (head == "cls") for name, row in found.items() if head in name)
        assert [found[f"{head}_{t}"][5] for t in ("0.1", "0.5", "2", "10")] == [
            f"Temperature({t})" for t in ("0.1", "0.5", "2.0", "10.0")
        ]
    assert len(found) == 25


def test_settings_are_those_of_deit(in_timm):
    """The defaults of DeiT's main.py, and the batch of its training command: 4 times 256."""
    names = "EPOCHS WARMUP_EPOCHS BATCH_SIZE LEARNING_RATE WEIGHT_DECAY DROP_PATH REPEATS "
    names += "AUGMENTATION ERASING MIXING WARMUP_LEARNING_RATE MIN_LEARNING_RATE CROP"
    code = f"""
import deit, imagenet, json
found = vars(deit) | vars(imagenet)
print(json.dumps({{name: found[name] for name in {names.split()}}}))"""
    assert in_timm(code) == {
        "EPOCHS": 300,
        "WARMUP_EPOCHS": 5,
        "BATCH_SIZE": 1024,
        "LEARNING_RATE": 5e-4,
        "WEIGHT_DECAY": 0.05,
        "DROP_PATH": 0.1,
        "REPEATS": 3,
        "AUGMENTATION": {"auto_augment": "rand-m9-mstd0.5-inc1"},
        "ERASING": {"re_prob": 0.25, "re_mode": "pixel"},
        "MIXING": {"mixup_alpha": 0.8, "cutmix_alpha": 1.0, "label_smoothing": 0.1},
        "WARMUP_LEARNING_RATE": 1e-6,
        "MIN_LEARNING_RATE": 1e-5,
        "CROP": 0.875,
    }


# --- training ----------------------------------------------------------------------------------


def test_imagenet_tabulates_a_trained_row(trained):
    out, printed = trained
    line = json.loads((out / "results.jsonl").read_text())

    assert line["epochs"] == 3 and line["versions"]["timm"] and len(line["data"]) == 64
    assert f"| DeiT-tiny | MultiMax | {line['value']:.2f} |" in printed and "| 73.4 |" in printed
    assert {file.name for file in (out / "tiny_multimax" / "seed-1").glob("epoch-*.pt")} == {
        f"epoch-{epoch}.pt" for epoch in (1, 2, 3)
    }


def test_imagenet_resumes_a_killed_run_with_the_same_weights(images, trained, in_timm, tmp_path):
    kill_after("epoch 2 of 3: batch", tmp_path, *training(images, tmp_path), **WITH_TIMM)

    resumed = run(tmp_path, *training(images, tmp_path), **WITH_TIMM)
    again = run(tmp_path, *training(images, tmp_path), **WITH_TIMM)

    files = [folder / "tiny_multimax/seed-1/epoch-3.pt" for folder in (trained[0], tmp_path)]
    assert "resuming after epoch 1" in resumed and "Nothing to do" in again
    assert in_timm(
        "import json, torch\n"
        f"one, two = (torch.load(f, weights_only=True)['model'] for f in {[*map(str, files)]})\n"
        "print(json.dumps(all(torch.equal(x, two[name]) for name, x in one.items())))",
    )


def test_imagenet_rejects_invalid_options(images, tmp_path):
    for words, sentence in (
        (("--batch-size", "7"), "--batch-size 7 must be an even number of images for each GPU"),
        (("--batch-size", "18"), "--batch-size 18 exceeds the 16 images per epoch"),
        (("--data", str(tmp_path)), "has no folder train: pass a folder with train/ and val/"),
    ):
        output = run(tmp_path, *training(images, tmp_path / "out", *words), code=1, **WITH_TIMM)
        assert "imagenet.sh: error: " in output and sentence in output


# --- analysis ----------------------------------------------------------------------------------


def test_vit_analysis_writes_a_collection_and_pictures(images, trained, in_timm, tmp_path):
    files = sorted((trained[0] / "tiny_multimax" / "seed-1").glob("epoch-[13].pt"), reverse=True)
    program = ROOT / "user_dir" / "vit_analysis.py"
    out = tmp_path / "collection"
    run(tmp_path, "python", program, *files, "--data", images, "--out", out, **WITH_TIMM)
    printed = run(tmp_path, "multimax-analyze", "plot", out)

    with (out / "layers.csv").open() as table:
        rows = [row for row in csv.DictReader(table) if row["updates"] == "6"]
    right = in_timm(
        "import json, timm, torch, vit_multimax\n"
        "from timm.data import ImageDataset, create_transform\n"
        f"state = torch.load({str(files[0])!r}, weights_only=True)\n"
        "model = timm.create_model(state['name'], **state['options']).eval()\n"
        "model.load_state_dict(state['model'])\n"
        "transform = create_transform(224, interpolation='bicubic', crop_pct=0.875)\n"
        f"data = ImageDataset({str(images / 'val')!r}, transform=transform)\n"
        "x = model.pos_embed + model.patch_embed(torch.stack([image for image, _ in data]))\n"
        "found = []\n"
        "for block in model.blocks:\n"
        "    x = block(x)\n"
        "    unit = torch.nn.functional.normalize(x.double(), dim=-1)\n"
        "    cosines, n = (unit @ unit.mT).abs(), x.shape[1]\n"
        "    found.append(float((cosines.sum((1, 2)) - n).mean() / (n * (n - 1))))\n"
        "print(json.dumps(found))",
    )
    assert [float(row["patch_similarity"]) for row in rows] == pytest.approx(right, abs=1e-5)
    assert len({(out / f"image-{number}.png").read_bytes() for number in (1, 2, 3, 4)}) == 4
    for name in (
        *("modulators-encoder", "over-smoothing-updates", "rollout"),
        *("weight-histograms-encoder", "weight-distributions-encoder"),
    ):
        assert f"drawn: {name}\n" in printed


def test_grad_cam_weighs_channels_by_their_effect_on_the_logit(in_timm):
    """Adding e to a channel at all patches changes the logit by e * patches * the weight."""
    error = in_timm(
        "import json, timm, torch, vit_multimax, vit_analysis\n"
        "torch.manual_seed(1)\n"
        f"model = timm.create_model('deit_tiny_multimax', head='cls', {SMALL}).double().eval()\n"
        "images = torch.randn(1, 3, 32, 32).double()\n"
        "heat = vit_analysis.grad_cam(model, images)[0].detach()\n"
        "norm, kept, moved = model.blocks[-1].norm1, [], torch.zeros(24).double()\n"
        "def move(module, inputs, output):\n"
        "    kept.append(output)\n"
        "    return torch.cat([output[:, :1], output[:, 1:] + moved], 1)\n"
        "norm.register_forward_hook(move)\n"
        "best = model(images).argmax()\n"
        "features, weights = kept[0][0, 1:].detach(), []\n"
        "for channel in range(24):\n"
        "    moved = torch.zeros(24).double()\n"
        "    moved[channel] = 1e-5\n"
        "    up = model(images)[0, best]\n"
        "    moved = -moved\n"
        "    weights.append(float(up - model(images)[0, best]) / 2e-5)\n"
        "right = (features @ torch.tensor(weights).double()).relu()\n"
        "assert right.max() > 0\n"
        "print(json.dumps(float((heat.flatten() - right / right.max()).abs().max())))",
    )
    assert error < 1e-5


def test_only_the_help_does_without_timm(tmp_path):
    paths = os.pathsep.join(map(str, PATHS[2:]))
    words = ("python", ROOT / "scripts" / "imagenet.py")
    assert "--batch-size N" in run(tmp_path, *words, "--help", PYTHONPATH=paths)
    output = run(tmp_path, *words, "--data", ".", code=1, PYTHONPATH=paths)
    assert "timm is missing: docs/python.md" in output and "Traceback" not in output
    output = run(tmp_path, "python", "-c", "import vit_multimax", code=1, PYTHONPATH=paths)
    assert "timm is missing" in output and "docs/python.md" in output


# --- speed -------------------------------------------------------------------------------------


def test_benchmark_measures_time_and_flops_of_deit(tmp_path):
    words = ["--size", "tiny", "--batch", "1", "--rounds", "1", "--warmup", "1", "--no-memory"]
    words += ["--device", "cpu", "--out", "speed"]
    run(tmp_path, "python", ROOT / "scripts" / "benchmark.py", "images", *words, **WITH_TIMM)
    cases = json.loads((tmp_path / "speed" / "benchmark-images.json").read_text())["cases"]
    assert [case["case"] for case in cases] == ["training step, DeiT-tiny", "inference, DeiT-tiny"]
    for case in cases:
        assert case["agreement"]["MultiMax (auto)"]["difference"] < 1e-3
        assert all(entry["images/s"]["median"] > 0 for entry in case["contestants"].values())
    softmax, multimax = (
        cases[1]["contestants"][name]["flops"] for name in ("softmax (timm)", "MultiMax (auto)")
    )
    # 12 layers of 3 heads, 196 patches, width 192, 1000 classes, with one FLOP per multiplication
    # and its addition; sigma has 15 per score.
    patches, width, layers = 196, 192, 12
    products = patches * 3 * 16**2 * width + width * 1000
    products += layers * (12 * patches * width**2 + 2 * patches**2 * width)
    assert softmax == products
    assert multimax - softmax == 15 * (layers * 3 * patches**2 + 1000)
