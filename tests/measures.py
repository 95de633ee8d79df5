"""A measure and made-up scores that tests of several folders share."""

import random

from rsrank_rag.evaluation.metrics import ScoredQuery, selection_measures
from rsrank_rag.ranking.rule import Rule


def f1_at(query, threshold):
    """F1 of the documents that score above the threshold."""
    return selection_measures([query], Rule(threshold))["f1"].item()


def scored_lists(count, seed=0, documents=6):
    """Lists whose scores lie higher or lower as a whole; every third has no relevant document."""
    rng = random.Random(seed)
    queries = []
    for number in range(count):
        level = rng.gauss(0, 1.5)
        relevant = [number % 3 > 0 and place < 2 for place in range(documents)]
        scores = [rng.gauss(level + (1.5 if label else -1.5), 1) for label in relevant]
        queries.append(ScoredQuery(scores, relevant))
    return queries
