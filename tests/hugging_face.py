"""Builds small Hugging Face models and their inputs."""

import torch
import transformers as hf

WORDS, PAD = 50, 1
SPECIAL = {"bos_token_id": 0, "pad_token_id": PAD, "eos_token_id": 2}


def gpt2(**more):
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64} | more
    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=WORDS, **sizes, **SPECIAL))


def decoder(kind, **more):
    """A Llama, or a model with the same config names; four query heads share two key heads."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = getattr(hf, f"{kind}Config")(vocab_size=WORDS, **sizes, **heads, **SPECIAL, **more)
    return getattr(hf, f"{kind}ForCausalLM")(config)


def llama(**more):
    return decoder("Llama", **more)


def bart(**more):
    sizes = {
        f"{side}_{name}": size
        for side in ("encoder", "decoder")
        for name, size in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 48))
    }
    special = SPECIAL | {"decoder_start_token_id": 2, "forced_eos_token_id": None}
    config = hf.BartConfig(
        vocab_size=WORDS, d_model=32, max_position_embeddings=64, **sizes, **special, **more
    )
    return hf.BartForConditionalGeneration(config)


def t5(kind="T5", **more):
    """A T5, or a model with the same config names."""
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    # T5 does not scale its scores, which `made` would make very large.
    special = SPECIAL | {"decoder_start_token_id": 2, "initializer_factor": 0.4}
    config = getattr(hf, f"{kind}Config")(vocab_size=WORDS, **sizes, **special, **more)
    return getattr(hf, f"{kind}ForConditionalGeneration")(config)


MODELS = (gpt2, llama, bart, t5)

LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 4}
WIDTHS = {"hidden_size": 32, "intermediate_size": 48}


def encoder_decoder(encoder, decoder, kind=hf.EncoderDecoderModel):
    """Combine an encoder with a decoder of this config."""
    decoder.is_decoder = decoder.add_cross_attention = True
    model = kind(encoder=encoder, decoder=hf.AutoModelForCausalLM.from_config(decoder))
    model.config.update({"decoder_start_token_id": 2, "pad_token_id": PAD})
    return model


def made(make, **more):
    """Build a model with large weights; at its initial scale all scores are near zero."""
    torch.manual_seed(0)
    model = make(**more).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(8 if "embed" not in name and "wpe" not in name else 4)
    return model


def tokens(rows=3, length=9, seed=1):
    return torch.randint(3, WORDS, (rows, length), generator=torch.Generator().manual_seed(seed))


def logits(model, ids, mask=None, **inputs):
    if model.config.is_encoder_decoder:
        inputs = {"decoder_input_ids": ids} | inputs
    with torch.no_grad():
        return model(ids, attention_mask=mask, **inputs).logits
