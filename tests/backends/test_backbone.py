"""The two-phase run against slow runs of whole sequences, one at a time, with forward hooks."""

import itertools
import math

import pytest
import torch
import transformers
from conftest import (
    CHAT,
    DOCUMENTS,
    ENCODER,
    HEAD_DIM,
    KV_HEADS,
    LAYERS,
    MAX_LENGTH,
    QUERIES,
    QUERY,
    STORIES,
    WINDOW,
    kv_heads,
    load_ranker,
    tiny_config,
)
from reference import ENCODERS, reference_values
from transformers import AutoModel, AutoTokenizer

from rsrank_rag import RSRank, Template
from rsrank_rag.backends.options import LoadOptions
from rsrank_rag.backends.torch.check import open_backbone
from rsrank_rag.backends.torch.projection import Projection
from rsrank_rag.errors import BackboneError
from rsrank_rag.method.prefix import Prefixes
from rsrank_rag.reranker import Pair

DECODERS = [
    "falcon",
    "gemma",
    "gemma2",
    "gemma3",
    "gpt_neox",
    "granite",
    "llama",
    "mistral",
    "olmo2",
    "phi",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "smollm3",
]
LONG_QUERY = (
    "Which of the two bridges over the river was opened first, and how long did the builders work "
    "on it?"
)


def reference_score(model, parts, scored, weight, head_dim=HEAD_DIM):
    """Slow score of one document; parts are instruction, document, separator, query + suffix."""
    instruction, document, separator, query = parts
    after = reference_values(model, instruction + document + separator, query, head_dim)
    alone = reference_values(model, instruction + separator, query, head_dim)
    score = 0.0
    for layer in range(1, len(after)):
        for head in range(weight.shape[1]):
            cosines = []
            for token in range(*scored.indices(len(query))):
                z = weight[layer - 1, head] @ (
                    after[layer, head, token] - alone[layer, head, token]
                )
                cosines.append(float(z.sum() / (z.norm() * math.sqrt(len(z)))))
            score += sum(cosines) / len(cosines)
    return score


def reference_parts(tokenizer, template, document, query):
    parts = (template.instruction, document, template.separator, query, template.suffix)
    ids = [tokenizer.encode(part, add_special_tokens=False) for part in parts]
    return [ids[0], ids[1], ids[2], ids[3] + ids[4]]


@pytest.fixture(scope="module")
def eager(tiny_folder):
    made = {}

    def load(kind):
        if kind not in made:
            made[kind] = AutoModel.from_pretrained(
                tiny_folder(kind), attn_implementation="eager"
            ).eval()
        return made[kind]

    return load


def values_of(backbone, documents, query):
    """All layers' values (layers, N, H, T, D) of the two-phase run."""
    read = {}
    prefixes = Prefixes.join(backbone.prefill([tuple(ids) for ids in documents]), len(query))
    backbone.query_values([tuple(query)], prefixes, read.__setitem__)
    assert list(read) == list(range(backbone.last_layer + 1))
    return torch.stack(list(read.values()))


@pytest.mark.parametrize("kind", DECODERS + ENCODERS)
@torch.no_grad()
def test_values_of_a_padded_batch_equal_those_of_whole_sequences_read_by_hooks(
    kind, tiny_ranker, eager
):
    ranker = tiny_ranker(kind)
    documents = [document.ids for document in ranker.prompts.documents(DOCUMENTS, 20)]
    assert len({len(ids) for ids in documents}) > 3  # padding of several lengths
    for query in (ranker.prompts.query(QUERY).ids, ranker.prompts.query(LONG_QUERY).ids):
        actual = values_of(ranker.backbone, documents, query)
        for row, ids in enumerate(documents):
            expected = reference_values(eager(kind), ids, query)
            torch.testing.assert_close(actual[:, row], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", DECODERS + ENCODERS)
@torch.no_grad()
def test_scores_equal_those_of_whole_sequences_read_by_hooks(kind, tiny_ranker, tiny_folder, eager):
    ranker = tiny_ranker(kind)
    template = ENCODER if kind == "bert" else CHAT
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder(kind))
    weight = ranker.projection.weight
    expected = []
    for document in DOCUMENTS:
        parts = reference_parts(tokenizer, template, document, QUERY)
        stop = (
            len(tokenizer.encode(QUERY, add_special_tokens=False))
            if template is ENCODER
            else len(parts[3])
        )
        expected.append(reference_score(eager(kind), parts, slice(0, stop), weight))
    assert ranker.score(QUERY, DOCUMENTS) == pytest.approx(expected, abs=1e-3)
    assert (
        len({round(score, 2) for score in expected}) > 3
    )  # documents differ, so equality says something


