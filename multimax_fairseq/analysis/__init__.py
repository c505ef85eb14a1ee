"""Analysis of trained models: what their mappings have learned."""

# The tables of a collection, one CSV file each. `collect` writes them, `collection` reads them.
COLUMNS = {
    "parameters": "updates kind layer head name value",
    "heads": "updates kind layer head queries sparsity multi_modality entropy density offset "
    "confidence bpe_merging interrogation past_turning_point support_tokens position_variance mass",
    "layers": "updates kind layer head_diversity patch_similarity mean_average_distance "
    "rollout_similarity",
    "histograms": "updates kind layer quantity left right count",
    "temperatures": "updates kind layer temperature sparsity multi_modality",
    "output": "updates bucket tokens entropy sparsity nll nll_without_modulator probability "
    "probability_without_modulator",
}
# Columns that older collections lack.
ADDED = {"heads": "support_tokens position_variance mass", "layers": "patch_similarity"}
