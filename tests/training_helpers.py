"""Labelled queries and features that tests of training share."""

import random

import torch
from click.testing import CliRunner
from conftest import DOCUMENTS, QUERIES

from rsrank_rag.cli import app
from rsrank_rag.evaluation.datasets import LabelledDocument, LabelledQuery
from rsrank_rag.evaluation.metrics import ScoredQuery, present_means
from rsrank_rag.training.store import QueryFeatures
from rsrank_rag.training.verdict import measure


def labelled(count=6, documents=DOCUMENTS):
    return [
        LabelledQuery(
            id=f"q{number}",
            query=f"{QUERIES[number % 3]} {number}",
            documents=[
                LabelledDocument(
                    id=str(i), text=f"{text} {number}", title=f"T{i}", relevant=i in (number % 3, 5)
                )
                for i, text in enumerate(documents)
            ],
        )
        for number in range(count)
    ]


def written(path, queries):
    path.write_text("\n".join(query.model_dump_json() for query in queries), encoding="utf-8")
    return path


def toy(count=12, tokens=3, seed=0, layers=2, heads=2, width=8):
    """Features that one direction separates: relevant shifts point along it, others against it."""
    generator = torch.Generator().manual_seed(seed)
    shared = torch.Generator().manual_seed(99)
    direction = torch.randn(layers, heads, 1, width, generator=shared)
    made = []
    for _ in range(count):
        relevant = (True, False, False, True)
        signs = torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0]).repeat_interleave(tokens)[:, None]
        noise = 0.3 * torch.randn(layers, heads, 5 * tokens, width, generator=generator)
        made.append(
            QueryFeatures((direction * signs + noise).half(), relevant, tokens, oracle=True)
        )
    return made


def run(*arguments, code=0):
    """The output of a command that ends with this exit code."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output + str(result.exception)
    return " ".join(result.output.split())


def scorings(count=30, help=0.0, seed=0):
    """A base's scores and another's, which helps relevant documents by so much."""
    rng = random.Random(seed)
    base, other = [], []
    for _ in range(count):
        labels = [i < 2 for i in range(6)]
        scores = [rng.gauss(0.3 if label else -0.3, 1) for label in labels]
        base.append(ScoredQuery(scores, labels))
        moved = [
            s + (help if label else -help) + rng.gauss(0, 0.05)
            for s, label in zip(scores, labels, strict=True)
        ]
        other.append(ScoredQuery(moved, labels))
    return base, other


def means(queries):
    """Means of what a verdict looks at, over the queries for which it means something."""
    return present_means(measure(queries))
