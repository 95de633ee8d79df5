"""The experiments of the paper and of `mini`, run from a clone: ``python -m research.NAME``."""
