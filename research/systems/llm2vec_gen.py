"""LLM2Vec-Gen: embeddings of the answer that a language model would give (arXiv:2603.10913).

The published package, llm2vec-gen 0.1.3, pins torch 2.6, transformers 4.56 and flash-attn, so it
cannot live beside this one. The recipe here follows its source and the retrieval example of its
description: special tokens with trained embeddings are appended to the text, the frozen causal
model runs over both, and the last hidden states at the last tokens go through two trained linear
maps and are averaged. The decoder, which only turns embeddings back into text, is not loaded.

Verified against that source, line by line and on tiny random models; not on the published weights.

Axes: N texts, T tokens, S special tokens that are read, E embedding size.
"""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import yaml
from huggingface_hub import snapshot_download
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel

from rsrank_rag.artifact.hub import is_folder
from rsrank_rag.backends.options import LoadOptions
from rsrank_rag.backends.torch.loading import LOAD_ERRORS, load_model
from rsrank_rag.errors import BackboneError, InputError, required
from rsrank_rag.method.batches import Ids
from rsrank_rag.reranker import Scored, as_list

from .prompted import Batched

FILES = ["*.json", "*.jinja", "*.txt", "*.yml", "reconstruction_mlp", "alignment_mlp", "encoder/*"]
"""What is needed of a repository: all but the decoder's adapter."""


