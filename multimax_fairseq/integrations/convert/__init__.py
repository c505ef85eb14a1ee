"""`multimax-convert`: converts MultiMax models from and to other toolkits.

The others store a modulator as two vectors (see vectors.py). A conversion changes names, order and
settings, but no number.
"""
