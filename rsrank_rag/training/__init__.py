"""Learning B: the paper's losses."""
