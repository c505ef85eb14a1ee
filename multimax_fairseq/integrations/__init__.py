"""Mappings in models of other libraries."""
