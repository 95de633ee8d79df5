"""Measuring rerankers on labelled passages."""