def reached(windows, before, separator, query):
    """Whether each query token sees text before the separator, in each layer but the first."""
    place = torch.arange(before + separator + query)
    knows, actual = place < before, []
    for window in (
        windows
    ):  # a token sees those before it, itself included, and the window is counted from it
        actual.append(knows[-query:])
        distance = place[:, None] - place
        knows = ((distance >= 0) & (distance < window) & knows).any(1)
    return torch.stack(actual[1:])  # (L, T)


@pytest.mark.parametrize(
    ("kind", "windows", "tolerance"),
    [
        (
            "mistral",
            [WINDOW] * LAYERS,
            0.02,
        ),  # at a window's edge, a shift may be hardly more than rounding
        ("gemma3", [WINDOW, 10**6] * 2, 1e-3),
        ("llama", [10**6] * LAYERS, 1e-3),
    ],
)
@torch.no_grad()
def test_query_tokens_that_no_document_reaches_add_nothing(
    kind, windows, tolerance, tiny_ranker, tiny_folder, eager
):
    ranker, tokenizer = tiny_ranker(kind), AutoTokenizer.from_pretrained(tiny_folder(kind))
    scores = {}
    for query, document in itertools.product((QUERY, LONG_QUERY * 2), DOCUMENTS):
        parts = reference_parts(tokenizer, CHAT, document, query)
        instruction, text, separator, own = parts
        after = reference_values(eager(kind), instruction + text + separator, own)
        shift = (after - reference_values(eager(kind), instruction + separator, own))[
            1:
        ]  # (L, H, T, D)
        projected = torch.einsum("lhpd,lhtd->lhtp", ranker.projection.weight, shift)
        cosines = torch.cosine_similarity(projected, torch.ones_like(projected), dim=-1)
        known = reached(windows, len(instruction + text), len(separator), len(own))
        scores[query, document] = float(cosines.masked_fill(~known[:, None], 0).mean(-1).sum())
        explained = torch.tensor(ranker.explain(query, document).head_parts)  # (T, L, H)
        assert torch.equal(explained.any(-1).T, known)
    assert bool(known.all()) is (kind == "llama")
    for query in (QUERY, LONG_QUERY * 2):
        expected = [scores[query, document] for document in DOCUMENTS]
        assert ranker.score(query, DOCUMENTS) == pytest.approx(expected, abs=tolerance)
    actual = [actual.score for actual in ranker.score_pairs([Pair(*pair) for pair in scores])]
    assert actual == pytest.approx(list(scores.values()), abs=tolerance)


@pytest.mark.parametrize("positions", ["query", "suffix", "query+suffix"])
@torch.no_grad()
def test_scored_positions_are_the_ones_the_template_names(positions, tiny_folder, eager):
    template = Template(instruction="<s>Text: ", suffix="\nRelevant:", positions=positions)
    projection = Projection.random(range(1, LAYERS), KV_HEADS, 8, HEAD_DIM, seed=3)
    options = LoadOptions(device="cpu", dtype="float32", local_files_only=True)
    ranker = RSRank.from_backbone(
        tiny_folder("llama"), projection, template=template, options=options
    )
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder("llama"))
    parts = reference_parts(tokenizer, template, DOCUMENTS[0], QUERY)
    own = len(tokenizer.encode(QUERY, add_special_tokens=False))
    scored = {"query": slice(0, own), "suffix": slice(own, None), "query+suffix": slice(None)}[
        positions
    ]
    expected = reference_score(eager("llama"), parts, scored, projection.weight)
    assert ranker.score(QUERY, DOCUMENTS[:1]) == pytest.approx([expected], abs=1e-3)


