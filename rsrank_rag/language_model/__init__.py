"""Frozen language models: how they are loaded, what they must be able to do, how they attend."""
