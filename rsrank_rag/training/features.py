"""Features: the shifts of labelled queries, computed once by the frozen language model.

Axes: L layers, H heads, N documents, T scored query tokens, D head dimension.
"""

import hashlib
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..artifact.config import BackboneSpec
from ..errors import InputError, ScoringError, TrainingError
from ..evaluation.datasets import LabelledQuery
from ..language_model.weights import bits_of
from ..method.backbone import Backbone
from ..method.concurrent_batches import Batches, DoesNotFitError, Ids
from ..method.scoring import Row, ShiftReader
from ..method.template import PromptTokenizer, TokenisedQuery
from .recipe import FeaturePart
from .store import FeatureSpec, QueryFeatures


@dataclass(frozen=True)
class Plan:
    """What an extraction will take: oracle prompts are not counted as documents; a row is a query token's shift."""

    queries: int
    documents: int
    prompt_tokens: int
    rows: int
    bytes: int


@dataclass(frozen=True)
class Reading:
    """What is read of the language model, and what is subtracted; others than these are made by ablations."""

    signal: str = "values"
    null_prefix: str = "empty"
    reader: Callable[[Backbone, PromptTokenizer, Sequence[int]], ShiftReader] = ShiftReader

    def shape(self, core: Backbone) -> tuple[int, int]:
        """H and D. Hidden states are one head of their whole width."""
        return (
            (1, core.config.hidden_size)
            if self.signal == "hidden"
            else (core.num_heads, core.head_dim)
        )


VALUES = Reading()  # the method's own: value vectors, the query-only run subtracted


