"""Documents read in parts: sentence by sentence, or in windows. Knows texts and offsets, and no reranker."""
