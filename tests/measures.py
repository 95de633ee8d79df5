"""A measure that tests of several folders share."""

from rsrank_rag.evaluation.metrics import selection_measures
from rsrank_rag.passages.rule import Rule


def f1_at(query, threshold):
    """F1 of the documents that score above the threshold."""
    return selection_measures([query], Rule(threshold))["f1"].item()
