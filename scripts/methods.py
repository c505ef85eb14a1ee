"""The labels of the experiments' rows in tables, and the papers' figures for them."""

# Rows without a figure in the papers. They are trained only if --rows names them.
RIVALS = {
    "low": ("MultiMax, low term, first order", ""),
    "both": ("MultiMax, both terms, first order", ""),
    "ssmax": ("Scalable-Softmax", ""),
    "softmax1": ("softmax-1", ""),
    "sink": ("softmax with learned sinks", ""),
    "multimax_sink": ("MultiMax with learned sinks", ""),
    "softpick": ("softpick", ""),
    "sigmoid": ("sigmoid", ""),
    "asentmax": ("ASEntmax", ""),
    "adaptive_temperature": ("softmax at an adaptive temperature", ""),
    "gate": ("gated softmax", ""),
}
# Zhou et al. 2024: Table 4 (SacreBLEU, three runs) and Table 3 (perplexity).
# Martins et al. 2020: Figure 2 (BLEU).
METHODS = {
    "iwslt14": {
        "softmax": ("softmax", "34.4 ± 0.07"),
        "sparsemax": ("sparsemax", "28.7 ± 0.16"),
        "entmax15": ("1.5-entmax", "34.6 ± 0.09"),
        "evsoftmax": ("EvSoftmax", "34.7 ± 0.06"),
        "multimax": ("MultiMax", "34.7 ± 0.07"),
    },
    "wikitext103": {
        "softmax": ("softmax", "29.4"),
        "topk": ("top-k attention", "29.1"),
        "multimax_attention": ("MultiMax attention", "29.0"),
        "multimax": ("MultiMax attention and output", "28.7"),
    },
    "iwslt17": {
        "softmax": ("discrete softmax", "23.92"),
        "continuous_softmax": ("continuous softmax", "24.00"),
        "continuous_sparsemax": ("continuous sparsemax", "24.25"),
    },
}
METHODS["multi30k"] = METHODS["iwslt14"]
METHODS["speeches"] = METHODS["wikitext103"] | {"low": ("MultiMax, low terms", "")}
# The data that a paper's figures come from.
PAPERS_DATA = {
    "iwslt14": "IWSLT14",
    "multi30k": "IWSLT14",
    "wikitext103": "WikiText-103",
    "speeches": "WikiText-103",
    "iwslt17": "IWSLT17",
}
