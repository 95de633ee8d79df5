"""Mid-fusion and agreement, against plain transformers with one mask per layer."""

import math

import pytest
import torch
from conftest import (
    CHAT,
    DOCUMENTS,
    ENCODER,
    HEAD_DIM,
    LAYERS,
    MAX_LENGTH,
    PROJECTION_DIM,
    QUERIES,
    QUERY,
    STORIES,
    kv_heads,
    on_torch,
    score_many,
    unkept,
)
from torch import nn
from torch.nn import functional
from transformers import AutoModel

from rsrank_rag import RSRank
from rsrank_rag.artifact import hub
from rsrank_rag.backends.options import LoadOptions, ModelSource
from rsrank_rag.backends.torch.check import open_backbone
from rsrank_rag.backends.torch.fusion import layers_of
from rsrank_rag.backends.torch.projection import Projection
from rsrank_rag.errors import ArtifactError, BackboneError
from rsrank_rag.reranker import Pair

FUSION, READ = 1, (2, 3)
OPTIONS = LoadOptions(device="cpu", dtype="float32", local_files_only=True)
KINDS = ["bert", "llama", "qwen3", "gemma3"]


def weighted(layers, heads, dim, head_dim, seed=1):
    """Random B with random weights of heads and of agreement."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(len(layers), heads, dim, head_dim, generator=generator)
    s, neighbours = (
        torch.rand(len(layers), heads, generator=generator),
        torch.tensor([3.0, 2.0, -1.25]),
    )
    return Projection(weight, layers, head_weight=s, agreement=neighbours)


def flat(lists):
    return [number for numbers in lists for number in numbers]


def template_of(kind):
    return ENCODER.model_copy(update={"query_start": "[CLS]"}) if kind == "bert" else CHAT


@pytest.fixture(scope="module")
def fused(tiny_folder):
    """Function: architecture -> a tiny ranker with a fusion layer, head weights, and agreement.

    It takes the sizes of similarity windows and of the attention window, too.
    """
    made = {}

    def load(kind, window=None, attention=None):
        if (kind, window, attention) not in made:
            ranker = RSRank.from_backbone(
                tiny_folder(kind),
                weighted(READ, kv_heads(kind), PROJECTION_DIM, HEAD_DIM),
                template=template_of(kind),
                fusion_layer=FUSION,
                similarity_window=window,
                attention_window=attention,
                options=OPTIONS,
            )
            made[kind, window, attention] = unkept(ranker)
        return made[kind, window, attention]

    return load


class Reference:
    """The score of document and query in one sequence: one mask per layer, values from hooks."""

    def __init__(self, ranker, folder):
        self.ranker, self.causal = ranker, ranker.backbone.causal
        self.model = AutoModel.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        ).eval()
        self.fusion, self.read = ranker.config.fusion_layer, ranker.config.layers
        self.half = (ranker.config.attention_window or 2 * MAX_LENGTH) // 2
        self.window = getattr(self.model.config, "sliding_window", None)
        self.kinds = getattr(self.model.config, "layer_types", ["full_attention"] * 99)

    def mask(self, layer, first, second):
        """Which token sees which in a layer, as numbers to be added, (1, 1, T, T)."""
        length = first + second
        sees = torch.ones(length, length, dtype=torch.bool)
        sees[:first, first:] = False
        if layer < self.fusion:
            sees[first:, :first] = False
            places = torch.arange(first)
            near = (places[:, None] - places).abs() <= self.half
            sees[:first, :first] &= near | (places == 0)
        if self.causal:
            sees &= torch.ones_like(sees).tril()
        if self.causal and self.kinds[layer] == "sliding_attention":
            sees &= torch.ones_like(sees).triu(1 - self.window)
        return torch.zeros(1, 1, length, length).masked_fill(~sees, torch.finfo(torch.float32).min)

    @torch.no_grad()
    def run(self, prefix, query):
        """Values (H, T, D) of the scored tokens in each read layer, and states before fusion."""
        values, entering, hooks = {}, {}, []
        first, second = len(prefix), len(query.ids)
        for number, layer in enumerate(layers_of(self.model)):
            mask = self.mask(number, first, second)

            def own_mask(module, args, kwargs, mask=mask, number=number):
                entering[number] = args[0][0]
                if number > self.fusion:
                    args = (
                        torch.cat([entering[self.fusion][:first], args[0][0, first:]])[None],
                        *args[1:],
                    )
                if "attention_mask" in kwargs:
                    return args, kwargs | {"attention_mask": mask}
                return (args[0], mask, *args[2:]), kwargs

            def keep(module, args, output, number=number):
                heads = output[0, first:].unflatten(-1, (-1, self.ranker.backbone.head_dim))
                values[number] = heads.transpose(0, 1)[:, query.scored]
                if number == self.fusion:
                    values["tokens"] = output[0, :first], output[0, first:][query.scored]

            named = dict(layer.named_modules())
            projection = next(
                module for name, module in named.items() if name.endswith(("v_proj", "self.value"))
            )
            hooks += [layer.register_forward_pre_hook(own_mask, with_kwargs=True)]
            hooks += [projection.register_forward_hook(keep)]
        second_positions = torch.arange(second) + (first if self.causal else 0)
        self.model(
            input_ids=torch.tensor([[*prefix, *query.ids]]),
            attention_mask=torch.ones(1, first + second),
            position_ids=torch.cat([torch.arange(first), second_positions])[None],
            use_cache=False,
        )
        for hook in hooks:
            hook.remove()
        return values, entering[self.fusion].split([first, second])

    def score(self, query, document):
        """One score, its agreement's part, and of that each token's."""
        prompts, projection = self.ranker.prompts, self.ranker.projection
        request = prompts.query(query)
        after, (document_states, query_states) = self.run(
            prompts.documents([document], len(request.ids))[0].ids, request
        )
        alone, _ = self.run(prompts.null_prefix, request)
        total = 0.0
        for row, layer in enumerate(self.read):
            shift = after[layer] - alone[layer]
            for head in range(shift.shape[0]):
                projected = shift[head] @ projection.weight[row, head].T
                cosines = functional.cosine_similarity(
                    projected, torch.ones(1, projected.shape[-1]), dim=-1, eps=1e-6
                )
                total += float(projection.head_weight[row, head] * cosines.mean())
        document_values, query_values = after["tokens"]
        length = len(document_values)
        own = range(len(prompts.instruction), length - len(prompts.separator))
        g, w, b = projection.agreement.tolist()
        spans = [range(length)]
        size = self.ranker.config.similarity_window
        start = 0
        while size and length > size and start + size // 2 < length:
            spans.append(range(start, min(start + size, length)))
            start += size // 2
        best = None
        for span in spans:
            mean = torch.stack([document_states[place] for place in span]).mean(0)
            cosine = functional.cosine_similarity(mean, query_states.mean(0), dim=0)
            matches = []
            for value in query_values:
                cosines = [-1.0]
                for place in set(own) & set(span):
                    near = functional.cosine_similarity(value, document_values[place], dim=0)
                    cosines.append(float(near))
                matches.append(w * max(cosines) / len(query_values))
            neighbours = g * float(cosine) + sum(matches) + b
            if best is None or neighbours > best[0]:
                best = neighbours, matches
        return total + best[0], *best


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [*((kind, ()) for kind in KINDS), ("bert", (8,)), ("qwen3", (8,)), ("bert", (8, 6))],
)
def test_scores_equal_plain_transformers_with_a_mask_for_each_layer(
    kind, sizes, fused, tiny_folder
):
    ranker = fused(kind, *sizes)
    reference = Reference(ranker, tiny_folder(kind))
    documents = [*DOCUMENTS, "A long one: " + " ".join(DOCUMENTS)]
    for query in QUERIES:
        expected = [reference.score(query, document)[0] for document in documents]
        assert ranker.score(query, documents) == pytest.approx(expected, abs=1e-4)
    assert len({round(score, 3) for score in ranker.score(QUERY, documents)}) == len(documents)


def test_a_trained_decoder_agrees_with_the_reference(stories):
    projection = weighted((3, 4), 4, 4, 8)
    ranker = unkept(RSRank.from_backbone(STORIES, projection, fusion_layer=2, options=OPTIONS))
    reference = Reference(ranker, STORIES)
    expected = [reference.score(QUERY, document)[0] for document in DOCUMENTS]
    assert ranker.score(QUERY, DOCUMENTS) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("kind", ["bert", "qwen3"])
def test_parts_and_agreement_add_up_to_the_score(kind, window, fused, tiny_folder):
    ranker = fused(kind, window)
    actual = ranker.explain(QUERY, DOCUMENTS[0])
    assert sum(map(sum, actual.parts)) + actual.similarity == pytest.approx(actual.score, abs=1e-6)
    assert actual.score == pytest.approx(ranker.score(QUERY, DOCUMENTS[:1])[0], abs=1e-5)
    _, agreement, matches = Reference(ranker, tiny_folder(kind)).score(QUERY, DOCUMENTS[0])
    assert actual.similarity == pytest.approx(agreement, abs=1e-5)
    assert actual.matches == pytest.approx(matches, abs=1e-5)
    for part in (
        sum(actual.matches),
        actual.similarity - sum(actual.matches),
    ):  # of tokens, and of the whole query
        assert f"{part:+.2f}" in str(actual).splitlines()[len(actual.tokens) + 1]
    assert [line.split()[-1] for line in str(actual).splitlines()[1 : len(actual.tokens) + 1]] == [
        f"{match:+.2f}" for match in actual.matches
    ]


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("kind", ["bert", "qwen3"])
@pytest.mark.parametrize("where", ["device", "disk"])
def test_scores_are_the_same_cold_warm_joined_and_alone(kind, where, window, fused, tmp_path):
    own = fused(kind, window)
    folder = tmp_path if where == "disk" else None

    def fresh():
        return RSRank(
            own.backbone, own.prompts, own.projection, own.config, ModelSource(cache_folder=folder)
        )

    ranker = fresh()
    cold = [ranker.score(query, DOCUMENTS) for query in QUERIES]
    near = 1e-5 if where == "device" else 0.05  # 8 bits round
    for query, scores in zip(QUERIES, cold, strict=True):
        assert scores == pytest.approx(own.score(query, DOCUMENTS), abs=near)
    exact = 1e-5
    for again in (ranker, *([fresh()] * (where == "disk"))):
        for query, scores in zip(QUERIES, cold, strict=True):
            assert again.score(query, DOCUMENTS) == pytest.approx(scores, abs=exact)
        joined = score_many(again, QUERIES, [DOCUMENTS] * len(QUERIES))
        assert flat(joined) == pytest.approx(flat(cold), abs=exact)
    pairs = [Pair(query, document) for query in QUERIES for document in DOCUMENTS]
    assert [actual.score for actual in ranker.score_pairs(pairs)] == pytest.approx(
        flat(cold), abs=exact
    )
    assert ranker.stats()["misses"] == len(DOCUMENTS)


@pytest.mark.parametrize("window", [None, 8])
def test_only_layers_from_the_fusion_layer_on_and_windows_are_kept(window, fused, tiny_ranker):
    own, unfused = fused("bert", window), tiny_ranker("bert")
    ranker = RSRank(own.backbone, own.prompts, own.projection, own.config)
    ranker.score(QUERY, DOCUMENTS)
    lengths = [len(prompt.ids) for prompt in own.prompts.documents(DOCUMENTS, 0)]
    tokens = sum(lengths)
    kept = (LAYERS - 1 - FUSION) * 2 * kv_heads("bert") * HEAD_DIM * 4
    assert own.backbone.bytes_per_token == kept < unfused.backbone.bytes_per_token
    pooled = own.backbone.config.hidden_size * 4
    windows = len(DOCUMENTS)
    if window is not None:
        windows += sum(math.ceil(length / 4) - 1 for length in lengths if length > 8)
    assert ranker.stats()["device_bytes"] == tokens * kept + windows * pooled


def test_an_attention_window_in_a_decoder_is_refused(fused):
    with pytest.raises(BackboneError, match="attention_window is for encoders"):
        fused("qwen3", None, 8)


def test_a_query_runs_once_below_the_fusion_layer_in_each_batch_of_documents(fused):
    own, runs = fused("qwen3"), {0: [], LAYERS - 1: []}
    ranker = RSRank(
        own.backbone,
        own.prompts,
        own.projection,
        own.config,
        ModelSource(cache_size=0, token_budget=60),
    )
    hooks = [
        layers_of(ranker.backbone.model)[number].self_attn.register_forward_pre_hook(
            lambda module, args, kwargs, seen=seen: seen.append(len(kwargs["hidden_states"])),
            with_kwargs=True,
        )
        for number, seen in runs.items()
    ]
    ranker.backbone.null_prefix(ranker.prompts.null_prefix)
    runs[0].clear()
    try:
        ranker.score("Who was never asked about?", DOCUMENTS)
    finally:
        for hook in hooks:
            hook.remove()
    batches = len(runs[LAYERS - 1])  # the documents' runs end before
    assert batches > 1
    assert sum(runs[0]) == len(DOCUMENTS) + batches
    assert sum(runs[LAYERS - 1]) == len(DOCUMENTS) + batches


@pytest.mark.parametrize(
    "change", [{"fusion_layer": 2}, {"similarity_window": 8}, {"attention_window": 8}]
)
def test_entries_of_other_fusion_layers_or_windows_are_never_found(
    change, fused, tiny_folder, tmp_path
):
    own = fused("bert")
    first = RSRank(
        own.backbone, own.prompts, own.projection, own.config, ModelSource(cache_folder=tmp_path)
    )
    first.score(QUERY, DOCUMENTS)
    projection = weighted((3,), kv_heads("bert"), PROJECTION_DIM, HEAD_DIM)
    made = RSRank.from_backbone(
        tiny_folder("bert"),
        projection,
        template=own.prompts.template,
        options=OPTIONS,
        **{"fusion_layer": FUSION} | change,
    )
    other = RSRank(
        made.backbone,
        made.prompts,
        made.projection,
        made.config,
        ModelSource(cache_folder=tmp_path),
    )
    assert other.score(QUERY, DOCUMENTS) == pytest.approx(
        unkept(made).score(QUERY, DOCUMENTS), abs=0.05
    )
    assert other.stats()["disk_hits"] == 0


@pytest.mark.parametrize("include", [False, True])
def test_everything_survives_saving(include, fused, tmp_path):
    own = fused("bert", 8, 6)
    own.save_pretrained(tmp_path, include_backbone=include)
    again = on_torch(tmp_path, cache_size=0)
    config = again.config
    assert (config.fusion_layer, config.similarity_window, config.attention_window) == (
        FUSION,
        8,
        6,
    )
    assert again.score(QUERY, DOCUMENTS) == own.score(QUERY, DOCUMENTS)
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "from layer 1 on" in card
    assert "Attention window: 6 positions" in card
    again.save_pretrained(tmp_path / "second")
    assert (tmp_path / "second" / hub.PROJECTION).read_bytes() == (
        tmp_path / hub.PROJECTION
    ).read_bytes()


def test_the_card_of_an_artifact_without_a_fusion_layer_says_nothing_of_it(tiny_ranker, tmp_path):
    tiny_ranker("qwen3").save_pretrained(tmp_path)
    assert "usion" not in (tmp_path / "README.md").read_text()


def test_weights_of_one_change_no_score(tiny_ranker):
    plain = tiny_ranker("qwen3")
    ones = torch.ones(plain.projection.weight.shape[:2])
    projection = Projection(plain.projection.weight, plain.projection.layers, head_weight=ones)
    assert unkept(RSRank(plain.backbone, plain.prompts, projection, plain.config)).score(
        QUERY, DOCUMENTS
    ) == (plain.score(QUERY, DOCUMENTS))


def test_agreement_needs_a_fusion_layer(tiny_ranker, tmp_path):
    plain = tiny_ranker("qwen3")
    projection = Projection(
        plain.projection.weight, plain.projection.layers, agreement=torch.ones(3)
    )
    hub.write_artifact(tmp_path, plain.config, projection, "")
    with pytest.raises(
        ArtifactError, match=r"holds 'agreement' .* describes floats of 2 or 4 bytes"
    ):
        hub.read_weights(tmp_path, plain.config)


def test_weights_that_do_not_belong_are_refused(fused, tmp_path):
    own = fused("bert")
    own.save_pretrained(tmp_path)
    wrong = Projection(own.projection.weight, own.projection.layers)
    wrong.head_weight = nn.Parameter(torch.ones(1, 1))
    hub.write_artifact(tmp_path, own.config, wrong, "")
    with pytest.raises(ArtifactError, match="do not belong together"):
        hub.read_weights(tmp_path, own.config)


@pytest.mark.parametrize("layer", [LAYERS - 1, LAYERS])
def test_a_fusion_layer_with_nothing_to_read_above_is_refused(layer, tiny_folder):
    with pytest.raises(BackboneError, match=f"fusion_layer={layer}"):
        open_backbone(AutoModel.from_pretrained(tiny_folder("qwen3")), fusion_layer=layer)


def test_layers_that_have_seen_no_document_cannot_be_read(fused):
    config = fused("bert").config
    with pytest.raises(ArtifactError, match=r"must lie in 3\.\.3"):
        type(config).parse(
            config.model_copy(update={"fusion_layer": 2}).model_dump_json(), source="config.json"
        )


def test_the_given_model_stays_as_it_was(tiny_folder):
    model = AutoModel.from_pretrained(tiny_folder("bert")).eval()
    ids = torch.tensor([[6, 40, 50, 7]])
    before = model(input_ids=ids).last_hidden_state
    backbone = open_backbone(model, fusion_layer=2)
    assert torch.equal(model(input_ids=ids).last_hidden_state, before)
    assert torch.equal(backbone.model(input_ids=ids).last_hidden_state, before)
    assert all(a is b for a, b in zip(model.parameters(), backbone.model.parameters(), strict=True))
    assert backbone.model.state_dict().keys() == model.state_dict().keys()


@pytest.mark.parametrize(
    "kind",
    ["gemma2", "gpt_neox", "granite", "mistral", "olmo2", "phi", "phi3", "qwen3_moe", "smollm3"],
)
def test_most_decoders_can_be_run_from_a_layer_on(kind, tiny_folder):
    backbone = open_backbone(AutoModel.from_pretrained(tiny_folder(kind)), fusion_layer=2)
    assert (
        backbone.bytes_per_token
        == 2 * (LAYERS - 1 - 2) * backbone.num_heads * backbone.head_dim * 4
    )


def test_a_document_of_the_largest_length_fits(fused):
    ranker = fused("bert")
    assert ranker.prompts.max_length == MAX_LENGTH
    long = " ".join(DOCUMENTS * 20)
    assert ranker.explain(QUERY, long).truncated


def test_deterministic_keeps_the_fusion_layer(fused):
    own = fused("bert")
    ranker = RSRank(
        own.backbone, own.prompts, own.projection, own.config, ModelSource(deterministic=True)
    )
    assert ranker.score(QUERY, DOCUMENTS) == pytest.approx(own.score(QUERY, DOCUMENTS), abs=1e-5)
