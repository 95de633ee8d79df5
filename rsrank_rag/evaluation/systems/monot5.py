"""MonoT5 behind the same contract."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ...errors import BackboneError, required
from ...language_model.loading import load_model
from ...language_model.options import LoadOptions
from ...method.template import private_copy
from .prompted import AnswerOdds


class MonoT5(AnswerOdds):
    """MonoT5 (castorini): the decoder's first token, "true" against "false".

    `max_length`: positions of one prompt, 512 in training. It is loaded in float32 unless `options` name a dtype, as T5
    was not made for less. BackboneError and MissingDependencyError (its tokenizer needs sentencepiece and protobuf) say
    why it could not be.
    """

    def __init__(
        self,
        name: str | Path = "castorini/monot5-base-msmarco",
        *,
        max_length: int = 512,
        revision: str | None = None,
        options: LoadOptions | None = None,
    ) -> None:
        options = options or LoadOptions()
        chosen = options if options.dtype is not None else replace(options, dtype="float32")
        try:
            model, tokenizer, _ = load_model(name, revision=revision, options=chosen, head="seq2seq-lm", allow_bin=True)
        except BackboneError as error:
            if "spiece.model" in str(error):  # what transformers reads it with; it complains about something else
                for package in ("sentencepiece", "google.protobuf"):
                    required(package, "MonoT5's tokenizer needs sentencepiece and protobuf.", "eval")
            raise
        relevant = private_copy(tokenizer, special_tokens=False).encode("Relevant:", add_special_tokens=False).ids
        suffix = (*relevant, tokenizer.eos_token_id)
        super().__init__(model, tokenizer, answers=("▁false", "▁true"), suffix=suffix, max_length=max_length)

    def opening(self, query: str) -> str:
        """The query."""
        return f"Query: {query} Document: "

    def logits(self, ids: Tensor, mask: Tensor) -> Tensor:
        """At the decoder's first step."""
        start = torch.full((len(ids), 1), self.model.config.decoder_start_token_id, device=ids.device)
        found: Tensor = self.model(input_ids=ids, attention_mask=mask, decoder_input_ids=start, use_cache=False).logits
        return found[:, 0]