@pytest.mark.shared
@torch.no_grad()
def test_trained_weights_give_the_scores_of_whole_sequences(stories):
    model = AutoModel.from_pretrained(STORIES, attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(STORIES)
    story = (
        "Lily had a red ball. She threw it to her dog Max, and Max ran after it into the garden."
    )
    documents = [
        story,
        "The sun was hot.",
        "Tom was sad. His boat was lost in the big lake.",
        story * 3,
    ]
    query = "What did Lily throw to her dog?"
    expected = []
    for document in documents:
        parts = reference_parts(tokenizer, stories.prompts.template, document, query)
        expected.append(
            reference_score(model, parts, slice(None), stories.projection.weight, head_dim=8)
        )
    assert stories.score(query, documents) == pytest.approx(expected, abs=1e-3)


def test_sliding_windows_are_smaller_than_the_documents_of_these_tests(ranker):
    lengths = [len(prompt.ids) for prompt in ranker.prompts.documents(DOCUMENTS, 10)]
    assert min(lengths) > WINDOW
    assert len(ranker.prompts.query(LONG_QUERY).ids) > WINDOW  # the window ends inside this query
    for kind in ("gemma2", "gemma3", "mistral"):
        assert tiny_config(kind).sliding_window == WINDOW


@torch.no_grad()
def test_one_prefill_serves_many_queries_and_is_not_changed_by_them(ranker):
    backbone, prompts = ranker.backbone, ranker.prompts
    documents = [document.ids for document in prompts.documents(DOCUMENTS, 20)]
    prefixes = Prefixes.join(backbone.prefill(documents), 32)
    before = [
        tensor[:, :, prefixes.query_slots :].clone()
        for tensor in (*prefixes.keys, *prefixes.values)
    ]
    runs = []
    for query in [*QUERIES, QUERIES[0]]:
        read = {}
        backbone.query_values([prompts.query(query).ids], prefixes, read.__setitem__)
        runs.append(read)
    assert all(torch.equal(runs[0][layer], runs[-1][layer]) for layer in runs[0])
    after = [tensor[:, :, prefixes.query_slots :] for tensor in (*prefixes.keys, *prefixes.values)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("last_layer", [1, 2, 3])
@torch.no_grad()
def test_layers_after_the_last_one_read_never_run(last_layer, tiny_folder):
    model = AutoModel.from_pretrained(tiny_folder("qwen3")).eval()
    backbone = open_backbone(model, last_layer=last_layer)
    ran = []
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda _module, _inputs, name=name: ran.append(name))
    prefixes = Prefixes.join(backbone.prefill([(1, 20, 30, 40)]), 2)
    assert f"layers.{last_layer - 1}.self_attn.v_proj" in ran
    assert not [name for name in ran if name.startswith(f"layers.{last_layer}.")]
    ran.clear()
    backbone.query_values([(50, 60)], prefixes, lambda layer, value: None)
    assert f"layers.{last_layer}.self_attn.v_proj" in ran
    assert not {f"layers.{last_layer}.self_attn.o_proj", f"layers.{last_layer}.mlp", "norm"} & set(
        ran
    )
    assert not [
        name
        for name in ran
        if name.startswith(tuple(f"layers.{i}." for i in range(last_layer + 1, LAYERS)))
    ]


@torch.no_grad()
def test_reading_fewer_layers_gives_the_same_values_in_them(tiny_folder, ranker):
    shallow = open_backbone(AutoModel.from_pretrained(tiny_folder("qwen3")), last_layer=2)
    documents, query = [[1, 20, 30, 40], [1, 50]], [60, 70, 80]
    torch.testing.assert_close(
        values_of(shallow, documents, query), values_of(ranker.backbone, documents, query)[:3]
    )


@pytest.mark.parametrize("layer", [0, LAYERS, LAYERS + 3, -1])
def test_a_layer_that_cannot_be_read_is_refused(layer, tiny_folder):
    with pytest.raises(
        BackboneError, match=rf"Layer {layer} was asked for; .* has 1\.\.{LAYERS - 1}"
    ):
        open_backbone(AutoModel.from_pretrained(tiny_folder("qwen3")), last_layer=layer)


def test_the_model_has_no_head_and_no_gradients(ranker):
    assert not [
        name
        for name, _ in ranker.backbone.model.named_modules()
        if "lm_head" in name or "pooler" in name
    ]
    assert not any(weight.requires_grad for weight in ranker.backbone.model.parameters())
    assert not ranker.backbone.model.training


@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "phi3", "bert"])
def test_nothing_stays_on_the_model(kind, tiny_folder):
    ranker = load_ranker(tiny_folder(kind), kind)
    attributes = {name: set(vars(module)) for name, module in ranker.backbone.model.named_modules()}
    ranker.score(QUERY, DOCUMENTS[:2])
    for name, module in ranker.backbone.model.named_modules():
        assert not module._forward_hooks, name
        assert not module._forward_pre_hooks, name
        assert set(vars(module)) == attributes[name], name


