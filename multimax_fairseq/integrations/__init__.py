"""Normalizers in models of other libraries."""
