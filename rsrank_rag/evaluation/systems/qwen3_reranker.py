"""Qwen3-Reranker behind the same contract."""

from copy import copy
from pathlib import Path

import torch
from torch import Tensor
from typing_extensions import Self

from ...language_model.loading import load_model
from ...language_model.options import LoadOptions
from ...method.template import private_copy
from .prompted import AnswerOdds


class Qwen3Reranker(AnswerOdds):
    """Qwen3-Reranker (0.6B, 4B, 8B): "yes" against "no" after the prompt of its model card.

    `instruction`: what is to be judged; the model card's own by default. `max_length`: positions of one prompt, 8192 on
    the model card. BackboneError and MissingDependencyError say why it could not be loaded.
    """

    PREFIX = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"

    def __init__(
        self,
        name: str | Path = "Qwen/Qwen3-Reranker-8B",
        *,
        instruction: str = "Given a web search query, retrieve relevant passages that answer the query",
        max_length: int = 8192,
        revision: str | None = None,
        options: LoadOptions | None = None,
    ) -> None:
        model, tokenizer, _ = load_model(name, revision=revision, options=options or LoadOptions(), head="causal-lm")
        copied = private_copy(tokenizer, special_tokens=True)
        before, after = (tuple(copied.encode(x, add_special_tokens=False).ids) for x in (self.PREFIX, self.SUFFIX))
        super().__init__(model, tokenizer, answers=("no", "yes"), prefix=before, suffix=after, max_length=max_length)
        self.instruction = instruction

    def with_instruction(self, instruction: str) -> Self:
        """The same model with another instruction."""
        twin = copy(self)
        twin.instruction = instruction
        return twin

    def opening(self, query: str) -> str:
        """Instruction and query."""
        return f"<Instruct>: {self.instruction}\n<Query>: {query}\n<Document>: "

    def logits(self, ids: Tensor, mask: Tensor) -> Tensor:
        """At each prompt's last token."""
        found: Tensor = self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        return found[torch.arange(len(ids), device=ids.device), mask.sum(1) - 1]
