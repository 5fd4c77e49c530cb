"""Adapters for libraries that run language models; each is imported when asked for, with its library."""
