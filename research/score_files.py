"""Scores of one system on one set in a file, so that nothing is scored twice."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from rsrank_rag import RSRank
from rsrank_rag.artifact.identity import prefix_identity
from rsrank_rag.cli.arguments import progress
from rsrank_rag.errors import InputError
from rsrank_rag.evaluation.datasets import LabelledQuery
from rsrank_rag.evaluation.evaluate import score_dataset
from rsrank_rag.evaluation.metrics import ScoredQuery
from rsrank_rag.method.formula import to_numpy
from rsrank_rag.partial_files import write_text
from rsrank_rag.reranker import Reranker

Sets = Mapping[str, Sequence[LabelledQuery]]
Scored = dict[str, list[ScoredQuery]]


def identity(ranker: RSRank) -> str:
    """Short hash of the language model, its dtype, the template and B."""
    parts = prefix_identity(ranker.backbone, ranker.config) | {"dtype": str(ranker.backbone.dtype)}
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode())
    for name, weights in sorted(ranker.projection.state_dict().items()):
        digest.update(name.encode() + to_numpy(weights).tobytes())
    return digest.hexdigest()[:16]


def read(path: Path, queries: Sequence[LabelledQuery]) -> list[ScoredQuery]:
    """The queries' scores.

    Raises:
        InputError: The file holds scores of other queries or of other documents.
    """
    scores_of = {}
    for row in json.loads(path.read_text(encoding="utf-8")):
        scores_of[row["id"]] = row["scores"]
    scored = []
    for query in queries:
        scores = scores_of.get(query.id, [])
        if len(scores) != len(query.documents):
            raise InputError(
                f"{path} does not hold the scores of query {query.id!r} with its "
                f"{len(query.documents)} documents. Remove the file to score them again."
            )
        labels = [document.relevant for document in query.documents]
        scored.append(ScoredQuery(scores, labels))
    return scored


def write(path: Path, queries: Sequence[LabelledQuery], scored: Sequence[ScoredQuery]) -> None:
    """Write the scores."""
    rows = []
    for query, row in zip(queries, scored, strict=True):
        rows.append({"id": query.id, "scores": list(map(float, row.scores))})
    write_text(path, json.dumps(rows))


def score_all(
    systems: Mapping[str, Reranker], sets: Sets, folder: Path, key: str = ""
) -> dict[str, Scored]:
    """Scores of every system on every set, by label.

    All systems score a query before the next one, so that systems of one model share its cached
    prefixes.

    Args:
        systems: Label -> reranker.
        sets: Name -> labelled queries.
        folder: Folder of the files. Scores that a file holds are not computed again.
        key: A part of the files' names that says what a label does not say, such as weights.
    """
    scored: dict[str, Scored] = {label: {} for label in systems}
    for name, queries in sets.items():
        files = {label: folder / f"{label}{key}, {name}.json" for label in systems}
        missing = [label for label, path in files.items() if not path.exists()]
        rows: dict[str, list[ScoredQuery]] = {label: [] for label in missing}
        if missing:
            title = f"{', '.join(missing)}: {name}"
            for query in progress(queries, title):
                for label in missing:
                    rows[label] += score_dataset(systems[label], [query])
        for label in missing:
            write(files[label], queries, rows[label])
        for label, path in files.items():
            scored[label][name] = read(path, queries)
    return scored
