r"""Choose what ships of a training, by validation queries, and write it for export.py.

    python research/mini/choose.py --data ../shared/data/train --start rsrank_rag/models/mini \
        --weights runs/mini/mean-300.pt --output runs/mini/chosen

The script first chooses the *strength* and the *share* of the shift that rank best. The strength is
the place on the line from the weights of the start (0) to the trained ones (1). Then `best_rule`
chooses the rule that keeps documents, or the rule is set by hand (``--rule``). Its threshold
becomes zero.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import tomllib
import torch
from batches import EVERYDAY, MANUALS, REAL, Batch, Pool, Text
from model import Mini, bert_weights, from_artifact
from safetensors.torch import save_file
from scores import run
from texts import Texts
from validate import JOINED, Row, Validation, ndcg, summary

from rsrank_rag import Fallback, Rule
from rsrank_rag.evaluation.best_rule import best_rule
from rsrank_rag.evaluation.metrics import ScoredQuery

TYPED = (EVERYDAY, "everyday.typo", REAL, MANUALS)
STRENGTHS = (0.5, 0.75, 1.0)
SHARES = (0.25, 0.5, 0.75, 1.0)
"""Without a share of the shift there would be nothing that `explain` could show by layer."""
NOT_FOR_RULES = "nfcorpus"
"""Most candidates of this set are relevant. Rules are not made for such lists."""
PASSAGES = (
    (Path(__file__).parents[2] / "examples" / "passages.txt")
    .read_text(encoding="utf-8")
    .splitlines()
)
QUESTIONS = [
    "How do honeybees tell each other where the flowers are?",
    "night trains in winter",
    "honey",
]
REFERENCE = [*PASSAGES, "\n\n".join(PASSAGES[:4])]
"""The last passage is longer than a window."""


def mean_of_groups(values: Mapping[str, float]) -> float:
    """The mean of two means: of the typed sets, and of the public ones."""
    groups: dict[bool, list[float]] = {}
    for name, value in values.items():
        groups.setdefault(name in TYPED, []).append(value)
    return float(np.mean(list(map(np.mean, groups.values()))))


def ranking(rows: Mapping[str, Sequence[Row]], share: float) -> float:
    """Mean nDCG@5 with a share of the shift."""
    values = {}
    for name, of_set in rows.items():
        of_queries = []
        for row in of_set:
            if row.relevant.any():
                of_queries.append(ndcg(row.scores(share), row.relevant))
        values[name] = float(np.mean(of_queries))
    return mean_of_groups(values)


def choose_rule(rows: Mapping[str, Sequence[Row]], share: float) -> Rule:
    """The best rule of the library; typed and public sets count the same, and so does each set."""
    queries = []
    weights = []
    names = rows.keys() - {NOT_FOR_RULES}
    typed = names & set(TYPED)
    for name in rows:
        if name == NOT_FOR_RULES:
            continue
        sets = len(typed) if name in TYPED else len(names) - len(typed)
        for row in rows[name]:
            queries.append(ScoredQuery(row.scores(share).tolist(), row.relevant.tolist()))
            weights.append(1 / sets / len(rows[name]))
    return best_rule(queries, weights=np.array(weights))


def interpolated(
    start: Mini, weights: Mapping[str, torch.Tensor], strength: float
) -> dict[str, torch.Tensor]:
    """Weights on the line from those of the start to trained ones."""
    own = start.state_dict()
    return {name: torch.lerp(own[name], tensor, strength) for name, tensor in weights.items()}


def export(model: Mini, share: float, rule: Rule, folder: Path, about: dict) -> None:
    """Write weights (the encoder's in fp16), their description, and scores of a few pairs."""
    folder.mkdir(parents=True, exist_ok=True)
    with torch.no_grad():
        for parameter in (*model.layers.parameters(), *model.embeddings.parameters()):
            parameter.copy_(parameter.half().float())
        model.shift_weight *= share
        model.bias -= rule.threshold
    agreement = torch.stack([model.pooled_weight, model.token_weight, model.bias])
    tensors = {
        "projection": model.projection.detach().contiguous(),
        "shift_weight": model.shift_weight.detach().contiguous(),
        "agreement": agreement.detach(),
    }
    for name, tensor in bert_weights(model).items():
        tensors[name] = tensor.half().contiguous()
    save_file(tensors, folder / "model.safetensors")
    description = asdict(model.shape) | {"read": model.shape.read}
    description |= {"window": model.window, "reach": model.reach}
    description |= {"share": share, "rule": asdict(rule), **about}
    (folder / "model.json").write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")


@torch.no_grad()
def reference(model: Mini, texts: Texts, folder: Path) -> None:
    """Write scores of a few pairs by this code in float32."""
    model.fast = torch.float32
    batch = Batch()
    for query in QUESTIONS:
        batch.queries.append(query)
        places = [batch.text(Text(text, (text,), False, set())) for text in REFERENCE]
        batch.labels.append(dict.fromkeys(places, False))
    output = run(model, texts, batch)
    cases = []
    for query, scores in zip(QUESTIONS, output.base + output.shift, strict=True):
        cases.append({"query": query, "documents": REFERENCE, "scores": scores.tolist()})
    (folder / "reference.json").write_text(json.dumps(cases, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Measure, choose, and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder with the training sets")
    add("--manuals", type=Path, default=None, help="what manuals.py wrote")
    add("--start", type=Path, required=True, help="artifact that the training started from")
    add("--weights", type=Path, required=True, help="mean-STEP.pt of the training")
    add("--config", type=Path, default=Path(__file__).with_name("config.toml"))
    add("--strengths", type=float, nargs="+", default=STRENGTHS)
    names = ("THRESHOLD", "GAP", "GAP_OF_FALLBACK", "DEPTH")
    add("--rule", type=float, nargs=4, metavar=names, default=None, help="default: best_rule's")
    add("--output", type=Path, required=True, help="folder for what is chosen")
    options = parser.parse_args()
    torch.set_num_threads(1)
    texts = Texts(options.start / "backbone" / "tokenizer.json")
    pool = Pool.of(options.data, options.manuals)
    validation = Validation(pool)
    for name in JOINED:
        del validation.lists[name]
    trained = torch.load(options.weights, weights_only=True, map_location="cpu")
    options.output.mkdir(parents=True, exist_ok=True)
    config = tomllib.loads(options.config.read_text(encoding="utf-8"))
    form = (config["window"], config["reach"] or None)
    start = from_artifact(options.start, *form)
    model = from_artifact(options.start, *form).eval()
    ranked = {}
    rows = {}
    for strength in options.strengths:
        model.load_state_dict(interpolated(start, trained, strength), strict=False)
        rows[strength] = validation.rows(model, texts)
        for share in SHARES:
            ranked[strength, share] = ranking(rows[strength], share)
            print(f"strength {strength}, share {share}: {100 * ranked[strength, share]:.2f}")
    strength, share = max(ranked, key=ranked.__getitem__)
    torch.save(rows[strength], options.output / "rows.pt")
    rule = choose_rule(rows[strength], share)
    if options.rule is not None:
        threshold, gap, *fallback = options.rule
        rule = Rule(threshold, gap, Fallback(*fallback))
    figures = {name: summary(of_set) for name, of_set in rows[strength].items()}
    model.load_state_dict(interpolated(start, trained, strength), strict=False)
    about = {
        "seed": config["seed"],
        "strength": strength,
        "weights": options.weights.name,
        "data": sorted(pool.training),
    }
    export(model, share, rule, options.output, about)
    reference(model, texts, options.output)
    figures["ranked"] = {}
    for pair, value in ranked.items():
        figures["ranked"][f"{pair[0]:g}, {pair[1]:g}"] = round(100 * value, 2)
    text = json.dumps(figures, indent=1)
    (options.output / "validation.json").write_text(text + "\n", encoding="utf-8")
    print(strength, share, rule)


if __name__ == "__main__":
    main()
