"""Reading features: the shifts of labelled queries, computed once by the frozen language model.

Axes: L layers, H heads, N documents, T scored query tokens, D head dimension.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import TrainingError, too_large
from ..evaluation.datasets import LabelledQuery
from ..method.batches import Batches, DoesNotFitError, Ids, Row, token_budget_for
from ..method.scoring import ShiftReader
from ..method.template import PromptTokenizer
from .feature_scores import with_equal_windows
from .recipe import FeaturePart
from .store import QueryFeatures


def joined_documents(prompts: PromptTokenizer, documents: Sequence[str], query_length: int) -> Ids:
    """One prefix with several documents, a line break between them: the oracle's (Section 4.2).

    If the documents do not fit together, the longest ones are cut to one length.
    """
    encoded = prompts.encode(documents)
    line_break = prompts.encode(["\n"])[0]
    most = prompts.document_limit(query_length)
    room = most - len(line_break) * (len(encoded) - 1)
    longest = max(map(len, encoded))
    while longest and sum(min(len(ids), longest) for ids in encoded) > room:
        longest -= 1
    joined: list[int] = []
    for ids in encoded:
        joined += [*ids[:longest], *line_break]
    return (*prompts.instruction, *joined[: -len(line_break)][:most], *prompts.separator)


def document_ids(prompts: PromptTokenizer, query: LabelledQuery, query_length: int) -> list[Ids]:
    """Token ids of each document, then of all relevant ones joined, if any of them has text."""
    texts = [document.content() for document in query.documents]
    relevant = [document.content() for document in query.documents if document.relevant]
    documents = [prompt.ids for prompt in prompts.documents(texts, query_length)]
    if any(map(str.strip, relevant)):
        documents.append(joined_documents(prompts, relevant, query_length))
    return documents


class FeatureExtractor:
    """Turns labelled queries into features.

    Args:
        reader: Reads shifts of the language model.
        options: What is read.
    """

    def __init__(self, reader: ShiftReader, options: FeaturePart) -> None:
        self.reader = reader
        self.options = options
        # Padded tokens of a batch. It shrinks where memory runs out.
        self.token_budget = token_budget_for(reader.backbone.device)

    @torch.inference_mode()
    def extract(self, query: LabelledQuery) -> QueryFeatures:
        """Features of one query, of which a document has text.

        Raises:
            InputError: The query is empty or too long.
            ScoringError: A document does not fit into memory.
            TrainingError: No document has a token, or a shift is not finite in the dtype of the
                store.
        """
        prompts = self.reader.prompts
        tokenised = prompts.query(query.query)
        documents = document_ids(prompts, query, len(tokenised.ids))
        labels = tuple(document.relevant for document in query.documents)
        # A document without tokens shifts nothing.
        shortest = len(prompts.null_prefix)
        rows = [Row(ids, tokenised) for ids in dict.fromkeys(documents) if len(ids) > shortest]
        if not rows:
            raise TrainingError(f"No document of query {query.id!r} has a token. Leave it out.")
        batches = Batches(rows, self.token_budget, extra=len(tokenised.ids))
        by_document: dict[Ids, tuple[Tensor, Tensor]] = {}
        try:
            for batch in batches:
                with batches.attempt():
                    by_document.update(self._read(batch))
        except DoesNotFitError as error:
            failure = too_large(len(error.ids), documents.index(error.ids.document))
            failure.query = repr(query.id)
            raise failure from None
        # Memory would run out again with every query.
        self.token_budget = batches.budget
        shift, _ = next(iter(by_document.values()))
        nothing = torch.zeros_like(shift), torch.zeros(1, 1, 2)
        features = [by_document.get(ids, nothing) for ids in documents]
        shifts = torch.cat([shift for shift, _ in features], dim=2)
        if not torch.isfinite(shifts).all():
            raise TrainingError(
                f"Query {query.id!r} has shifts that are not finite in {self.options.dtype}. Set "
                "features.dtype=bfloat16, or load the model in bfloat16 or float32."
            )
        similarities = [similarity for _, similarity in features[: len(labels)]]
        return QueryFeatures(
            shifts,
            labels,
            tokenised.length,
            oracle=len(documents) > len(labels),
            similarity=torch.cat(with_equal_windows(similarities)),
        )

    def _read(self, batch: list[Row]) -> dict[Ids, tuple[Tensor, Tensor]]:
        """Shifts, (L, H, T, D), and cosine and MaxSim, (1, W, 2), of each document of a batch."""
        dtype = getattr(torch, self.options.dtype)
        layers: list[Tensor] = []

        def store(_: int, shift: Tensor) -> None:
            layers.append(shift.to(dtype).cpu())

        read_similarity = self.reader.read(batch, store).cpu()
        cosines = read_similarity[..., :1]
        matches = read_similarity[..., 1:].sum(-1, keepdim=True)
        similarity = torch.cat([cosines, matches], -1).float()
        read = {}
        for place, shifts in enumerate(torch.stack(layers, dim=1)):
            read[batch[place].document] = shifts, similarity[place : place + 1]
        return read
