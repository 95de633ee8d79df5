"""Rerankers for processes other than that of the tests: they must be importable there."""

import os
import signal
import time

from rsrank_rag import Reranker
from rsrank_rag.errors import ArtifactError, ScoringError


class Lengths(Reranker):
    """Scores a document by the length of its text and of its query."""

    def score(self, query, documents):
        for index, text in enumerate(documents):
            if text == "no score":
                raise ScoringError("has no score.", index)
            if text == "kill the replica":
                os.kill(os.getppid(), signal.SIGKILL)
                time.sleep(60)
            if text == "kill the process":
                os.kill(os.getpid(), signal.SIGKILL)
        return [float(len(text) - 1000 * len(query)) for text in documents]


def refuse():
    raise ArtifactError("There is no such artifact.")
