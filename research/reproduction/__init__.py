"""The paper's experiments: what only they need."""
