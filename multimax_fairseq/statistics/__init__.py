"""Metrics of attention, and one observer that reads them off a model; without fairseq."""
