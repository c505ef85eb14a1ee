"""Makes random batches in fairseq's format."""

import torch


def translation_batch(dictionary, sizes=((9, 7), (4, 5), (6, 1)), left_pad_source=True, seed=0):
    """Return sentence pairs of these (source, target) lengths, each sentence followed by </s>.

    The source is padded on the left, as fairseq does by default, or on the right.
    """
    generator = torch.Generator().manual_seed(seed)
    pad, eos = dictionary.pad(), dictionary.eos()
    source, target = (
        torch.full((len(sizes), max(column) + 1), pad) for column in zip(*sizes, strict=True)
    )
    for row, (source_length, target_length) in enumerate(sizes):
        words = torch.randint(4, len(dictionary), (source_length,), generator=generator)
        ids = torch.cat([words, torch.tensor([eos])])
        if left_pad_source:
            source[row, -len(ids) :] = ids
        else:
            source[row, : len(ids)] = ids
        words = torch.randint(4, len(dictionary), (target_length,), generator=generator)
        target[row, : target_length + 1] = torch.cat([words, torch.tensor([eos])])
    previous = torch.full_like(target, pad)
    previous[:, 0] = eos
    previous[:, 1:] = target[:, :-1].masked_fill(target[:, :-1].eq(eos), pad)
    return {
        "id": torch.arange(len(sizes)),
        "nsentences": len(sizes),
        "ntokens": int(target.ne(pad).sum()),
        "net_input": {
            "src_tokens": source,
            "src_lengths": source.ne(pad).sum(1),
            "prev_output_tokens": previous,
        },
        "target": target,
    }


def lm_batch(dictionary, lengths=(8, 5, 3), seed=0):
    """Return token sequences of these lengths, padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    pad, eos = dictionary.pad(), dictionary.eos()
    target = torch.full((len(lengths), max(lengths)), pad)
    for row, length in enumerate(lengths):
        target[row, :length] = torch.randint(4, len(dictionary), (length,), generator=generator)
    source = torch.cat([torch.full((len(lengths), 1), eos), target[:, :-1]], 1)
    return {
        "id": torch.arange(len(lengths)),
        "nsentences": len(lengths),
        "ntokens": int(target.ne(pad).sum()),
        "net_input": {
            "src_tokens": source.masked_fill(target.eq(pad), pad),
            "src_lengths": torch.tensor(lengths),
        },
        "target": target,
    }
