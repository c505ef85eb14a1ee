"""Computes token log-probabilities in full context, step by step, or for one hypothesis."""

import torch

# Float32 rounding; full-context and incremental decoding must agree up to it.
TOLERANCE = {"rtol": 0, "atol": 1e-4}


def log_probs(model, net_output):
    return model.get_normalized_probs(net_output, log_probs=True)


def full_context(model, sample):
    return log_probs(model, model(**sample["net_input"]))


def incremental(model, sample, beam=1):
    """Decode the sample's targets step by step, `beam` copies of each sentence."""
    previous = sample["net_input"]["prev_output_tokens"].repeat_interleave(beam, 0)
    encoder_out = model.encoder(
        sample["net_input"]["src_tokens"], sample["net_input"]["src_lengths"]
    )
    order = torch.arange(sample["nsentences"]).repeat_interleave(beam)
    encoder_out = model.encoder.reorder_encoder_out(encoder_out, order)
    state, steps = {}, []
    for t in range(previous.shape[1]):
        output = model.decoder(
            previous[:, : t + 1], encoder_out=encoder_out, incremental_state=state
        )
        steps.append(log_probs(model, output))
    return torch.cat(steps, 1), state


def score_of(model, sample, row, tokens):
    """Return the log-probability of a hypothesis under teacher forcing."""
    previous = torch.cat([torch.tensor([2]), tokens[:-1]])[None]
    inputs = {
        "src_tokens": sample["net_input"]["src_tokens"][row : row + 1],
        "src_lengths": sample["net_input"]["src_lengths"][row : row + 1],
        "prev_output_tokens": previous,
    }
    return log_probs(model, model(**inputs))[0].gather(1, tokens[:, None]).sum()
