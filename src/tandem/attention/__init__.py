"""Attention over a paged cache: one contract, several backends."""
