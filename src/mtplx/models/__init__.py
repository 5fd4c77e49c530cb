"""Language models that need no download."""
