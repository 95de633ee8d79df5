"""The HTTP service: one model for many applications."""
