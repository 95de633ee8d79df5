"""Rerankers by prompt: Qwen3-Reranker and MonoT5 compare the logits of two possible answers.

Axes: N prompts, T tokens.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from typing_extensions import Self

from rsrank_rag.backends.options import LoadOptions
from rsrank_rag.backends.torch.loading import LOAD_ERRORS, quantisation
from rsrank_rag.backends.torch.quiet import quiet_transformers
from rsrank_rag.errors import BackboneError, InputError, finite, required, too_large
from rsrank_rag.method.batches import Batches, DoesNotFitError, Ids, token_budget_for
from rsrank_rag.method.template import private_copy
from rsrank_rag.reranker import Reranker, Scored, as_list
from rsrank_rag.texts import encodable


class Batched(Reranker):
    """A language model and its tokenizer. Special tokens in a text are read as plain text.

    Args:
        model: The language model.
        tokenizer: Its tokenizer.
        max_length: Positions of one prompt.

    Attributes:
        token_budget: Padded tokens in one batch.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any, max_length: int) -> None:
        self.model = model
        self.max_length = max_length
        self.padding = tokenizer.pad_token_id or 0
        self.token_budget = token_budget_for(model.device)
        self._text = private_copy(tokenizer, special_tokens=False)

    def score(self, query: str, documents: Sequence[str]) -> list[float]:
        """One score a document.

        Raises:
            InputError: A text cannot be read.
            ScoringError: A document cannot be scored.
        """
        return [scored.score for scored in self.score_documents(query, documents)]

    @abstractmethod
    def score_documents(self, query: str, documents: Sequence[str]) -> list[Scored]:
        """Score the documents of one query, and say which were cut."""

    def encode(
        self, before: str, texts: Sequence[str], limit: int, **options: bool
    ) -> tuple[list[Ids], list[bool]]:
        """Token ids of ``before`` + each text, at most ``limit``, and which texts were cut."""
        for index, text in enumerate(texts):
            if not isinstance(text, str):
                raise InputError(
                    f"A query or document must be a string, got {type(text).__name__} at {index}."
                )
        whole = [before + encodable(text) for text in texts]
        ids = []
        truncated = []
        for encoding in self._text.encode_batch(whole, **options):
            ids.append(tuple(encoding.ids[:limit]))
            truncated.append(len(encoding.ids) > limit)
        return ids, truncated

    def compute_each(
        self, prompts: Sequence[Ids], compute: Callable[[Tensor, Tensor], Tensor]
    ) -> list[Tensor]:
        """The model's output for each prompt, in batches. Equal prompts are computed once.

        Args:
            prompts: Token ids of each prompt.
            compute: Token ids (N, T) and their mask (N, T) -> (N, ...). Padding is on the right and
                leaves positions alone.

        Raises:
            ScoringError: A prompt does not fit into memory even alone. The error has the prompt's
                position.
        """
        outputs: dict[Ids, Tensor] = {}
        batches = Batches(list(dict.fromkeys(prompts)), self.token_budget)
        try:
            for batch in batches:
                with batches.attempt():
                    rows = list(map(torch.tensor, batch))
                    ids = pad_sequence(rows, batch_first=True, padding_value=self.padding)
                    mask = pad_sequence(list(map(torch.ones_like, rows)), batch_first=True)
                    results = compute(ids.to(self.model.device), mask.to(self.model.device))
                    outputs.update(zip(batch, results, strict=True))
        except DoesNotFitError as error:
            raise too_large(len(error.ids), prompts.index(error.ids)) from None
        self.token_budget = batches.budget
        return [outputs[ids] for ids in prompts]


