"""The measurements of scripts/benchmark.py."""
