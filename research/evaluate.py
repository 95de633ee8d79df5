"""`rsrank evaluate` with the paper's systems by name: python -m research.evaluate --help."""

import research.systems  # noqa: F401 - makes the systems of the paper known by name
from rsrank_rag.cli.evaluation import evaluate

if __name__ == "__main__":
    evaluate()
