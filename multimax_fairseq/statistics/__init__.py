"""Metrics of attention, and one observer of a model's attention. Works without fairseq."""