def test_no_hook_stays_on_a_refused_model():
    torch.manual_seed(0)
    model = AutoModel.from_config(refused_configs()["deepseek_v3"])
    with pytest.raises(BackboneError):
        open_backbone(model)
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("kind", DECODERS + ENCODERS)
def test_heads_causality_and_positions_are_found_out(kind, tiny_ranker):
    backbone = tiny_ranker(kind).backbone
    assert (backbone.num_layers, backbone.num_heads, backbone.head_dim) == (
        LAYERS,
        kv_heads(kind),
        HEAD_DIM,
    )
    assert backbone.causal == (kind not in ENCODERS)
    assert backbone.max_length == MAX_LENGTH - (kind == "roberta")


@pytest.mark.parametrize("kind", ["llama", "bert", "roberta"])
def test_a_document_and_a_query_that_fill_every_position_run(kind, tiny_ranker):
    ranker = tiny_ranker(kind)
    long_query = "bridge " * 300
    for count in range(300, 0, -1):  # the longest query that fits
        long_query = "bridge " * count
        try:
            length = len(ranker.prompts.query(long_query).ids)
        except ValueError:
            continue
        break
    [prompt] = ranker.prompts.documents(["frost " * 5000], length)
    assert prompt.truncated
    assert all(
        math.isfinite(score) for score in ranker.score(long_query, ["frost " * 5000, "frost"])
    )


@torch.no_grad()
def test_a_short_document_is_read_alike_beside_one_beyond_the_original_positions(tiny_ranker):
    # Long-context rotary factors that depend on the longest sequence of a batch would make
    # neighbours matter.
    ranker = tiny_ranker("phi3_longrope")
    alone = ranker.score(QUERY, ["The bridge was opened in 1932."])
    assert ranker.score(QUERY, ["The bridge was opened in 1932.", "frost " * 200])[
        :1
    ] == pytest.approx(alone, abs=1e-4)


