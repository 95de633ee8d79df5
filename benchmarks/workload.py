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
from rsrank_rag.method.scoring import of_layer

WORDS = """
river stone early market signal window quiet number garden engine letter summer copper valley
reason method island paper winter harbour doctor bridge season colour forest answer people
travel yellow morning
""".split()  # noqa: SIM905 - words read better as words
QUERY = "Which harbour did the early copper market use in winter ?"
TEMPLATE = Template(instruction="Judge the document : ", separator=" Query : ")
"""For the random models, whose tokenizer has a token for each word."""

SHAPES = {
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
    "qwen3-4b": {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
    "qwen3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
}
TOY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
SIZES = ("mini", *SHAPES)
WEIGHTS = ("bf16", "int8", "nf4")
"""How weights are kept; bf16 stands for the dtype that the model computes in."""


def passages(count: int, words: int, spread: float = 0.0, seed: int = 0) -> list[str]:
    """Made-up passages of about ``words`` words; ``spread`` is the largest relative deviation."""
    rng = random.Random(seed)
    lengths = [
        rng.randint(round(words * (1 - spread)), round(words * (1 + spread))) for _ in range(count)
    ]
    return [" ".join(rng.choices(WORDS, k=length)) for length in lengths]


def question(tokens: int) -> str:
    """A made-up query of so many words."""
    return " ".join(random.Random(1).choices(WORDS, k=tokens))


def on_torch(name: str = "mini", **options: Any) -> RSRank:
    """An encoder on torch, also on a CPU. It keeps no prefixes."""
    source = ModelSource(name=name, **options)
    return RSRank(*open_artifact(source, on_onnx=False), cache_size=0)


def load(
    size: str,
    *,
    device: str | None = None,
    dtype: str | None = None,
    weights: str = "bf16",
    layers: int | None = None,
    toy: bool = False,
) -> RSRank:
    """`mini`, or a Qwen3 of this size with random weights and a random B. It keeps no prefixes.

    Args:
        size: One of `SIZES`.
        device: None for the best one present.
        dtype: None for bfloat16 where it is fast.
        weights: One of `WEIGHTS`.
        layers: Use only so many layers of the random model, to try things out.
        toy: Make it tiny, for the same reason.
    """
    if weights != "bf16":
        dtype = weights
    if size == "mini":
        return on_torch(device=device, dtype=dtype)
    shape = {
        **(TOY if toy else SHAPES[size]),
        **({} if layers is None else {"num_hidden_layers": layers}),
    }
    words, width, heads = (128, 16, 2) if toy else (151936, 128, 8)
    config = Qwen3Config(
        **{"vocab_size": words, "head_dim": width, "num_key_value_heads": heads, **shape},
        max_position_embeddings=4096,
        pad_token_id=0,
    )
    options = LoadOptions(device=device, dtype=dtype)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        with torch.device(options.resolved_device()):
            AutoModel.from_config(config, dtype=options.resolved_dtype()).save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        projection = Projection.random(range(1, config.num_hidden_layers), heads, width // 2, width)
        ranker = RSRank.from_backbone(folder, projection, template=TEMPLATE, options=options)
    return RSRank(ranker.backbone, ranker.prompts, ranker.projection, ranker.config, cache_size=0)


def keep_share(ranker: RSRank, documents: list[str], share: float, query: str = QUERY) -> None:
    """Let a ranker keep the prefixes of this share of the documents, and no others."""
    ranker.cache.tiers.clear()
    if share:
        ranker.score(query, documents[: round(share * len(documents))])


def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each word that the made-up texts and the template have."""
    pieces = [
        "<pad>",
        "<unk>",
        "<s>",
        *WORDS,
        *f"{QUERY} {TEMPLATE.instruction} {TEMPLATE.separator} .".split(),
    ]
    words = Tokenizer(
        models.WordLevel({p: i for i, p in enumerate(dict.fromkeys(pieces))}, unk_token="<unk>")
    )
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
        ranker: Whose score.
        values: How value vectors are read.
        rows: Documents in one batch.
    """

    ranker: RSRank
    values: Values
    rows: int

    @torch.inference_mode()
    def score(self, query: str, documents: Sequence[str]) -> list[float]:
        """Scores in input order."""
        prompts, projection = self.ranker.prompts, self.ranker.projection
        tokens = prompts.query(query)
        prefixes = [
            document.ids for document in prompts.documents(list(documents), len(tokens.ids))
        ]
        alone, _ = self._read([prompts.null_prefix], tokens.ids, tokens.scored)
        scores: list[float] = []
        for start in range(0, len(prefixes), self.rows):
            batch = prefixes[start : start + self.rows]
            found, agreement = self._read(batch, tokens.ids, tokens.scored)
            total = torch.zeros(len(batch), device=self.ranker.backbone.device)
            for layer in projection.layers:
                shift = representational_shift(
                    found[layer][:, :, tokens.scored], alone[layer][:, :, tokens.scored]
                )
                terms = shift_terms(shift, *of_layer(projection, layer))
                total += terms.mean(-1).sum(-1)
            for shift_score, of_windows in zip(total, agreement, strict=True):
                scores.append(float(combine(shift_score, of_windows, projection.agreement)))
        return scores

    def _read(
        self, prefixes: list[tuple[int, ...]], query: tuple[int, ...], scored: slice
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Value vectors of the query's tokens, and agreement (W, 2) of each document's W windows.

        Hooks take the documents out of the mask of a BERT's layers below the fusion layer, and keep
        them as they are above.
        """
        fusion, width = self.ranker.config.fusion_layer, max(map(len, prefixes))
        window = self.ranker.config.attention_window
        entering: list[Tensor] = []

        def apart(_module: object, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            mask = args[1].clone()
            mask[..., width:, :width] = False
            if window is not None:
                places = torch.arange(width, device=mask.device)
                near = (places[:, None] - places).abs() <= window // 2
                mask[..., :width, :width] &= near | (places == 0)
            return (args[0], mask, *args[2:])

        def stay(_module: object, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return (torch.cat([entering[0][:, :width], args[0][:, width:]], 1), *args[1:])

        layers = layers_of(self.ranker.backbone.model)
        hooks = [layer.register_forward_pre_hook(apart) for layer in layers[:fusion]]
        hooks += [
            layers[fusion].register_forward_pre_hook(lambda _module, args: entering.append(args[0]))
        ]
        if fusion:
            hooks += [layer.register_forward_pre_hook(stay) for layer in layers[fusion + 1 :]]
        try:
            found = self.values(prefixes, query)
        finally:
            for hook in hooks:
                hook.remove()
        if not fusion:
            return found, [torch.zeros(1, 2, device=entering[0].device)] * len(prefixes)
        states = entering[0].float()
        values = normalize(
            value_projections(self.ranker.backbone.model)[fusion](entering[0]).float(), dim=-1
        )
        before = len(self.ranker.prompts.instruction)
        agreement = []
        for row, prefix in enumerate(prefixes):
            cosines = values[row, width:][scored] @ values[row, : len(prefix)].mT
            cosines[:, :before] = -1
            cosines[:, len(prefix) - self.ranker.prompts.after_document :] = -1
            query = states[row, width:].mean(0)
            pairs = []
            windows = similarity_windows(len(prefix), self.ranker.config.similarity_window)
            for window in (slice(*ends) for ends in windows):
                cosine = cosine_similarity(states[row, window].mean(0), query, dim=0)
                pairs.append(torch.stack([cosine, cosines[:, window].amax(1).mean()]))
            agreement.append(torch.stack(pairs))
        return found, agreement


def value_projections(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Each layer's value projection, of a decoder or of a BERT."""
    if hasattr(model, "encoder"):
        return [layer.attention.self.value for layer in model.encoder.layer]
    return [layer.self_attn.v_proj for layer in model.layers]


def _inputs(
    ranker: RSRank, prefixes: list[tuple[int, ...]], query: tuple[int, ...]
) -> dict[str, Tensor]:
    """One padded batch: a decoder is padded on the left; an encoder gets the block mask."""
    width, count, device = max(map(len, prefixes)), len(query), ranker.backbone.device
    if ranker.backbone.causal:
        ids = torch.tensor([[*[0] * (width - len(p)), *p, *query] for p in prefixes], device=device)
        valid = torch.tensor(
            [[0] * (width - len(p)) + [1] * (len(p) + count) for p in prefixes], device=device
        )
        positions = (valid.cumsum(1) - 1).clamp_min(0)
        return {"input_ids": ids, "attention_mask": valid, "position_ids": positions}
    ids = torch.tensor([[*p, *[0] * (width - len(p)), *query] for p in prefixes], device=device)
    positions = torch.tensor([[*range(width), *range(count)]] * len(prefixes), device=device)
    valid = torch.tensor(
        [[True] * len(p) + [False] * (width - len(p)) + [True] * count for p in prefixes]
    )
    allowed = valid[:, None].repeat(1, width + count, 1)
    allowed[:, :width, width:] = False
    return {
        "input_ids": ids,
        "attention_mask": allowed[:, None].to(device),
        "position_ids": positions,
    }


def by_hidden_states(ranker: RSRank) -> Values:
    """Plain code: the causal LM with logits and hidden states, then the value projections again."""
    base = ranker.backbone.model
    whole = base if not ranker.backbone.causal else _with_head(base)

    def values(prefixes: list[tuple[int, ...]], query: tuple[int, ...]) -> list[Tensor]:
        hidden = whole(
            **_inputs(ranker, prefixes, query), output_hidden_states=True, use_cache=False
        ).hidden_states
        found = []
        for layer, projection in enumerate(value_projections(base)):
            states = (
                hidden[layer]
                if not ranker.backbone.causal
                else base.layers[layer].input_layernorm(hidden[layer])
            )
            found.append(_heads(projection(states[:, -len(query) :]), ranker))
        return found

    return values


def by_hooks(ranker: RSRank) -> Values:
    """Plain code: the base model, with a hook on each value projection for the query's tokens."""
    model = ranker.backbone.model

    def values(prefixes: list[tuple[int, ...]], query: tuple[int, ...]) -> list[Tensor]:
        found: list[Tensor] = []
        hooks = [
            p.register_forward_hook(
                lambda _m, _i, out: found.append(_heads(out[:, -len(query) :], ranker))
            )
            for p in value_projections(model)
        ]
        try:
            model(**_inputs(ranker, prefixes, query), use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        return found

    return values


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

    Its scores mean nothing; its time is what such a model costs.

    Args:
        ranker: Whose language model to put under the head.
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
            whole.model = base  # one copy of the weights is enough
        self.model[0].model = whole.eval()
        self.instruction = ranker.prompts.template.instruction if ranker.backbone.causal else ""

    def score(self, query: str, documents: Sequence[str]) -> list[float]:
        """A number for each document."""
        pairs = [(self.instruction + document, query) for document in documents]
        return [float(score) for score in self.model.predict(pairs, show_progress_bar=False)]
