"""Fusion layers on a frozen MPNet: states, training, and scores of the trained weights."""

import argparse

import numpy as np
import pytest
import torch
import transformers
from conftest import DOCUMENTS, QUERIES
from recipe_modules import recipe_modules
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

LAYERS = 3


@pytest.fixture(scope="module")
def recipe():
    names = ("choose", "frozen", "measure_base", "model", "pairs", "scorer", "train_base", "typed")
    with recipe_modules(*names) as modules:
        yield modules


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Folder of a tiny MPNet with random weights, and a tokenizer with MPNet's special tokens."""
    folder = tmp_path_factory.mktemp("mpnet")
    letters = sorted(set("".join([*DOCUMENTS, *QUERIES]).lower()))
    pieces = ["<s>", "<pad>", "</s>", "[UNK]", *letters, *(f"##{letter}" for letter in letters)]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        cls_token="<s>",
        pad_token="<pad>",
        sep_token="</s>",
        eos_token="</s>",
        unk_token="[UNK]",
    ).save_pretrained(folder)
    config = transformers.MPNetConfig(
        vocab_size=len(pieces),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        max_position_embeddings=258,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    transformers.MPNetModel(config).save_pretrained(folder)
    return folder


@torch.no_grad()
def test_stored_states_are_those_of_the_encoder_also_after_they_were_read_from_disk(
    recipe, start, tmp_path
):
    frozen = recipe.frozen.Frozen(start, tmp_path, torch.float32)
    frozen.read([(200, text) for text in DOCUMENTS])
    again = recipe.frozen.Frozen(start, tmp_path, torch.float32)
    assert again.read([(200, text) for text in DOCUMENTS]) == 0
    model = transformers.MPNetModel.from_pretrained(start).eval()
    hidden, valid = again.entering(None, DOCUMENTS, 200)
    for text, row, own in zip(DOCUMENTS, hidden, valid, strict=True):
        ids = torch.tensor(again.ids([text], 200))
        expected = model(input_ids=ids).last_hidden_state[0]
        torch.testing.assert_close(row[own], expected, rtol=0, atol=1e-4)


@torch.no_grad()
def test_measuring_reads_the_weights_that_were_exported_and_scores_as_training_does(
    recipe, start, tmp_path
):
    frozen = recipe.frozen.Frozen(start, tmp_path / "states", torch.float32)
    shape = recipe.model.Shape(fuse=LAYERS, run=LAYERS + 2, dim=8)
    model = recipe.model.Mini(recipe.frozen.as_bert_model(start), shape, shift=0.5).eval()
    for layer in model.layers[LAYERS:]:
        layer.half().float()
        # The fusion layers differ from the layer that they began as.
        layer.value.weight.mul_(2)
    batch = recipe.typed.Batch()
    for query in QUERIES:
        number = batch.query(query, hard=False)
        for text in DOCUMENTS:
            batch.pair(number, batch.text(text, text), relevant=False)
    output = recipe.pairs.run(model, frozen, batch)
    scorer = recipe.scorer.Scorer(model, frozen.ids)
    recipe.choose.export(scorer, (1.0, 0.25), tmp_path / "weights", {"data": ["made up"]})
    measured = recipe.frozen.trained(tmp_path / "weights", start)
    encoder = recipe.measure_base.WholeTexts(start)
    ranker = recipe.measure_base.TrainedModel(measured, encoder)
    scores = np.concatenate([ranker.score(query, DOCUMENTS) for query in QUERIES])
    assert np.ptp(scores) > 0.1
    np.testing.assert_allclose(scores, output.scores.numpy() - 0.25, rtol=0, atol=1e-4)
    cosine = recipe.measure_base.TrainedModel(measured, encoder, cosine=True)
    for query, expected in zip(QUERIES, output.queries @ output.texts.T, strict=True):
        np.testing.assert_allclose(cosine.score(query, DOCUMENTS), expected, rtol=0, atol=1e-5)


def test_training_changes_nothing_below_the_fusion_layers_and_lowers_the_loss(
    recipe, start, tmp_path
):
    batch = recipe.typed.Batch()
    for place, query in enumerate(QUERIES):
        number = batch.query(query, hard=True)
        for at, text in enumerate(DOCUMENTS):
            batch.pair(number, batch.text(text, text), relevant=at == place)
    options = argparse.Namespace(
        start=start, run=LAYERS + 2, shift=0.05, steps=50, batches=1, dropout=0.0, lr=5e-3,
        projection_lr=5e-3, weight_lr=1e-2, scalar_lr=1e-2, decay=0.5, mean=0.985, seed=0,
    )  # fmt: skip
    frozen = recipe.frozen.Frozen(start, tmp_path, torch.float32)
    made = recipe.train_base.FrozenEncoder(options, lambda step: batch, frozen)
    before = {name: weight.detach().clone() for name, weight in made.model.named_parameters()}
    losses = [made.update()["labels"] for _ in range(40)]
    assert losses[-1] < 0.9 * losses[0]
    changed = [
        name
        for name, weight in made.model.named_parameters()
        if not torch.equal(weight, before[name])
    ]
    assert any(name.startswith(f"layers.{LAYERS}.") for name in changed)
    below = ("embeddings.", *(f"layers.{number}." for number in range(LAYERS)))
    assert not [name for name in changed if name.startswith(below)]
