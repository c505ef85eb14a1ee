"""Errors name the layer where numbers stop being finite; fp16 training recovers from overflow."""

import copy
import math

import pytest
import torch
from fairseq import checkpoint_utils

from multimax_fairseq.errors import UsageError
from multimax_fairseq.mappings.multimax import Modulator
from multimax_fairseq.models.numerics import Examined

pytestmark = pytest.mark.long

TRANSLATION, LANGUAGE = "transformer_multimax", "transformer_lm_multimax"
OUTPUT = ("--output-normalizer", "multimax")


def modulators(module):
    return [part for part in module.modules() if isinstance(part, Modulator)]


def overflow(module):
    """Make a modulator turn ordinary scores into infinite ones."""
    [modulator] = modulators(module)
    with torch.no_grad():
        for name, value in modulator.named_parameters():
            value.fill_(-torch.finfo(value.dtype).max if "coefficient" in name else 0.0)


def break_first_layer(model):
    with torch.no_grad():
        model.decoder.layers[0].fc2.weight.fill_(math.nan)


BROKEN = {
    "self-attention of encoder layer 2": lambda m: overflow(m.encoder.layers[1].self_attn),
    "self-attention of decoder layer 1": lambda m: overflow(m.decoder.layers[0].self_attn),
    "cross-attention of decoder layer 2": lambda m: overflow(m.decoder.layers[1].encoder_attn),
    "output layer": lambda m: overflow(m.decoder.output_modulator),
    "self-attention of decoder layer 2": break_first_layer,
}


@pytest.mark.parametrize("layer", BROKEN)
def test_train_step_names_the_layer_of_non_finite_scores(trainer_of, layer):
    trainer, batches = trainer_of(TRANSLATION, *OUTPUT)
    assert trainer.train_step(batches[:1]) is not None
    BROKEN[layer](trainer.get_model())
    before = copy.deepcopy(trainer.get_model().state_dict())
    with pytest.raises(UsageError) as raised:
        trainer.train_step(batches[:2])
    text = str(raised.value)
    kind = "logit" if layer == "output layer" else "modulated score"
    number = "nan" if BROKEN[layer] is break_first_layer else "-?(inf|nan)"
    begin = r"update 2 is not finite \(gradients are Nan/Inf\): it begins in the "
    raised.match(rf"{begin}{layer}, where the largest {kind} is {number}\b.*; lower --lr, ")
    assert "\n" not in text and "--clip-norm" in text
    after = trainer.get_model().state_dict()
    assert all(
        torch.equal(value.nan_to_num(), after[key].nan_to_num()) for key, value in before.items()
    )


def test_train_step_names_a_non_finite_gradient(trainer_of):
    trainer, batches = trainer_of(TRANSLATION)
    weight = trainer.get_model().decoder.layers[1].fc1.weight
    weight.register_hook(lambda gradient: gradient * torch.inf)
    with pytest.raises(UsageError) as raised:
        trainer.train_step(batches[:1])
    raised.match(
        r"all scores are finite \(in the [\w-]+ of \w+ layer \d the largest modulated score is "
        r"\S+, of scores up to \S+\), and the gradient of 'decoder\.layers\.1\.fc1\.weight' is not;"
    )


@pytest.mark.parametrize("arch", [TRANSLATION, LANGUAGE])
def test_fp16_recovers_from_an_overflow_in_a_modulator(trainer_of, arch, monkeypatch):
    """Tests the loss scaler on CPU tensors; fairseq would move a number to a GPU."""
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
    scale = ("--fp16-init-scale", str(2**16), "--fp16-scale-window", "1000")
    trainer, batches = trainer_of(arch, *OUTPUT, "--fp16-no-flatten-grads", *scale, fp16=True)
    model = trainer.get_model()
    assert not trainer.cuda and next(model.parameters()).dtype == torch.float16
    [modulator] = modulators(model.decoder.output_modulator)
    before = modulator.high_coefficient.detach().clone()
    overflows = 0
    for _ in range(20):
        done = trainer.get_num_updates()
        trainer.train_step(batches[:1])
        overflows += trainer.get_num_updates() == done
        assert all(value.isfinite().all() for value in model.state_dict().values())
    assert 0 < overflows < 20 and trainer.get_num_updates() == 20 - overflows
    assert trainer.optimizer.scaler.loss_scale == 2 ** (16 - overflows)
    assert (modulator.high_coefficient != before).all()


