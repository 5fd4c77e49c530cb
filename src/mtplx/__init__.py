"""Exact speculative sampling for language-model decoding on the CPU."""
