"""A reranker whose model is in a service."""
