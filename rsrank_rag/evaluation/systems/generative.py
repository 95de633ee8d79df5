"""Rerankers that ask a language model for a verdict and compare the logits of its two possible answers.

The score is the probability of the positive answer among the two, so 0.5 is the native threshold.

Axes: N prompts, T tokens.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ...errors import BackboneError, InputError, MissingDependencyError, ScoringError
from ...language_model.loading import load_model
from ...language_model.options import LoadOptions
from ...method.batching import Ids, compute_each, pad_right, token_budget_for
from ...method.template import clean, private_copy
from ...reranker import Reranker, Scored, as_list

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class AnswerHead(nn.Linear):
    """A language model's output layer, cut down to the tokens that are compared.

    It computes in fp32, whatever the model computes in: rounded to bfloat16, the logits of one query's documents
    are often equal. The rest of the vocabulary costs neither time nor memory.

    Args:
        head: The whole output layer.
        tokens: Ids of the tokens to keep.
    """

    def __init__(self, head: nn.Linear, tokens: Sequence[int]) -> None:
        super().__init__(head.in_features, len(tokens), bias=head.bias is not None, device=head.weight.device)
        rows = torch.tensor(list(tokens), device=head.weight.device)
        self.weight = nn.Parameter(head.weight.detach()[rows].float(), requires_grad=False)
        if head.bias is not None:
            self.bias = nn.Parameter(head.bias.detach()[rows].float(), requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits (..., tokens) in fp32 of hidden states (..., hidden size)."""
        return super().forward(hidden.float())


class GenerativeReranker(Reranker):
    """A prompt around query and document, and the odds of one answer against the other.

    Subclasses give the prompt and run the model. What a text contains is read as text: a special token that is
    written in a document is not one.

    Args:
        model: A model with an output layer, which is replaced by an `AnswerHead`.
        tokenizer: Its tokenizer.
        answers: The negative and the positive answer, as they stand in the vocabulary.
        prefix: Ids before the text.
        suffix: Ids after it. A document that is too long is cut, never these.
        max_length: Positions of one prompt.
        token_budget: Padded tokens in one batch; None for the device's default.

    Raises:
        BackboneError: The vocabulary lacks an answer, or the output layer is not made of plain numbers.
    """

    threshold: float | None = 0.5

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        answers: tuple[str, str],
        prefix: Ids = (),
        suffix: Ids = (),
        max_length: int,
        token_budget: int | None = None,
    ) -> None:
        self.model, self.prefix, self.suffix = model, prefix, suffix
        self.padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
        self.max_length = min(max_length, getattr(model.config, "max_position_embeddings", None) or max_length)
        self.token_budget = token_budget or token_budget_for(model.device)
        self._text = private_copy(tokenizer, special_tokens=False)
        vocabulary = tokenizer.get_vocab()
        missing = [answer for answer in answers if answer not in vocabulary]
        head = model.get_output_embeddings()
        if missing or not isinstance(head, nn.Linear) or not head.weight.is_floating_point():
            lacks = f"its vocabulary has no {missing[0]!r}" if missing else "its output layer is not a plain matrix"
            raise BackboneError(
                f"{model.name_or_path!r} is no {type(self).__name__}: {lacks}. It must be one of the checkpoints that "
                f"answer {answers[1]!r} or {answers[0]!r}."
            )
        model.set_output_embeddings(AnswerHead(head, [vocabulary[answer] for answer in answers]))

    @abstractmethod
    def opening(self, query: str) -> str:
        """The text from the end of the prefix to the beginning of the document."""

    @abstractmethod
    def logits(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Logits of the negative and the positive answer, (N, 2), of prompts (N, T) and their mask (N, T)."""

    def prompts(self, query: str, documents: Sequence[str]) -> tuple[list[Ids], list[bool]]:
        """Token ids of each document's prompt, and whether the document was cut.

        Raises:
            InputError: Something is not text, or the query leaves no room for a document.
        """
        for name, text in (("The query", query), *((f"Document {i}", text) for i, text in enumerate(documents))):
            if not isinstance(text, str):
                raise InputError(f"{name} must be a string, got {type(text).__name__}.")
        opening = clean(self.opening(query))
        room = self.max_length - len(self.prefix) - len(self.suffix)
        length = len(self._text.encode(opening, add_special_tokens=False).ids)
        if length >= room:
            raise InputError(
                f"With the instruction the query has {length} tokens, and the prompt has room for {room} with the "
                "document. Shorten the query: it is never cut, because that would change what is asked."
            )
        # As one text, as in training: the document's first token may reach into the opening.
        texts = [opening + clean(document) for document in documents]
        encoded = [item.ids for item in self._text.encode_batch(texts, add_special_tokens=False)]
        return [(*self.prefix, *ids[:room], *self.suffix) for ids in encoded], [len(ids) > room for ids in encoded]

    def score(self, query: str, documents: Sequence[str]) -> list[float]:
        """Probability of the positive answer against the negative one.

        Raises:
            InputError: As `prompts`.
            ScoringError: A document could not be scored; it is named.
        """
        return [found.score for found in self.score_documents(query, documents)]

    @torch.inference_mode()
    def score_documents(self, query: str, documents: Sequence[str], *, show_progress: bool = False) -> list[Scored]:
        """As `score`, with whether a document was cut."""
        prompts, truncated = self.prompts(query, as_list(documents))
        found, self.token_budget = compute_each(prompts, self._probabilities, budget=self.token_budget)
        scores = [float(score) for score in found]
        for index, score in enumerate(scores):
            if not math.isfinite(score):
                raise ScoringError(
                    f"Document {index} scored {score}. The model overflowed on it: load it in bfloat16 or float32.",
                    index,
                )
        return [Scored(*row) for row in zip(scores, truncated, strict=True)]

    def _probabilities(self, batch: list[Ids]) -> Tensor:
        logits = self.logits(*pad_right(batch, self.padding, self.model.device))
        return torch.sigmoid((logits[:, 1] - logits[:, 0]).double()).cpu()  # fp32 would be 1 from odds of 17 nats on


class Qwen3Reranker(GenerativeReranker):
    """Qwen3-Reranker (0.6B, 4B, 8B): "yes" against "no" after the prompt of its model card.

    Args:
        name: Hub id or local folder.
        instruction: What is to be judged; the model card's own by default.
        max_length: Positions of one prompt, 8192 on the model card.
        revision: Commit, tag or branch on the Hub.
        options: Device, dtype, quantisation, access.
        token_budget: Padded tokens in one batch.

    Raises:
        BackboneError: It cannot be loaded, or is no such model.
        MissingDependencyError: 8-bit or 4-bit without bitsandbytes, fp8 without torchao.
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
        token_budget: int | None = None,
    ) -> None:
        model, tokenizer, _ = load_model(name, revision=revision, options=options or LoadOptions(), head="causal-lm")
        parts = private_copy(tokenizer, special_tokens=True)
        super().__init__(
            model,
            tokenizer,
            answers=("no", "yes"),
            prefix=tuple(parts.encode(self.PREFIX, add_special_tokens=False).ids),
            suffix=tuple(parts.encode(self.SUFFIX, add_special_tokens=False).ids),
            max_length=max_length,
            token_budget=token_budget,
        )
        self.instruction = instruction

    def opening(self, query: str) -> str:
        """Instruction and query."""
        return f"<Instruct>: {self.instruction}\n<Query>: {query}\n<Document>: "

    def logits(self, ids: Tensor, mask: Tensor) -> Tensor:
        """At each prompt's last token."""
        found: Tensor = self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        return found[torch.arange(len(ids), device=ids.device), mask.sum(1) - 1]


