"""What systems share that run a language model over prompts."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from ...errors import InputError, ScoringError
from ...method.batching import Batches, DoesNotFitError, Ids, token_budget_for
from ...method.template import clean, private_copy
from ...reranker import Reranker


class Batched(Reranker):
    """A language model and its tokenizer. What a text contains is read as text: a special token written there is none.

    `max_length`: positions of one prompt.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any, max_length: int) -> None:
        self.model, self.max_length = model, max_length
        self.padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
        self.token_budget = token_budget_for(model.device)  # padded tokens in one batch
        self._text = private_copy(tokenizer, special_tokens=False)

    def score(self, query: str, documents: Sequence[str]) -> list[float]:
        """One score a document; InputError and ScoringError name one that cannot be scored."""
        return [found.score for found in self.score_documents(query, documents)]

    def encode(self, before: str, texts: Sequence[str], room: int, **options: bool) -> tuple[list[Ids], list[bool]]:
        """Token ids of each text behind the same words, joined as in training, cut to the room; and which were cut."""
        for index, text in enumerate(texts):
            if not isinstance(text, str):
                raise InputError(f"A query or document must be a string, got {type(text).__name__} at {index}.")
        encoded = [item.ids for item in self._text.encode_batch([before + clean(text) for text in texts], **options)]
        return [tuple(ids[:room]) for ids in encoded], [len(ids) > room for ids in encoded]

    def compute_each(self, prompts: Sequence[Ids], compute: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        """What the model gives for each prompt, computed in batches; equal prompts are computed once.

        `compute`: token ids (N, T) and their mask (N, T) -> (N, ...). Padding on the right leaves positions alone.

        Raises:
            ScoringError: A prompt does not fit into memory even alone; its position is given.
        """
        found: dict[Ids, Tensor] = {}
        batches = Batches(list(dict.fromkeys(prompts)), self.token_budget)
        try:
            for batch in batches:
                with batches.attempt():
                    rows = [torch.tensor(row) for row in batch]
                    ids = pad_sequence(rows, batch_first=True, padding_value=self.padding)
                    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
                    results = compute(ids.to(self.model.device), mask.to(self.model.device))
                    found.update(zip(batch, results, strict=True))
        except DoesNotFitError as error:
            index = prompts.index(error.ids)
            raise ScoringError(
                f"Document {index} ({len(error.ids)} tokens with the prompt) does not fit into memory even by itself. "
                "Pass a smaller max_length, or load the model in 8-bit or on another device.",
                index,
            ) from None
        self.token_budget = batches.budget
        return [found[ids] for ids in prompts]
