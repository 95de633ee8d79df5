"""Decoders and encoders on torch."""