def refused_configs():
    common = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    plain = {name: value for name, value in common.items() if name != "num_key_value_heads"}
    ids = {
        name: common[name]
        for name in ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")
    }
    experts = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return {
        "bloom": transformers.BloomConfig(**ids, hidden_size=32, n_layer=4, n_head=4),
        "deepseek_v3": transformers.DeepseekV3Config(
            **{**common, "num_key_value_heads": 4, **experts},
            kv_lora_rank=8,
            q_lora_rank=8,
            qk_rope_head_dim=4,
            qk_nope_head_dim=4,
            v_head_dim=8,
            n_routed_experts=4,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=4,
        ),
        "distilbert": transformers.DistilBertConfig(
            **ids, dim=32, n_layers=4, n_heads=4, hidden_dim=48
        ),
        "falcon_alibi": transformers.FalconConfig(**plain, alibi=True),
        "gemma4": transformers.Gemma4TextConfig(
            **common, vocab_size_per_layer_input=96, head_dim=8
        ),
        "gemma4_equal_heads": transformers.Gemma4TextConfig(
            **common, vocab_size_per_layer_input=96, head_dim=8, global_head_dim=8
        ),
        "gpt_neo": transformers.GPTNeoConfig(
            **ids,
            hidden_size=32,
            num_layers=4,
            num_heads=4,
            attention_types=[[["global", "local"], 2]],
            max_position_embeddings=128,
        ),
        "llama4_chunked": transformers.Llama4TextConfig(
            **common,
            head_dim=8,
            intermediate_size_mlp=48,
            num_local_experts=2,
            layer_types=["chunked_attention", "full_attention"] * 2,
        ),
        "mamba": transformers.MambaConfig(**ids, hidden_size=32, num_hidden_layers=4),
        "modernbert": transformers.ModernBertConfig(**plain),
        "qwen3_next": transformers.Qwen3NextConfig(
            **common,
            **experts,
            head_dim=8,
            num_experts=4,
            linear_num_value_heads=4,
            linear_num_key_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
        ),
        "t5": transformers.T5Config(
            vocab_size=96,
            d_model=32,
            num_layers=4,
            num_heads=4,
            d_kv=8,
            d_ff=48,
            pad_token_id=0,
            eos_token_id=1,
        ),
    }


@pytest.mark.parametrize(
    "kind",
    [
        "bloom",
        "deepseek_v3",
        "distilbert",
        "falcon_alibi",
        "gemma4",
        "gemma4_equal_heads",
        "gpt_neo",
        "llama4_chunked",
        "mamba",
        "modernbert",
        "qwen3_next",
        "t5",
    ],
)
def test_a_model_whose_values_cannot_be_read_is_refused_with_advice(kind):
    torch.manual_seed(0)
    model = AutoModel.from_config(refused_configs()[kind])
    with pytest.raises(
        BackboneError, match=rf"{type(model).__name__}.* RSRank needs a decoder with"
    ):
        open_backbone(model)


def test_falcon_is_refused_with_alibi_and_read_with_rotary_positions():
    advice = r"FalconModel.* failed on a trial run of .*\(ValueError: .*ALiBi .* do not work"
    for alibi in (True, False):
        torch.manual_seed(0)
        config = tiny_config("falcon")
        config.alibi = alibi
        model = AutoModel.from_config(config)
        if alibi:
            with pytest.raises(BackboneError, match=advice):
                open_backbone(model)
        else:
            assert open_backbone(model).causal


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("kind", "causal"), [("bert", False), ("qwen3", True), ("gemma3", True)])
def test_whether_a_model_is_causal_is_found_out_in_every_dtype_and_with_weak_attention(
    kind, causal, dtype
):
    torch.manual_seed(0)
    config = tiny_config(kind)
    config.initializer_range = 0.02
    assert open_backbone(AutoModel.from_config(config).to(dtype), last_layer=1).causal is causal


@pytest.mark.parametrize("kind", ["gpt2", "opt"])
def test_a_decoder_with_learned_positions_is_refused(kind):
    torch.manual_seed(0)
    with pytest.raises(
        BackboneError, match=r"adds positions to its embeddings.*needs rotary positions"
    ):
        open_backbone(AutoModel.from_config(tiny_config(kind)))


@pytest.mark.parametrize("kind", ["qwen3", "bert"])
@pytest.mark.filterwarnings("error::FutureWarning")
def test_scoring_uses_no_argument_that_transformers_will_remove(kind, tiny_folder):
    ranker = load_ranker(tiny_folder(kind), kind)
    assert len(ranker.score(QUERY, DOCUMENTS)) == len(DOCUMENTS)