class _Loader(yaml.SafeLoader):  # type: ignore[misc] # it comes without types
    """Reads run_config.yml; tags of Python objects become None, and nothing is constructed."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)


class LLM2VecGen(Batched):
    """Cosine of the LLM2Vec-Gen embeddings of query and document; the native threshold is 0.

    Args:
        name: Hub id or local folder of the adapters. Their ``run_config.yml`` names the base model.
        query_instruction: Goes before the query, as `document_instruction` before documents. The
            defaults are the retrieval example's.
        max_length: Positions of one text with its instruction and special tokens, 512 in training.

    Raises:
        BackboneError: It cannot be loaded, or is no such model.
        MissingDependencyError: peft or a quantisation's package is not installed.
    """

    threshold: float | None = 0.0

    def __init__(
        self,
        name: str | Path = "McGill-NLP/LLM2Vec-Gen-Qwen3-8B",
        *,
        query_instruction: str = "Generate a passage that best answers this question: ",
        document_instruction: str = "Summarize the following passage: ",
        max_length: int = 512,
        revision: str | None = None,
        options: LoadOptions | None = None,
    ) -> None:
        options = options or LoadOptions()
        self.query_instruction, self.document_instruction = query_instruction, document_instruction
        folder = _download(name, revision, options)
        run = _run_config(folder)
        with _reading(f"The tokenizer in {folder} could not be loaded"):
            tokenizer: Any = AutoTokenizer.from_pretrained(str(folder))
        vocabulary = tokenizer.get_vocab()
        missing = [token for token in run["special_tokens"] if token not in vocabulary]
        if missing:
            raise BackboneError(
                f"The tokenizer in {folder} lacks the special token {missing[0]!r} of "
                "run_config.yml."
            )
        self.special: Ids = tuple(vocabulary[token] for token in run["special_tokens"])
        mode = re.fullmatch(r"last_(\d+)_tokens", str(run["encoding_mode"]))
        self.read = int(mode[1]) if mode else 0
        if not 1 <= self.read <= len(self.special):
            raise BackboneError(
                f"encoding_mode is {run['encoding_mode']!r}, expected 'last_N_tokens' with N at "
                f"most the {len(self.special)} special tokens."
            )
        maps = [
            _linear(folder / part)
            for part in ("reconstruction_mlp", "alignment_mlp")
            if (folder / part).exists()
        ]
        if max_length <= len(self.special):
            raise InputError(
                f"max_length={max_length} leaves no room beside {len(self.special)} special tokens."
            )
        base = load_model(str(run["model_name_or_path"]), revision=None, options=options).model
        super().__init__(
            _with_adapter(base, folder / "encoder", len(tokenizer), options), tokenizer, max_length
        )
        self.maps = nn.Sequential(*maps).to(base.device).requires_grad_(False)

    @torch.inference_mode()
    def score_documents(self, query: str, documents: Sequence[str]) -> list[Scored]:
        """Cosine of query and document, and whether a document was cut."""
        asked, _ = self._prompts([query], self.query_instruction)
        prompts, truncated = self._prompts(as_list(documents), self.document_instruction)
        target = self.embed(asked)
        scores = (self.embed(prompts) @ target[0]).tolist() if prompts else []
        return [Scored(*row) for row in zip(scores, truncated, strict=True)]

    def _prompts(self, texts: Sequence[str], instruction: str) -> tuple[list[Ids], list[bool]]:
        """Instruction, text and special tokens; a text that is too long is cut at its end."""
        stripped = [text.strip() if isinstance(text, str) else text for text in texts]
        encoded, truncated = self.encode(instruction, stripped, self.max_length - len(self.special))
        return [(*ids, *self.special) for ids in encoded], truncated

    def embed(self, prompts: Sequence[Ids]) -> Tensor:
        """Embeddings of length 1, (N, E), fp32, on the CPU."""
        return torch.nn.functional.normalize(
            torch.stack(self.compute_each(prompts, self._embed_batch)), dim=-1
        )

    def _embed_batch(self, ids: Tensor, mask: Tensor) -> Tensor:
        hidden = self.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        places = (
            mask.sum(1, keepdim=True) - self.read + torch.arange(self.read, device=ids.device)
        )  # (N, S)
        last = hidden[torch.arange(len(ids), device=ids.device)[:, None], places].float()
        embedding: Tensor = self.maps(last).mean(1)
        return embedding.cpu()


@contextmanager
def _reading(what: str) -> Iterator[None]:
    """Around what reads files of others: whatever is wrong with them is a BackboneError."""
    try:
        yield
    except (*LOAD_ERRORS, yaml.YAMLError, UnpicklingError) as error:
        raise BackboneError(f"{what}: {type(error).__name__}: {error}") from error


def _download(name: str | Path, revision: str | None, options: LoadOptions) -> Path:
    if is_folder(name):
        return Path(name)
    with _reading(
        f"{str(name)!r} (revision {revision or 'main'}) is no local folder and could not be "
        "downloaded"
    ):
        return Path(
            snapshot_download(str(name), revision=revision, allow_patterns=FILES, **options.hub)
        )


def _run_config(folder: Path) -> dict[str, Any]:
    """What the package wrote down in training, completed by what it saved with the weights."""
    needs = "its run_config.yml must name model_name_or_path and special_tokens"
    with _reading(f"{folder} is no LLM2Vec-Gen model: {needs}"):
        found = yaml.load((folder / "run_config.yml").read_text(encoding="utf-8"), Loader=_Loader)
        saved = folder / "encoder_decoder_config.json"
        more = json.loads(saved.read_text(encoding="utf-8")) if saved.exists() else {}
        run = {"encoding_mode": "last_10_tokens", **found, **more}
        run["model_name_or_path"], run["special_tokens"]
    return run


def _with_adapter(
    base: PreTrainedModel, folder: Path, vocabulary: int, options: LoadOptions
) -> Any:
    peft = required("peft", "LLM2Vec-Gen needs peft.", "eval")
    base.resize_token_embeddings(
        vocabulary, mean_resizing=False
    )  # as in training; the adapter holds the new rows
    with _reading(f"The adapter in {folder} could not be loaded"):
        model = peft.PeftModel.from_pretrained(
            base, str(folder), torch_device=str(options.resolved_device())
        )
    return model.eval().requires_grad_(False)


def _linear(path: Path) -> nn.Linear:
    """One of the two trained maps, in fp32; pickled code is not run."""
    with _reading(f"{path} could not be read as a linear map"):
        saved = torch.load(path, map_location="cpu", weights_only=True)
        config, weights = saved["config"], saved["state_dict"]
        if config.get("pooling_mode", "linear") != "linear" or config.get("size", 1) != 1:
            raise BackboneError(
                f"{path} is not a single linear map: {config}. Only that kind is published and "
                "read."
            )
        layer = nn.Linear(config["input_dim"], config["output_dim"])
        layer.load_state_dict(
            {name.removeprefix("projection."): value.float() for name, value in weights.items()}
        )
    return layer