def together(prompts: PromptTokenizer, documents: Sequence[str], query_length: int) -> Ids:
    """One prefix with several documents, a line break between them, for the oracle shift (paper, Section 4.2).

    If they do not fit together, each gets the same number of tokens; what a shorter one leaves goes to the others.
    """
    encoded, seam = prompts.encode(documents), prompts.encode(["\n"])[0]
    most = prompts.document_limit(query_length)
    room = most - len(seam) * (len(encoded) - 1)
    shares = dict.fromkeys(range(len(encoded)), 0)
    for rank, index in enumerate(sorted(shares, key=lambda i: len(encoded[i]))):
        shares[index] = min(len(encoded[index]), max(room, 0) // (len(encoded) - rank))
        room -= shares[index]
    joined: Ids = ()
    for index, ids in enumerate(encoded):
        joined += (*(seam if index else ()), *ids[: shares[index]])
    return (*prompts.instruction, *joined[:most], *prompts.separator)


def tokenise(
    query: LabelledQuery, prompts: PromptTokenizer, *, titles: bool
) -> tuple[TokenisedQuery, list[Ids]]:
    """What the language model reads for a query: the query; each document, and all relevant ones if there are any.

    Raises InputError: the query is empty or too long, or none of its documents has text.
    """
    asked = prompts.query(query.query)
    texts = [document.content(titles=titles) for document in query.documents]
    found = [prompt.ids for prompt in prompts.documents(texts, len(asked.ids))]
    if all(len(ids) == len(prompts.null_prefix) for ids in found):
        raise InputError(f"Query {query.id!r} has no document with text. Remove it from the data.")
    relevant = [
        text for text, document in zip(texts, query.documents, strict=True) if document.relevant
    ]
    if any(map(str.strip, relevant)):
        found.append(together(prompts, relevant, len(asked.ids)))
    return asked, found


def kept_tokens(length: int, most: int | None) -> list[int]:
    """Which of a query's scored tokens are kept: all, or so many of them, evenly spread."""
    if most is None or length <= most:
        return list(range(length))
    return [int(length / most * (i + 0.5)) for i in range(most)]


def plan_features(
    queries: Sequence[LabelledQuery], prompts: PromptTokenizer, options: FeaturePart, numbers: int
) -> Plan:
    """Tokenise everything and add up what it will take.

    `numbers`: of one token's shift: layers times heads times their width.
    """
    rows = tokens = 0
    read = lru_cache(maxsize=1)(tokenise)  # an estimate repeats one query
    for query in queries:
        asked, texts = read(query, prompts, titles=options.titles)
        rows += len(texts) * len(kept_tokens(asked.length, options.max_tokens))
        tokens += sum(len(ids) + len(asked.ids) for ids in texts)
    documents = sum(len(query.documents) for query in queries)
    return Plan(
        len(queries),
        documents,
        tokens,
        rows,
        rows * numbers * getattr(torch, options.dtype).itemsize,
    )


class FeatureExtractor:
    """Turns labelled queries into features, with so many padded tokens a batch, or fewer where memory runs out."""

    def __init__(
        self, reader: ShiftReader, options: FeaturePart | None = None, *, token_budget: int = 16384
    ) -> None:
        self.reader, self.options, self.token_budget = (
            reader,
            options or FeaturePart(),
            token_budget,
        )

    @torch.inference_mode()
    def extract(self, query: LabelledQuery) -> QueryFeatures:
        """Features of one query.

        RSRankError: as `tokenise`; a shift is not finite in the store's dtype; a document does not fit into memory.
        """
        asked, texts = tokenise(query, self.reader.prompts, titles=self.options.titles)
        positions, dtype = (
            kept_tokens(asked.length, self.options.max_tokens),
            getattr(torch, self.options.dtype),
        )
        bare = len(self.reader.prompts.null_prefix)  # a document without tokens shifts nothing
        wanted = {
            ids: [i for i, other in enumerate(texts) if other == ids]
            for ids in texts
            if len(ids) > bare
        }
        found: dict[int, Tensor] = {}  # layer -> (H, M, T, D)
        agreement = [(0.0, 0.0)] * len(texts)

        def read(batch: list[Row]) -> None:
            def keep(layer: int, shift: Tensor) -> None:
                if layer not in found:
                    size = shift.shape[1], len(texts), len(positions), shift.shape[3]
                    found[layer] = torch.zeros(size, dtype=dtype)
                for row, shifts in zip(batch, shift[:, :, positions].to(dtype).cpu(), strict=True):
                    found[layer][:, wanted[row.document]] = shifts[:, None]

            for row, agreed in zip(batch, self.reader.read(batch, keep).tolist(), strict=True):
                for place in wanted[row.document]:
                    agreement[place] = agreed[0], math.fsum(agreed[1:])

        batches = Batches(
            [Row(ids, asked) for ids in wanted], self.token_budget, extra=len(asked.ids)
        )
        try:
            for batch in batches:
                with batches.attempt():
                    read(batch)
        except DoesNotFitError as error:
            place = wanted[error.ids.document][0]
            raise ScoringError(
                f"({len(error.ids)} tokens) does not fit into memory even by itself. Set a "
                "smaller model.max_length, or load the model in 8-bit or on another device.",
                place,
                query=repr(query.id),
            ) from None
        self.token_budget = (
            batches.budget
        )  # what fitted once stays: memory would run out again with every query
        shifts = torch.stack([found[layer] for layer in sorted(found)]).flatten(
            2, 3
        )  # (L, H, M * T, D)
        if not bool(torch.isfinite(shifts).all()):
            raise TrainingError(
                f"Query {query.id!r} has shifts that are not finite in {self.options.dtype}. Use bfloat16 for the "
                "store, or load the model in bfloat16 or float32."
            )
        labels = tuple(document.relevant for document in query.documents)
        kept = tuple(agreement[: len(labels)]) if self.reader.backbone.fusion_layer else ()
        return QueryFeatures(shifts, labels, len(positions), len(texts) > len(labels), kept)


def spec_for(
    extractor: FeatureExtractor,
    queries: Sequence[LabelledQuery],
    backbone: BackboneSpec,
    reading: Reading = VALUES,
    sources: Sequence[str] = (),
) -> FeatureSpec:
    """What a store of these queries would be."""
    reader, core, options = extractor.reader, extractor.reader.backbone, extractor.options
    return FeatureSpec(
        backbone=backbone,
        template=reader.prompts.template,
        layers=tuple(sorted(reader.layers)),
        signal=reading.signal,
        null_prefix=reading.null_prefix,
        fusion_layer=core.fusion_layer,
        documents_stay=core.documents_stay,
        compute_dtype=str(core.dtype).removeprefix("torch."),
        bits=bits_of(core.model),
        max_length=reader.prompts.max_length,
        data=digest(queries, titles=options.titles),
        queries=len(queries),
        sources=tuple(sources),
        **options.model_dump(include={"dtype", "max_tokens"}),
    )


def digest(queries: Sequence[LabelledQuery], *, titles: bool = True) -> str:
    """sha256 of what the language model reads, and of the labels."""
    content = [
        [
            query.query,
            [[document.content(titles=titles), document.relevant] for document in query.documents],
        ]
        for query in queries
    ]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def subsample(
    queries: Sequence[LabelledQuery], max_documents: int | None, seed: int = 0
) -> list[LabelledQuery]:
    """At most so many documents a query: relevant ones up to half of them, the rest irrelevant, at random.

    What one class lacks, the other fills.
    """
    if max_documents is None:
        return list(queries)
    chosen = []
    for query in queries:
        rng = random.Random(f"{seed}-{query.id}-{query.query}")
        relevant = [i for i, document in enumerate(query.documents) if document.relevant]
        others = [i for i, document in enumerate(query.documents) if not document.relevant]
        keep = min(len(relevant), max(max_documents // 2, max_documents - len(others)))
        places = rng.sample(relevant, keep) + rng.sample(
            others, min(len(others), max_documents - keep)
        )
        chosen.append(
            query.model_copy(
                update={"documents": tuple(query.documents[i] for i in sorted(places))}
            )
        )
    return chosen