def load(
    model_class: Any, name: str, revision: str | None, options: LoadOptions, **arguments: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A frozen model with its output layer, and its tokenizer.

    Raises:
        BackboneError: The model cannot be loaded or lacks weights.
    """
    hub = {**options.hub, "revision": revision}
    arguments = {**arguments, **quantisation(options), "dtype": options.resolved_dtype()}
    # The model's config could name kernels to download and run.
    arguments["attn_implementation"] = None
    place = f"{name!r} (revision {revision or 'main'})"
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **hub)
        with quiet_transformers():
            model, report = model_class.from_pretrained(
                name, output_loading_info=True, **hub, **arguments
            )
        if options.quantised is None:
            model = model.to(options.resolved_device())
    except LOAD_ERRORS as error:
        raise BackboneError(f"The language model {place} could not be loaded: {error}") from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise BackboneError(f"The language model {place} lacks weights, such as {missing[0]}.")
    return model.requires_grad_(False), tokenizer


# Short names of the published models.
SIZES = {
    "0.6b": "Qwen/Qwen3-Reranker-0.6B",
    "4b": "Qwen/Qwen3-Reranker-4B",
    "8b": "Qwen/Qwen3-Reranker-8B",
    "base": "castorini/monot5-base-msmarco",
    "3b": "castorini/monot5-3b-msmarco",
}


class AnswerHead(nn.Linear):
    """A language model's output layer, cut down to the tokens that are compared.

    It computes in fp32, whatever the model computes in: rounded to bfloat16, the logits of one
    query's documents are often equal. The rest of the vocabulary costs neither time nor memory.
    """

    def __init__(self, head: nn.Linear, tokens: Sequence[int]) -> None:
        super().__init__(
            head.in_features, len(tokens), bias=head.bias is not None, device=head.weight.device
        )
        rows = list(tokens)
        self.weight.data = head.weight.data[rows].float()
        if head.bias is not None:
            self.bias.data = head.bias.data[rows].float()
        self.requires_grad_(False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits (..., tokens) in fp32 of hidden states (..., hidden size)."""
        return super().forward(hidden.float())


class AnswerOdds(Batched):
    """A prompt around query and document, and the odds of one answer against the other.

    The score is the probability of the positive answer among the two, so 0.5 is the native
    threshold. Subclasses give the prompt and run the model.

    Args:
        model: The language model. An `AnswerHead` replaces its output layer.
        tokenizer: Its tokenizer.
        answers: The negative and the positive answer, as they stand in the vocabulary.
        prefix: Ids before the text.
        suffix: Ids after the text.
        max_length: Positions of one prompt. Only documents are cut.
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
    ) -> None:
        most = getattr(model.config, "max_position_embeddings", None) or max_length
        super().__init__(model, tokenizer, min(max_length, most))
        self.prefix = prefix
        self.suffix = suffix
        vocabulary = tokenizer.get_vocab()
        missing = [answer for answer in answers if answer not in vocabulary]
        head = model.get_output_embeddings()
        problem = None
        if missing:
            problem = f"its vocabulary has no {missing[0]!r}"
        elif not isinstance(head, nn.Linear) or not head.weight.is_floating_point():
            problem = "its output layer is not a plain matrix"
        if problem is not None:
            raise BackboneError(
                f"{model.name_or_path!r} is no {type(self).__name__}: {problem}. It must be one of "
                f"the checkpoints that answer {answers[1]!r} or {answers[0]!r}."
            )
        tokens = [vocabulary[answer] for answer in answers]
        model.set_output_embeddings(AnswerHead(head, tokens))

    @abstractmethod
    def opening(self, query: str) -> str:
        """The text from the end of the prefix to the beginning of the document."""

    @abstractmethod
    def logits(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Logits of the negative and the positive answer, (N, 2), from prompts and mask (N, T)."""

    def prompts(self, query: str, documents: Sequence[str]) -> tuple[list[Ids], list[bool]]:
        """Token ids of each prompt, and which documents were cut.

        Raises:
            InputError: The query is no string, or is too long.
        """
        if not isinstance(query, str):
            raise InputError(f"The query must be a string, got {type(query).__name__}.")
        opening = encodable(self.opening(query))
        limit = self.max_length - len(self.prefix) - len(self.suffix)
        length = len(self._text.encode(opening, add_special_tokens=False).ids)
        if length >= limit:
            raise InputError(
                f"With the instruction the query has {length} tokens, and the prompt has room for "
                f"{limit} with the document. Shorten the query: it is never cut, because that "
                "would change what is asked."
            )
        encoded, truncated = self.encode(opening, documents, limit, add_special_tokens=False)
        return [(*self.prefix, *ids, *self.suffix) for ids in encoded], truncated

    @torch.inference_mode()
    def score_documents(self, query: str, documents: Sequence[str]) -> list[Scored]:
        """Probability of the positive answer of the two, and whether the document was cut."""
        prompts, truncated = self.prompts(query, as_list(documents))
        probabilities = self.compute_each(prompts, self._probabilities)
        scored = []
        for index, probability in enumerate(probabilities):
            scored.append(Scored(finite(float(probability), index), truncated[index]))
        return scored

    def _probabilities(self, ids: Tensor, mask: Tensor) -> Tensor:
        logits = self.logits(ids, mask)
        # In float32, the probability would be 1 from odds of 17 nats on.
        return torch.sigmoid((logits[:, 1] - logits[:, 0]).double()).cpu()


QWEN3_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


class Qwen3Reranker(AnswerOdds):
    """Qwen3-Reranker (0.6B, 4B, 8B): "yes" against "no" after the prompt of its model card.

    Args:
        name: Hub id, folder, or a key of `SIZES`.
        instruction: What is to be judged; the model card's own instruction by default.
        max_length: Positions of one prompt, 8192 on the model card.
        revision: Commit, branch or tag of the repository.
        options: How to load the model.

    Raises:
        BackboneError: The model cannot be loaded.
        MissingDependencyError: A library is not installed.
    """

    PREFIX = (
        "<|im_start|>system\n"
        "Judge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"

    def __init__(
        self,
        name: str | Path = "Qwen/Qwen3-Reranker-8B",
        *,
        instruction: str = QWEN3_INSTRUCTION,
        max_length: int = 8192,
        revision: str | None = None,
        options: LoadOptions | None = None,
    ) -> None:
        name = SIZES.get(str(name), name)
        model, tokenizer = load(
            AutoModelForCausalLM,
            str(name),
            revision,
            options or LoadOptions(),
            use_safetensors=True,
        )
        copied = private_copy(tokenizer, special_tokens=True)
        super().__init__(
            model,
            tokenizer,
            answers=("no", "yes"),
            prefix=tuple(copied.encode(self.PREFIX, add_special_tokens=False).ids),
            suffix=tuple(copied.encode(self.SUFFIX, add_special_tokens=False).ids),
            max_length=max_length,
        )
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
        logits: Tensor = self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        return logits[torch.arange(len(ids), device=ids.device), mask.sum(1) - 1]


class MonoT5(AnswerOdds):
    """MonoT5 (castorini): the decoder's first token, "true" against "false".

    The model is loaded in float32 unless ``options`` name a dtype, as T5 was not made for less.

    Args:
        name: Hub id, folder, or a key of `SIZES`.
        max_length: Positions of one prompt, 512 in training.
        revision: Commit, branch or tag of the repository.
        options: How to load the model.

    Raises:
        BackboneError: The model cannot be loaded.
        MissingDependencyError: The tokenizer needs sentencepiece and protobuf.
    """

    def __init__(
        self,
        name: str | Path = "castorini/monot5-base-msmarco",
        *,
        max_length: int = 512,
        revision: str | None = None,
        options: LoadOptions | None = None,
    ) -> None:
        name = SIZES.get(str(name), name)
        options = options or LoadOptions()
        if options.dtype is None:
            options = options.model_copy(update={"dtype": "float32"})
        try:
            model, tokenizer = load(AutoModelForSeq2SeqLM, str(name), revision, options)
        except BackboneError as error:
            # Without these packages, transformers only says that it cannot read spiece.model.
            if "spiece.model" in str(error):
                purpose = "MonoT5's tokenizer needs sentencepiece and protobuf."
                required("sentencepiece", purpose, "eval")
                required("google.protobuf", purpose, "eval")
            raise
        copied = private_copy(tokenizer, special_tokens=False)
        relevant = copied.encode("Relevant:", add_special_tokens=False).ids
        suffix = (*relevant, tokenizer.eos_token_id)
        super().__init__(
            model, tokenizer, answers=("▁false", "▁true"), suffix=suffix, max_length=max_length
        )

    def opening(self, query: str) -> str:
        """The query."""
        return f"Query: {query} Document: "

    def logits(self, ids: Tensor, mask: Tensor) -> Tensor:
        """At the decoder's first step."""
        start = torch.full(
            (len(ids), 1), self.model.config.decoder_start_token_id, device=ids.device
        )
        logits: Tensor = self.model(
            input_ids=ids, attention_mask=mask, decoder_input_ids=start, use_cache=False
        ).logits
        return logits[:, 0]
