"""Documents read in parts, ranked and explained. Knows texts and numbers, and no reranker."""
