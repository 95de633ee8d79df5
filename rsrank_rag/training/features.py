"""Reading features: the shifts of labelled queries, computed once by the frozen language model.

Axes: L layers, H heads, N documents, T scored query tokens, D head dimension.
"""

import hashlib
import json
import math
import random
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import InputError, ScoringError, TrainingError
from ..evaluation.datasets import LabelledQuery
from ..method.concurrent_batches import Batches, DoesNotFitError, Ids
from ..method.scoring import Row, ShiftReader
from ..method.template import PromptTokenizer
from .recipe import FeaturePart
from .store import QueryFeatures


def joined_documents(prompts: PromptTokenizer, documents: Sequence[str], query_length: int) -> Ids:
    """One prefix with several documents, a line break between them: the oracle's (Section 4.2).

    Documents that do not fit together get equal shares; what a shorter one leaves goes to others.
    """
    encoded = prompts.encode(documents)
    line_break = prompts.encode(["\n"])[0]
    most = prompts.document_limit(query_length)
    left = max(most - len(line_break) * (len(encoded) - 1), 0)
    by_length = sorted(range(len(encoded)), key=lambda index: len(encoded[index]))
    shares = {}
    for rank, index in enumerate(by_length):
        shares[index] = min(len(encoded[index]), left // (len(encoded) - rank))
        left -= shares[index]
    joined: list[int] = []
    for index, ids in enumerate(encoded):
        if index:
            joined += line_break
        joined += ids[: shares[index]]
    return (*prompts.instruction, *joined[:most], *prompts.separator)


def stored_tokens(length: int, most: int | None) -> list[int]:
    """Which of a query's scored tokens are stored: all, or so many of them, evenly spread."""
    if most is None or length <= most:
        return list(range(length))
    return [int(length / most * (i + 0.5)) for i in range(most)]


def check_texts(query: LabelledQuery) -> None:
    """Raise InputError for a query without a document that has text."""
    if not any(document.content().strip() for document in query.documents):
        raise InputError(f"Query {query.id!r} has no document with text. Remove it from the data.")


class FeatureExtractor:
    """Turns labelled queries into features.

    Args:
        reader: Reads shifts of the language model.
        options: What is read.
        token_budget: Padded tokens of a batch. It shrinks where memory runs out.
    """

    def __init__(
        self, reader: ShiftReader, options: FeaturePart | None = None, *, token_budget: int = 16384
    ) -> None:
        self.reader = reader
        self.options = options or FeaturePart()
        self.token_budget = token_budget

    @torch.inference_mode()
    def extract(self, query: LabelledQuery) -> QueryFeatures:
        """Features of one query.

        Raises:
            InputError: The query is empty or too long, or none of its documents has text.
            ScoringError: A document does not fit into memory.
            TrainingError: A shift is not finite in the dtype of the store.
        """
        check_texts(query)
        prompts = self.reader.prompts
        tokenised = prompts.query(query.query)
        documents = self._documents(query, len(tokenised.ids))
        labels = tuple(document.relevant for document in query.documents)
        positions = stored_tokens(tokenised.length, self.options.max_tokens)
        # A document without tokens shifts nothing.
        places = places_of(documents, longer_than=len(prompts.null_prefix))
        dtype = getattr(torch, self.options.dtype)
        by_layer: dict[int, Tensor] = {}
        similarities = [(0.0, 0.0)] * len(documents)

        def read(batch: list[Row]) -> None:
            def store(layer: int, shift: Tensor) -> None:
                if layer not in by_layer:
                    size = shift.shape[1], len(documents), len(positions), shift.shape[3]
                    by_layer[layer] = torch.zeros(size, dtype=dtype)
                stored = shift[:, :, positions].to(dtype).cpu()
                for row, shifts in zip(batch, stored, strict=True):
                    by_layer[layer][:, places[row.document]] = shifts[:, None]

            parts = self.reader.read(batch, store).tolist()
            for row, (cosine, *matches) in zip(batch, parts, strict=True):
                for place in places[row.document]:
                    similarities[place] = cosine, math.fsum(matches)

        rows = [Row(ids, tokenised) for ids in places]
        batches = Batches(rows, self.token_budget, extra=len(tokenised.ids))
        try:
            for batch in batches:
                with batches.attempt():
                    read(batch)
        except DoesNotFitError as error:
            raise ScoringError(
                f"({len(error.ids)} tokens) does not fit into memory even by itself. Set a smaller "
                "model.max_length, or load the model in 8-bit or on another device.",
                places[error.ids.document][0],
                query=repr(query.id),
            ) from None
        # Memory would run out again with every query.
        self.token_budget = batches.budget
        shifts = torch.stack([by_layer[layer] for layer in sorted(by_layer)]).flatten(2, 3)
        if not bool(torch.isfinite(shifts).all()):
            raise TrainingError(
                f"Query {query.id!r} has shifts that are not finite in {self.options.dtype}. Set "
                "features.dtype=bfloat16, or load the model in bfloat16 or float32."
            )
        fused = bool(self.reader.backbone.fusion_layer)
        return QueryFeatures(
            shifts,
            labels,
            len(positions),
            oracle=len(documents) > len(labels),
            similarities=tuple(similarities[: len(labels)]) if fused else (),
        )

    def _documents(self, query: LabelledQuery, query_length: int) -> list[Ids]:
        """Token ids of each document, then of all relevant ones joined, if any of them has text."""
        prompts = self.reader.prompts
        texts: list[str] = []
        relevant: list[str] = []
        for document in query.documents:
            texts.append(document.content(titles=self.options.titles))
            if document.relevant:
                relevant.append(texts[-1])
        documents = [prompt.ids for prompt in prompts.documents(texts, query_length)]
        if any(map(str.strip, relevant)):
            documents.append(joined_documents(prompts, relevant, query_length))
        return documents


def places_of(documents: Sequence[Ids], longer_than: int) -> dict[Ids, list[int]]:
    """Positions of each distinct document that has more tokens than this."""
    places: dict[Ids, list[int]] = {}
    for place, ids in enumerate(documents):
        if len(ids) > longer_than:
            places.setdefault(ids, []).append(place)
    return places


def digest(queries: Sequence[LabelledQuery]) -> str:
    """sha256 of queries, documents and labels."""
    content = [query.model_dump_json() for query in queries]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def subsample(
    queries: Sequence[LabelledQuery], max_documents: int | None, seed: int = 0
) -> list[LabelledQuery]:
    """At most so many documents of each query: relevant ones up to half of them, others at random.

    Where one class has too few documents, the other fills the rest.
    """
    if max_documents is None:
        return list(queries)
    drawn = []
    for query in queries:
        generator = random.Random(f"{seed}-{query.id}-{query.query}")
        relevant: list[int] = []
        others: list[int] = []
        for place, document in enumerate(query.documents):
            if document.relevant:
                relevant.append(place)
            else:
                others.append(place)
        count = min(len(relevant), max(max_documents // 2, max_documents - len(others)))
        places = generator.sample(relevant, count)
        places += generator.sample(others, min(len(others), max_documents - count))
        documents = tuple(query.documents[place] for place in sorted(places))
        drawn.append(query.model_copy(update={"documents": documents}))
    return drawn