def test_fp16_overflow_at_minimum_scale_names_the_layer(trainer_of, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
    trainer, batches = trainer_of(TRANSLATION, "--fp16-no-flatten-grads", fp16=True)
    with torch.no_grad():
        trainer.get_model().decoder.layers[0].self_attn.q_proj.weight.mul_(6e4)
    with pytest.raises(UsageError, match="Minimum loss scale reached.*decoder layer 1, where"):
        for _ in range(30):
            trainer.train_step(batches[:1])


@pytest.mark.parametrize("broken", [math.nan, math.inf, torch.tensor(math.nan)])
def test_save_checkpoint_ignores_non_finite_validation_loss(trainer_of, broken, caplog, tmp_path):
    trainer, _ = trainer_of(LANGUAGE, "--keep-best-checkpoints", "1")
    epoch = trainer.get_train_iterator(1)
    epoch.next_epoch_itr(shuffle=False)
    save = checkpoint_utils.save_checkpoint
    vars(save).pop("best", None)  # left by another test

    def kept():
        found = [*tmp_path.glob("checkpoint.best_loss_*.pt"), tmp_path / "checkpoint_best.pt"]
        states = [torch.load(path, weights_only=False)["extra_state"] for path in found]
        return [state["val_loss"] for state in states]

    try:
        for loss, best in ((3.0, 3.0), (broken, 3.0), (4.0, 3.0), (2.5, 2.5)):
            last = save(trainer.cfg.checkpoint, trainer, epoch, loss)
            assert last is not None and kept() == [best, best]
    finally:
        vars(save).pop("best", None)
    [warning] = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith(f"loss of the validation at update 0 is {float(broken)}: not ")


def test_why_not_finite_remembers_earlier_batches(build, translation_batch):
    """Finite passes of the other batches of an update may follow."""
    model, sample = build(TRANSLATION), translation_batch()["net_input"]
    projection = model.encoder.layers[1].self_attn.q_proj
    kept = projection.bias.detach().clone()

    def forward():
        for value in (kept, torch.full_like(kept, math.nan), kept):
            projection.bias.copy_(value)
            model(**sample)

    found = model.why_not_finite(forward)
    assert found.startswith("it begins in the self-attention of encoder layer 2, where ")


def test_why_not_finite_ignores_logits_of_padding(build, translation_batch):
    model, sample = build(TRANSLATION), translation_batch(((9, 7), (4, 2)))["net_input"]
    padding = sample["prev_output_tokens"].eq(model.decoder.padding_idx).T[:, :, None]
    assert padding.any()
    model.decoder.layers[-1].register_forward_hook(
        lambda layer, x, found: (found[0].masked_fill(padding, math.nan), *found[1:])
    )
    assert model.why_not_finite(lambda: model(**sample)).startswith("all scores are finite (in ")


def test_why_not_finite_ignores_scores_of_padding_keys(build, translation_batch):
    model, sample = build(TRANSLATION), translation_batch(((9, 4), (4, 4)))["net_input"]
    padding = sample["src_tokens"].eq(model.decoder.padding_idx).T[:, :, None]
    assert padding.any()
    model.encoder.layers[1].self_attn.k_proj.register_forward_hook(
        lambda layer, x, keys: keys.masked_fill(padding, math.nan)
    )
    assert model.why_not_finite(lambda: model(**sample)).startswith("all scores are finite (in ")


def test_why_not_finite_names_the_layer_after_an_exception(build, translation_batch):
    model, sample = build(TRANSLATION), translation_batch()["net_input"]

    def forward():
        model.encoder.layers[1].self_attn.q_proj.bias.fill_(math.nan)
        model(**sample)
        raise ValueError("probabilities that are none")

    found = model.why_not_finite(forward)
    assert found.startswith("it begins in the self-attention of encoder layer 2, where ")


def test_train_step_names_the_last_non_finite_gradient(trainer_of):
    """Backpropagation runs from the output, so the last layer is where the gradients fail first."""
    trainer, batches = trainer_of(TRANSLATION)
    for layer in trainer.get_model().decoder.layers:
        layer.fc1.weight.register_hook(lambda gradient: gradient * torch.inf)
    with pytest.raises(UsageError, match=r"gradient of 'decoder\.layers\.1\.fc1\.weight' is not;"):
        trainer.train_step(batches[:1])


def test_train_step_examines_all_batches_with_equal_dropout(trainer_of):
    trainer, batches = trainer_of(TRANSLATION, "--dropout", "0.3")
    model, drawn = trainer.get_model(), []
    model.register_forward_pre_hook(lambda *_: drawn.append(torch.get_rng_state()))
    new = set(batches[1]["net_input"]["src_tokens"].flatten().tolist())
    word = max(new - set(batches[0]["net_input"]["src_tokens"].flatten().tolist()))
    with torch.no_grad():
        model.encoder.embed_tokens.weight[word] = math.nan
    with pytest.raises(UsageError, match="it begins in the self-attention of encoder layer 1"):
        trainer.train_step(batches[:2])
    assert torch.equal(drawn[0], drawn[-2])


def test_train_step_keeps_fairseqs_error_for_other_models(trainer_of, monkeypatch):
    trainer, batches = trainer_of(TRANSLATION)
    monkeypatch.delattr(Examined, "why_not_finite")
    break_first_layer(trainer.get_model())
    with pytest.raises(FloatingPointError, match="Nan/Inf"):
        trainer.train_step(batches[:1])


def test_save_checkpoint_accepts_a_missing_validation_loss(trainer_of, caplog, tmp_path):
    trainer, _ = trainer_of(LANGUAGE)
    epoch = trainer.get_train_iterator(1)
    epoch.next_epoch_itr(shuffle=False)
    assert checkpoint_utils.save_checkpoint(trainer.cfg.checkpoint, trainer, epoch, None)
    assert (tmp_path / "checkpoint_last.pt").exists()
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
