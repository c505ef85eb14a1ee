"""MultiMax models of other toolkits, in and out: `multimax-convert`.

All of them store the modulator as two vectors (see vectors.py). Names, order and settings change
here, and no number.
"""