class MonoT5(GenerativeReranker):
    """MonoT5 (castorini): the decoder's first token, "true" against "false".

    Args:
        name: Hub id or local folder.
        max_length: Positions of one prompt, 512 in training.
        revision: Commit, tag or branch on the Hub.
        options: Device, dtype, quantisation, access; float32 unless they name a dtype, as T5 was not made for less.
        token_budget: Padded tokens in one batch.

    Raises:
        BackboneError: It cannot be loaded, or is no such model.
        MissingDependencyError: Its tokenizer needs sentencepiece and protobuf; or a quantisation's package is
            missing.
    """

    def __init__(
        self,
        name: str | Path = "castorini/monot5-base-msmarco",
        *,
        max_length: int = 512,
        revision: str | None = None,
        options: LoadOptions | None = None,
        token_budget: int | None = None,
    ) -> None:
        options = options or LoadOptions()
        chosen = options if options.dtype is not None else replace(options, dtype="float32")
        try:
            model, tokenizer, _ = load_model(name, revision=revision, options=chosen, head="seq2seq-lm", allow_bin=True)
        except BackboneError as error:
            if "spiece.model" in str(error):
                _require_sentencepiece()
            raise
        relevant = private_copy(tokenizer, special_tokens=False).encode("Relevant:", add_special_tokens=False).ids
        super().__init__(
            model,
            tokenizer,
            answers=("▁false", "▁true"),
            suffix=(*relevant, tokenizer.eos_token_id),
            max_length=max_length,
            token_budget=token_budget,
        )

    def opening(self, query: str) -> str:
        """The query."""
        return f"Query: {query} Document: "

    def logits(self, ids: Tensor, mask: Tensor) -> Tensor:
        """At the decoder's first step."""
        start = torch.full((len(ids), 1), self.model.config.decoder_start_token_id, device=ids.device)
        found: Tensor = self.model(input_ids=ids, attention_mask=mask, decoder_input_ids=start, use_cache=False).logits
        return found[:, 0]


def _require_sentencepiece() -> None:
    """What transformers reads a ``spiece.model`` with; where it is missing, it complains about something else."""
    try:
        for package in ("sentencepiece", "google.protobuf"):
            import_module(package)
    except ImportError:
        raise MissingDependencyError(
            "MonoT5's tokenizer needs sentencepiece and protobuf. Install with: pip install 'rsrank-rag[eval]'"
        ) from None
