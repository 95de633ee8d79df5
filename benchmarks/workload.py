"""Workload of the benchmarks: language models, made-up passages, and plain code to compare with.

The plain code gives the same scores as `RSRank` in the way one would first write it: document and
query in one padded sequence, rows in input order, all layers.

Axes: N documents, S padded document tokens, T query tokens.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from rsrank_rag import RSRank, Template
from rsrank_rag.artifact.opening import open_artifact
from rsrank_rag.backends.options import LoadOptions, ModelSource
from rsrank_rag.backends.torch.fusion import layers_of
from rsrank_rag.backends.torch.projection import Projection
from rsrank_rag.method.formula import (
    combine,
    representational_shift,
    shift_terms,
    similarity_windows,
)

WORDS = """
river stone early market signal window quiet number garden engine letter summer copper valley
reason method island paper winter harbour doctor bridge season colour forest answer people
travel yellow morning
""".split()  # noqa: SIM905 - words read better as words
QUERY = "Which harbour did the early copper market use in winter ?"
TEMPLATE = Template(instruction="Judge the document : ", separator=" Query : ")
"""For the random models, whose tokenizer has a token for each word."""

QWEN3 = {"vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8}
SHAPES = {
    "qwen3-0.6b": {
        **QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
    "qwen3-4b": {
        **QWEN3,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
    "qwen3-8b": {
        **QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
}
TOY = {
    "vocab_size": 128,
    "head_dim": 16,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
SIZES = ("mini", *SHAPES)
WEIGHTS = ("bf16", "int8", "nf4")
"""Formats of weights; bf16 stands for the dtype that the model computes in."""


def passages(count: int, words: int, spread: float = 0.0, seed: int = 0) -> list[str]:
    """Made-up passages of about ``words`` words; ``spread`` is the largest relative deviation."""
    rng = random.Random(seed)
    shortest = round(words * (1 - spread))
    longest = round(words * (1 + spread))
    lengths = [rng.randint(shortest, longest) for _ in range(count)]
    return [" ".join(rng.choices(WORDS, k=length)) for length in lengths]


def question(tokens: int) -> str:
    """A made-up query of so many words."""
    return " ".join(random.Random(1).choices(WORDS, k=tokens))


def on_torch(name: str = "mini", **options: Any) -> RSRank:
    """An encoder on torch, also on a CPU, without a prefix cache."""
    source = ModelSource(name=name, **options)
    return RSRank(*open_artifact(source, on_onnx=False), ModelSource(cache_size=0))


def load(
    size: str,
    *,
    device: str | None = None,
    dtype: str | None = None,
    weights: str = "bf16",
    layers: int | None = None,
    toy: bool = False,
) -> RSRank:
    """`mini`, or a Qwen3 of this size with random weights and a random B, without a prefix cache.

    Args:
        size: One of `SIZES`.
        device: None for the best one present.
        dtype: None for bfloat16 where bfloat16 is fast.
        weights: One of `WEIGHTS`.
        layers: Number of layers of the random model, to try things out.
        toy: Make the random model tiny, for the same reason.
    """
    if weights != "bf16":
        dtype = weights
    if size == "mini":
        return on_torch(device=device, dtype=dtype)
    shape = dict(TOY if toy else SHAPES[size])
    if layers is not None:
        shape["num_hidden_layers"] = layers
    config = Qwen3Config(**shape, max_position_embeddings=4096, pad_token_id=0)
    width = config.head_dim
    heads = config.num_key_value_heads
    options = LoadOptions(device=device, dtype=dtype)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        with torch.device(options.resolved_device()):
            AutoModel.from_config(config, dtype=options.resolved_dtype()).save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        projection = Projection.random(range(1, config.num_hidden_layers), heads, width // 2, width)
        ranker = RSRank.from_backbone(folder, projection, template=TEMPLATE, options=options)
    return RSRank(
        ranker.backbone, ranker.prompts, ranker.projection, ranker.config, ModelSource(cache_size=0)
    )


def keep_share(ranker: RSRank, documents: list[str], share: float, query: str = QUERY) -> None:
    """Cache the prefixes of this share of the documents, and no others."""
    ranker.cache.tiers.clear()
    if share:
        ranker.score(query, documents[: round(share * len(documents))])


def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each word that the made-up texts and the template have."""
    others = f"{QUERY} {TEMPLATE.instruction} {TEMPLATE.separator} .".split()
    vocabulary: dict[str, int] = {}
    for piece in ["<pad>", "<unk>", "<s>", *WORDS, *others]:
        vocabulary.setdefault(piece, len(vocabulary))
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", unk_token="<unk>", bos_token="<s>"
    )


Values = Callable[[list[tuple[int, ...]], tuple[int, ...]], list[Tensor]]
"""Each layer's value vectors at the query's tokens, (N, H, T, D), for prefixes and a query."""


@dataclass(frozen=True)
class Plain:
    """RSRank's score by plain transformers code.

    Attributes:
        ranker: The reranker that gives the same scores.
        values: Reads value vectors.
        rows: Documents in one batch.
    """

    ranker: RSRank
    values: Values
    rows: int

    @torch.inference_mode()
    def score(self, query: str, documents: Sequence[str]) -> list[float]:
        """Scores in input order."""
        prompts = self.ranker.prompts
        projection = self.ranker.projection
        tokens = prompts.query(query)
        tokenised = prompts.documents(list(documents), len(tokens.ids))
        prefixes = [document.ids for document in tokenised]
        null_values, _ = self._read([prompts.null_prefix], tokens.ids, tokens.scored)
        scores: list[float] = []
        for start in range(0, len(prefixes), self.rows):
            batch = prefixes[start : start + self.rows]
            values, agreement = self._read(batch, tokens.ids, tokens.scored)
            total = torch.zeros(len(batch), device=self.ranker.backbone.device)
            for place, layer in enumerate(projection.layers):
                shift = representational_shift(
                    values[layer][:, :, tokens.scored], null_values[layer][:, :, tokens.scored]
                )
                heads = projection.head_weight
                head_weight = None if heads is None else heads[place]
                terms = shift_terms(shift, projection.weight[place], head_weight)
                total += terms.mean(-1).sum(-1)
            for shift_score, of_windows in zip(total, agreement, strict=True):
                scores.append(float(combine(shift_score, of_windows, projection.agreement)))
        return scores

    def _read(
        self, prefixes: list[tuple[int, ...]], query: tuple[int, ...], scored: slice
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Value vectors of the query's tokens, and agreement (W, 2) of each document's W windows.

        Hooks take the documents out of the mask of a BERT's layers below the fusion layer, and keep
        the documents' states as they are above.
        """
        fusion = self.ranker.config.fusion_layer
        width = max(map(len, prefixes))
        attention_window = self.ranker.config.attention_window
        fused: list[Tensor] = []

        def separate(_module: object, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            mask = args[1].clone()
            mask[..., width:, :width] = False
            if attention_window is not None:
                positions = torch.arange(width, device=mask.device)
                near = (positions[:, None] - positions).abs() <= attention_window // 2
                mask[..., :width, :width] &= near | (positions == 0)
            return (args[0], mask, *args[2:])

        def store(_module: object, args: tuple[Tensor, ...]) -> None:
            fused.append(args[0])

        def restore(_module: object, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return (torch.cat([fused[0][:, :width], args[0][:, width:]], 1), *args[1:])

        layers = layers_of(self.ranker.backbone.model)
        hooks = [layer.register_forward_pre_hook(separate) for layer in layers[:fusion]]
        hooks.append(layers[fusion].register_forward_pre_hook(store))
        if fusion:
            hooks += [layer.register_forward_pre_hook(restore) for layer in layers[fusion + 1 :]]
        try:
            values = self.values(prefixes, query)
        finally:
            for hook in hooks:
                hook.remove()
        if not fusion:
            return values, [torch.zeros(1, 2, device=fused[0].device)] * len(prefixes)
        return values, self._agreement(fused[0], prefixes, scored)

    def _agreement(
        self, fused: Tensor, prefixes: list[tuple[int, ...]], scored: slice
    ) -> list[Tensor]:
        """Cosine and MaxSim (W, 2) of each document's W windows.

        Args:
            fused: States (N, S + T, width) that enter the fusion layer.
            prefixes: Token ids of each document's prefix.
            scored: The scored tokens of the query.
        """
        prompts = self.ranker.prompts
        width = max(map(len, prefixes))
        states = fused.float()
        projection = value_projections(self.ranker.backbone.model)[self.ranker.config.fusion_layer]
        values = normalize(projection(fused).float(), dim=-1)
        agreement = []
        for row, prefix in enumerate(prefixes):
            cosines = values[row, width:][scored] @ values[row, : len(prefix)].mT
            cosines[:, : len(prompts.instruction)] = -1
            cosines[:, len(prefix) - prompts.after_document :] = -1
            query_mean = states[row, width:].mean(0)
            pairs = []
            windows = similarity_windows(len(prefix), self.ranker.config.similarity_window)
            for start, stop in windows:
                document_mean = states[row, start:stop].mean(0)
                cosine = cosine_similarity(document_mean, query_mean, dim=0)
                maxsim = cosines[:, start:stop].amax(1).mean()
                pairs.append(torch.stack([cosine, maxsim]))
            agreement.append(torch.stack(pairs))
        return agreement


def value_projections(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Each layer's value projection, of a decoder or of a BERT."""
    if hasattr(model, "encoder"):
        return [layer.attention.self.value for layer in model.encoder.layer]
    return [layer.self_attn.v_proj for layer in model.layers]


def _inputs(
    ranker: RSRank, prefixes: list[tuple[int, ...]], query: tuple[int, ...]
) -> dict[str, Tensor]:
    """One padded batch: a decoder is padded on the left; an encoder gets the block mask."""
    width = max(map(len, prefixes))
    count = len(query)
    device = ranker.backbone.device
    id_rows = []
    mask_rows = []
    for prefix in prefixes:
        padding = [0] * (width - len(prefix))
        ones = [1] * len(prefix)
        if ranker.backbone.causal:
            id_rows.append([*padding, *prefix, *query])
            mask_rows.append([*padding, *ones, *[1] * count])
        else:
            id_rows.append([*prefix, *padding, *query])
            mask_rows.append([*ones, *padding, *[1] * count])
    ids = torch.tensor(id_rows, device=device)
    mask = torch.tensor(mask_rows, device=device)
    if ranker.backbone.causal:
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        return {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    positions = torch.tensor([[*range(width), *range(count)]] * len(prefixes), device=device)
    block_mask = mask.bool()[:, None].repeat(1, width + count, 1)
    block_mask[:, :width, width:] = False
    return {
        "input_ids": ids,
        "attention_mask": block_mask[:, None],
        "position_ids": positions,
    }


def by_hidden_states(ranker: RSRank) -> Values:
    """Plain code: the causal LM with logits and hidden states, then the value projections again."""
    base = ranker.backbone.model
    causal = ranker.backbone.causal
    whole = _with_head(base) if causal else base

    def read_values(prefixes: list[tuple[int, ...]], query: tuple[int, ...]) -> list[Tensor]:
        inputs = _inputs(ranker, prefixes, query)
        hidden = whole(**inputs, output_hidden_states=True, use_cache=False).hidden_states
        values = []
        for layer, projection in enumerate(value_projections(base)):
            states = hidden[layer]
            if causal:
                states = base.layers[layer].input_layernorm(states)
            values.append(_heads(projection(states[:, -len(query) :]), ranker))
        return values

    return read_values


def by_hooks(ranker: RSRank) -> Values:
    """Plain code: the base model, with a hook on each value projection for the query's tokens."""
    model = ranker.backbone.model

    def read_values(prefixes: list[tuple[int, ...]], query: tuple[int, ...]) -> list[Tensor]:
        values: list[Tensor] = []

        def store(_module: object, _args: object, output: Tensor) -> None:
            values.append(_heads(output[:, -len(query) :], ranker))

        hooks = [layer.register_forward_hook(store) for layer in value_projections(model)]
        try:
            model(**_inputs(ranker, prefixes, query), use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        return values

    return read_values


def _heads(states: Tensor, ranker: RSRank) -> Tensor:
    return states.unflatten(-1, (ranker.backbone.num_heads, -1)).transpose(1, 2)


def _with_head(base: torch.nn.Module) -> torch.nn.Module:
    """The causal LM around a base model, its output matrix tied to the embeddings."""
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(base.config)
    whole.model = base
    whole.lm_head.weight = base.embed_tokens.weight
    return whole.eval()


class SameSizeCrossEncoder:
    """sentence-transformers' CrossEncoder over a model of the same size with a random head.

    Its scores mean nothing. Its time is what such a model costs.

    Args:
        ranker: The reranker with the language model under the head.
    """

    def __init__(self, ranker: RSRank) -> None:
        from sentence_transformers import CrossEncoder
        from transformers import AutoModelForSequenceClassification

        base = ranker.backbone.model
        labels = {"id2label": {0: "relevant"}, "label2id": {"relevant": 0}, "pad_token_id": 0}
        config = type(base.config).from_dict({**base.config.to_dict(), **labels})
        device, dtype = ranker.backbone.device, ranker.backbone.dtype
        small = type(config).from_dict(
            {**config.to_dict(), "num_hidden_layers": 1, "layer_types": None}
        )
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder)
            AutoModelForSequenceClassification.from_config(small, dtype=dtype).save_pretrained(path)
            ranker.prompts.tokenizer.save_pretrained(path)
            self.model = CrossEncoder(
                str(path), device=str(device), max_length=ranker.prompts.max_length
            )
        with torch.device(device):
            whole = AutoModelForSequenceClassification.from_config(config, dtype=dtype)
        if ranker.backbone.causal:
            # One copy of the weights is enough.
            whole.model = base
        self.model[0].model = whole.eval()
        self.instruction = ranker.prompts.template.instruction if ranker.backbone.causal else ""

    def score(self, query: str, documents: Sequence[str]) -> list[float]:
        """A number for each document."""
        pairs = [(self.instruction + document, query) for document in documents]
        return [float(score) for score in self.model.predict(pairs, show_progress_bar=False)]
