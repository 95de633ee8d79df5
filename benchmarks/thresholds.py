"""Does any threshold that is made for each query without labels beat zero? And what does zero send to the LLM?

    python benchmarks/thresholds.py --train ../shared/data/train --dev ../shared/data/dev \
        --cache runs/thresholds.json --output docs/thresholds.json --figure docs/evidence.png

Parameters are chosen on training queries that `mini` was not trained on (found by drawing the recipe's batches once
more); every figure is measured on the held-out sets, as paired differences to zero. Scoring takes long on a CPU: scores
are kept in the cache file, and a stopped run goes on from there.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from tqdm import tqdm

from rsrank_rag import Reranker, RSRank
from rsrank_rag.evaluation.calibration import select_above
from rsrank_rag.evaluation.datasets import LabelledQuery, read_labelled, read_sets
from rsrank_rag.evaluation.evidence import Evidence, evidence, sent_above, sent_top
from rsrank_rag.evaluation.metrics import ScoredQuery, best_threshold, f1_at, query_best_f1
from rsrank_rag.evaluation.statistics import Estimate, estimate_mean, paired_differences
from rsrank_rag.evaluation.systems.baselines import BM25, BiEncoder
from rsrank_rag.evaluation.thresholds import (
    Observed,
    Rule,
    below_the_best,
    best_choice,
    expected_f1,
    f1_by_rule,
    false_discovery,
    gap_near_zero,
    guaranteed_evidence,
    guaranteed_recall,
    largest_gap,
    mean_and_spreads,
    median_and_spreads,
    mixture,
    quantile,
    shrunk,
    standardised,
    two_means,
)

RECIPE = Path(__file__).parents[1] / "recipes" / "mini"
STAGES = ((960, 0, 0.0), (1000, 1, 0.25))
"""Steps, seed and share of statements of the two stages that `mini` was trained in."""

FIT = (
    "hotpotqa.paragraph",
    "2wiki.paragraph",
    "bioasq.snippet",
    "squad.sentence",
    "2wiki.sentence",
    "nq.paragraph",
    "hotpotqa.sentence",
    "squad.paragraph",
)
"""Sets with enough queries that `mini` was not trained on; of MuSiQue's 100 there are two."""

TOP = (1, 2, 3, 4, 5, 7, 10, 15, 20)

STEPS = [round(0.1 * i, 1) for i in range(-10, 21)]  # -1 to 2
DOUBLE = [round(2 * step, 1) for step in STEPS]
WEIGHTS = [0.0, 0.25, 0.5, 0.75, 1.0]
SLOPES = [1.0, 2.0, 3.0, 4.0, 6.0, 10.0]


@dataclass(frozen=True)
class Family:
    """Rules of one kind: parameter -> rule, and the parameters to choose from."""

    make: Callable[[Any], Rule]
    choices: Sequence[Any]
    needs_null: bool = False


FAMILIES: dict[str, Family] = {
    "zero": Family(lambda _: lambda s, n: 0.0, [None]),
    "constant": Family(lambda c: lambda s, n: c, STEPS),
    "largest gap": Family(
        lambda c: lambda s, n: largest_gap(s, most=c[0], spreads=c[1]),
        list(product((None, 10, 5, 3), (0.0, 0.5, 1.0, 1.5))),
    ),
    "gap near zero": Family(lambda c: lambda s, n: gap_near_zero(s, c), [0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 4.0]),
    "two means (Otsu)": Family(lambda c: lambda s, n: shrunk(two_means(s), c), [1.0]),
    "two means, shrunk to zero": Family(lambda c: lambda s, n: shrunk(two_means(s), c), WEIGHTS),
    "mixture": Family(lambda c: lambda s, n: shrunk(mixture(s), c), [1.0]),
    "mixture, shrunk to zero": Family(lambda c: lambda s, n: shrunk(mixture(s), c), WEIGHTS),
    "mean + k std": Family(lambda c: lambda s, n: mean_and_spreads(s, c), STEPS),
    "mean + k std, shrunk to zero": Family(
        lambda c: lambda s, n: shrunk(mean_and_spreads(s, c[0]), c[1]), list(product(STEPS, WEIGHTS))
    ),
    "median + k MAD": Family(lambda c: lambda s, n: median_and_spreads(s, c), DOUBLE),
    "top share": Family(lambda c: lambda s, n: quantile(s, c), [round(0.05 * i, 2) for i in range(20)]),
    "below the best": Family(lambda c: lambda s, n: below_the_best(s, c), [round(0.1 * i, 1) for i in range(1, 21)]),
    "expected F1": Family(lambda c: lambda s, n: expected_f1(s, *c), list(product(SLOPES, STEPS))),
    "null: mean + k std": Family(lambda c: lambda s, n: mean_and_spreads(n, c), DOUBLE, True),
    "null: mean + k std, shrunk to zero": Family(
        lambda c: lambda s, n: shrunk(mean_and_spreads(n, c[0]), c[1]),
        list(product(DOUBLE, WEIGHTS)),
        True,
    ),
    "null: quantile": Family(lambda c: lambda s, n: quantile(n, c), [0.5, 0.75, 0.9, 0.95, 1.0], True),
    "null: false discovery, ranks": Family(
        lambda c: lambda s, n: false_discovery(s, n, c), [0.1, 0.2, 0.3, 0.4, 0.5], True
    ),
    "null: false discovery, normal": Family(
        lambda c: lambda s, n: false_discovery(s, n, c, normal=True), [1e-4, 1e-3, 0.01, 0.05, 0.1, 0.2, 0.3], True
    ),
    "null: expected F1 of z": Family(
        lambda c: lambda s, n: _unstandardised(expected_f1(standardised(s, n), *c), n),
        list(product([0.5, 1.0, 2.0, 4.0], [0.25 * i for i in range(17)])),
        True,
    ),
}


def _unstandardised(threshold: float, reference: Sequence[float]) -> float:
    """The threshold on the scores that `standardised` came from."""
    low, high = mean_and_spreads(reference, 0.0), mean_and_spreads(reference, 1.0)
    return low + threshold * ((high - low) or 1.0)


class Cache:
    """Scores by name in a JSON file, written after every set, so that a stopped run goes on where it was."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}

    def __call__(self, name: str, make: Callable[[], Any]) -> Any:
        """What is kept under a name; made and kept if it is not there."""
        if name not in self.found:
            self.found[name] = make()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self.found), encoding="utf-8")
        return self.found[name]


class _Noting(list[LabelledQuery]):
    """A list that notes whose turn it was."""

    def __init__(self, queries: Sequence[LabelledQuery]) -> None:
        super().__init__(queries)
        self.seen: set[str] = set()

    def __getitem__(self, place: Any) -> Any:
        query = super().__getitem__(place)
        self.seen.add(query.id)
        return query


def seen_in_training(folder: Path) -> dict[str, list[str]]:
    """Ids of the queries that `mini` was trained on, by set: the recipe's batches drawn once more."""
    sys.path.insert(0, str(RECIPE))
    from data import Batches

    seen: dict[str, set[str]] = {}
    for steps, seed, statements in STAGES:
        batches = Batches(folder, seed, 4, statements)
        noting = {name: _Noting(queries) for name, queries in batches.sets.items()}
        batches.sets = dict(noting)
        for step in range(steps):
            batches(step)
        for name, queries in noting.items():
            seen.setdefault(name, set()).update(queries.seen)
    return {name: sorted(ids) for name, ids in seen.items()}


def pool(queries: Sequence[LabelledQuery], count: int) -> list[str]:
    """Random documents of a set, each a candidate of another query."""
    rng = random.Random(0)
    chosen = rng.sample(list(queries), min(count, len(queries)))
    return list(dict.fromkeys(rng.choice(query.documents).content() for query in chosen))


def candidates(ranker: Reranker, queries: Sequence[LabelledQuery], name: str) -> list[list[float]]:
    """Scores of every query's own documents."""
    return [ranker.score(query.query, [d.content() for d in query.documents]) for query in tqdm(queries, desc=name)]


def null(ranker: RSRank, queries: Sequence[LabelledQuery], documents: list[str]) -> list[list[float]]:
    """Scores of random documents for every query, its own candidates left out."""
    rows = ranker.score_many([query.query for query in queries], [documents] * len(queries), show_progress=True)
    own = [{d.content() for d in query.documents} for query in queries]
    return [
        [score for score, text in zip(row, documents, strict=True) if text not in mine]
        for row, mine in zip(rows, own, strict=True)
    ]


def tokens(ranker: RSRank, queries: Sequence[LabelledQuery]) -> list[list[int]]:
    """Tokens of every query's documents, without special ones, by the model's own tokenizer."""
    encode = partial(ranker.prompts.tokenizer, add_special_tokens=False, verbose=False)
    return [
        [len(ids) for ids in encode([d.content() for d in query.documents])["input_ids"]]
        for query in tqdm(queries, desc="tokens")
    ]


def observed(
    queries: Sequence[LabelledQuery], scores: Sequence[Sequence[float]], nulls: Sequence[Sequence[float]]
) -> list[Observed]:
    """Scores and labels; queries beyond the last one with a null have none."""
    filled = [*nulls, *[[]] * (len(queries) - len(nulls))]
    return [
        Observed(ScoredQuery(row, [d.relevant for d in query.documents]), random_scores)
        for query, row, random_scores in zip(queries, scores, filled, strict=True)
    ]


def with_null(sets: Mapping[str, Sequence[Observed]]) -> dict[str, list[Observed]]:
    """Only queries that have null scores."""
    return {name: [seen for seen in queries if seen.null] for name, queries in sets.items()}


def usable(dev: Mapping[str, Sequence[Observed]]) -> dict[str, Family]:
    """All families, or those that need no null where there is none."""
    there = all(any(seen.null for seen in queries) for queries in dev.values())
    return {name: family for name, family in FAMILIES.items() if there or not family.needs_null}


def compare_rules(fit: Mapping[str, Sequence[Observed]], dev: Mapping[str, Sequence[Observed]]) -> dict[str, Any]:
    """Each family's parameter from the training sets, its F1 and the paired difference to zero on each held-out set."""
    found = {}
    for name, family in tqdm(usable(dev).items(), desc="rules"):
        source, target = (with_null(sets) if family.needs_null else sets for sets in (fit, dev))
        choice = best_choice(family.make, family.choices, list(source.values()))
        rule = family.make(choice)
        differences = {
            dataset: paired_differences(f1_by_rule(rule, queries), [f1_at(seen.query, 0.0) for seen in queries])
            for dataset, queries in target.items()
        }
        intervals = {dataset: estimate_mean(values) for dataset, values in differences.items()}
        found[name] = {
            "choice": choice,
            "f1": {dataset: _mean(f1_by_rule(rule, queries)) for dataset, queries in target.items()},
            "difference": {dataset: interval.model_dump() for dataset, interval in intervals.items()},
            "mean": estimate_mean(*differences.values()).model_dump(),
            "beats_zero": all((interval.low or 0.0) > 0 for interval in intervals.values()),
        }
    return found


def best_case(dev: Mapping[str, Sequence[Observed]]) -> dict[str, Any]:
    """Each family's kindest parameter, chosen on the held-out labels themselves: the one whose worst set is best.

    No way to choose parameters can do better on the worst set; a family that loses there loses however it is fitted.
    """
    found = {}
    for name, family in tqdm(usable(dev).items(), desc="best case"):
        target = with_null(dev) if family.needs_null else dev
        zero = {dataset: [f1_at(seen.query, 0.0) for seen in queries] for dataset, queries in target.items()}
        gains = [
            {one: paired_differences(f1_by_rule(family.make(choice), rows), zero[one]) for one, rows in target.items()}
            for choice in family.choices
        ]
        worst = [min(map(_mean, gain.values())) for gain in gains]
        place = worst.index(max(worst))
        intervals = {dataset: estimate_mean(values) for dataset, values in gains[place].items()}
        found[name] = {
            "choice": family.choices[place],
            "difference": {dataset: interval.model_dump() for dataset, interval in intervals.items()},
            "mean": estimate_mean(*gains[place].values()).model_dump(),
            "beats_zero": all((interval.low or 0.0) > 0 for interval in intervals.values()),
        }
    return found


def headroom(dev: Mapping[str, Sequence[Observed]]) -> dict[str, Any]:
    """F1 at zero, at the set's best and at each query's best threshold, and what the latter looks like."""
    found = {}
    for name, seen in dev.items():
        queries = [one.query for one in seen]
        tau, best = best_threshold(queries)
        own = [best_threshold([query])[0] for query in queries]
        parted = [_parted(query) for query in queries]
        found[name] = {
            "queries": len(queries),
            "zero": _mean([f1_at(query, 0.0) for query in queries]),
            "tau_best": tau,
            "best": best,
            "query_best": _mean([query_best_f1(query) for query in queries]),
            "own_deviation": math.sqrt(_mean([(value - _mean(own)) ** 2 for value in own])),
            "perfectly_ranked": _mean(parted),
            "kept": _mean([float(sum(score > 0 for score in query.scores)) for query in queries]),
            "relevant": _mean([float(sum(query.relevant)) for query in queries]),
            "mean_score": _mean([_mean(query.scores) for query in queries]),
            "mean_null": _mean([_mean(one.null) for one in seen if one.null]),
        }
    return found


def _parted(query: ScoredQuery) -> float:
    """Whether some threshold keeps the relevant documents and no other."""
    return float(query_best_f1(query) > 1 - 1e-9)


PROMISES = (0.8, 0.9, 0.95)


def conformal(fit: Mapping[str, Sequence[Observed]], dev: Mapping[str, Sequence[Observed]]) -> list[dict[str, Any]]:
    """Promised and measured recall and complete evidence.

    Calibrated on every other query of the same set and measured on the rest, as with labels of one's own; on the other
    held-out sets; and on the training sets.
    """
    rows = []
    for name, seen in dev.items():
        queries = [one.query for one in seen]
        others = [one.query for other, some in dev.items() if other != name for one in some]
        training = [one.query for some in fit.values() for one in some]
        calibrations = {
            "same set": (queries[::2], queries[1::2]),
            "other held-out sets": (others, queries),
            "training sets": (training, queries),
        }
        kinds = {"recall": guaranteed_recall, "complete": guaranteed_evidence}
        for (source, (known, new)), (kind, promised), promise in product(calibrations.items(), kinds.items(), PROMISES):
            threshold = promised(known, promise)
            row = {"set": name, "calibration": source, "kind": kind, "promise": promise, "queries": len(known)}
            finite = threshold if math.isfinite(threshold) else None
            rows.append({**row, "threshold": finite, **_delivered(new, threshold)})
    return rows


def _delivered(queries: Sequence[ScoredQuery], threshold: float) -> dict[str, Any]:
    chosen = select_above(queries, threshold)
    return {
        "recall": estimate_mean(chosen.recall).model_dump(),
        "complete": estimate_mean([float(value > 1 - 1e-9) for value in chosen.recall]).model_dump(),
        "precision": _mean(chosen.precision),
        "kept": chosen.budget,
        "candidates": _mean([float(len(query.scores)) for query in queries]),
        "f1": _mean(chosen.f1),
    }


def send(
    systems: Mapping[str, Mapping[str, Sequence[ScoredQuery]]], lengths: Mapping[str, Sequence[Sequence[int]]]
) -> dict[str, dict[str, dict[str, Any]]]:
    """Evidence by set and by what is sent: all candidates, each system's top-k, and the first system's zero."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    own = next(iter(systems.values()))
    for name, counts in lengths.items():
        queries = own[name]
        choices = {"all": (queries, sent_top(queries, max(map(len, counts))))}
        choices["zero"] = (queries, sent_above(queries, [0.0] * len(queries)))
        for system, sets in systems.items():
            choices |= {f"{system}, top {k}": (sets[name], sent_top(sets[name], k)) for k in TOP}
        found[name] = {label: _means(evidence(rows, sent, counts)) for label, (rows, sent) in choices.items()}
    return found


def _means(found: Evidence) -> dict[str, Any]:
    fields = ("documents", "tokens", "recall", "precision", "token_precision", "complete")
    intervals = {name: estimate_mean(getattr(found, name)).model_dump() for name in ("recall", "complete")}
    return {**{name: _mean(getattr(found, name)) for name in fields}, "intervals": intervals}


def short(found: Any) -> Any:
    """The same record with its numbers to five places."""
    if isinstance(found, Mapping):
        return {key: short(value) for key, value in found.items()}
    if isinstance(found, (list, tuple)):
        return [short(value) for value in found]
    return round(found, 5) if isinstance(found, float) else found


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / max(len(values), 1)


def draw(found: Mapping[str, Mapping[str, Mapping[str, Any]]], systems: Sequence[str], path: Path) -> None:
    """Evidence found against tokens sent."""
    from rsrank_rag.evaluation import plots

    panels = {
        name: {
            system: tuple([rows[f"{system}, top {k}"][column] for k in TOP] for column in ("tokens", "recall"))
            for system in systems
        }
        for name, rows in found.items()
    }
    points = {name: (rows["zero"]["tokens"], rows["zero"]["recall"]) for name, rows in found.items()}
    plots.evidence_curves(panels, points, point=f"{systems[0]}, zero threshold").savefig(path, dpi=80)


def _signed(value: Mapping[str, Any], *, interval: bool = False) -> str:
    """Points; bold where the whole interval is above zero, in italics where it is below."""
    found = Estimate.model_validate(value)
    low, high = 100 * (found.low or 0.0), 100 * (found.high or 0.0)
    mark = "**" if low > 0 else "*" if high < 0 else ""
    return f"{mark}{100 * found.mean:+.1f}{mark}" + (f" ({low:+.1f}, {high:+.1f})" if interval else "")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    lines = ["| " + " | ".join(head) + " |", "|---" + "|--:" * (len(head) - 1) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def rule_table(found: Mapping[str, Any]) -> str:
    """Differences to zero, a row a rule."""
    sets = list(found["zero"]["difference"])
    rows = [
        [
            name,
            json.dumps(row["choice"]).strip("[]"),
            *(_signed(row["difference"][one]) for one in sets),
            _signed(row["mean"], interval=True),
        ]
        for name, row in found.items()
        if name != "zero"
    ]
    return table(["rule", "chosen", *sets, "mean"], rows)


def headroom_table(found: Mapping[str, Any]) -> str:
    """F1 in points and what the ranking allows."""
    rows = [
        [
            name,
            str(row["queries"]),
            *(f"{100 * row[key]:.1f}" for key in ("zero", "best", "query_best")),
            f"{100 * (row['query_best'] - row['zero']):.1f}",
            f"{row['tau_best']:+.2f}",
            f"{row['own_deviation']:.2f}",
            f"{row['kept']:.1f} / {row['relevant']:.1f}",
            f"{100 * row['perfectly_ranked']:.0f}",
        ]
        for name, row in found.items()
    ]
    head = ["set", "queries", "zero", "set's best", "query's best", "headroom", "set's best tau"]
    return table([*head, "deviation of queries' best", "kept / relevant", "% perfectly ranked"], rows)


def conformal_table(found: Sequence[Mapping[str, Any]], kind: str, promise: float) -> str:
    """What one promise delivers, a row a set: measured, and the share of the candidates kept."""
    rows: dict[str, dict[str, str]] = {}
    for row in found:
        if (row["kind"], row["promise"]) == (kind, promise):
            measured = row[kind]
            broken = measured["high"] is not None and measured["high"] < promise
            value = f"{100 * measured['mean']:.0f} / {100 * row['precision']:.0f} / "
            value += f"{100 * row['kept'] / row['candidates']:.0f}"
            rows.setdefault(row["set"], {})[row["calibration"]] = f"*{value}*" if broken else value
    sources = list(next(iter(rows.values())))
    return table(["set", *sources], [[name, *(row[one] for one in sources)] for name, row in rows.items()])


def evidence_table(found: Mapping[str, Any], choices: Sequence[str]) -> str:
    """Evidence found, complete evidence, precision (of documents) and tokens, a row a set and choice."""
    rows = [
        [
            name,
            choice,
            f"{row['documents']:.1f}",
            f"{row['tokens']:.0f}",
            *(f"{100 * row[key]:.1f}" for key in ("recall", "complete", "precision")),
        ]
        for name, sent in found.items()
        for choice, row in ((choice, sent[choice]) for choice in choices)
    ]
    return table(["set", "sent", "documents", "tokens", "evidence found", "all found", "precision"], rows)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, required=True, help="folder with the training sets")
    parser.add_argument("--dev", type=Path, required=True, help="folder with the held-out sets")
    parser.add_argument("--model", default="mini")
    parser.add_argument(
        "--minilm", default="sentence-transformers/all-MiniLM-L6-v2", help="Hub id or folder of the bi-encoder"
    )
    parser.add_argument("--cache", type=Path, required=True, help="JSON file for the scores")
    parser.add_argument("--fit-sets", nargs="+", default=FIT, help="training sets to choose parameters on")
    parser.add_argument("--fit-queries", type=int, default=40, help="of each training set")
    parser.add_argument("--null-documents", type=int, default=16, help="0 leaves the rules that need them out")
    parser.add_argument("--null-queries", type=int, default=300, help="the first ones of each held-out set")
    parser.add_argument("--output", type=Path, required=True, help="JSON file for every figure")
    parser.add_argument("--figure", type=Path, required=True, help="PNG of evidence against tokens")
    return parser.parse_args()


def main() -> None:
    """Score what is not in the cache, choose, measure, write, print."""
    options = arguments()
    cache, ranker = Cache(options.cache), RSRank.from_pretrained(options.model, device="cpu")
    seen = cache("seen", lambda: seen_in_training(options.train))
    fit, dev = {}, {}
    for name in options.fit_sets:
        whole = read_labelled(options.train / f"{name}.jsonl.gz")
        known = set(seen[name])
        rows = random.Random(0).sample([query for query in whole if query.id not in known], options.fit_queries)
        scores = cache(f"fit/{name}/{len(rows)}", partial(candidates, ranker, rows, name))
        documents = pool(whole, options.null_documents)
        key = f"fit/{name}/{len(rows)}/null/{options.null_documents}"
        nulls = cache(key, partial(null, ranker, rows, documents)) if documents else []
        fit[name] = observed(rows, scores, nulls)
    held_out = read_sets(sorted(options.dev.glob("*.jsonl.gz")))
    for name, rows in held_out.items():
        scores = cache(f"dev/{name}/mini", partial(candidates, ranker, rows, name))
        few, documents = rows[: options.null_queries], pool(rows, options.null_documents)
        key = f"dev/{name}/null/{options.null_documents}/{len(few)}"
        nulls = cache(key, partial(null, ranker, few, documents)) if documents else []
        dev[name] = observed(rows, scores, nulls)
    systems = {"mini": {name: [seen.query for seen in rows] for name, rows in dev.items()}}
    for system, rival in (("MiniLM cosine", BiEncoder(options.minilm, device="cpu")), ("BM25", BM25())):
        systems[system] = {}
        for name, rows in held_out.items():
            scores = cache(f"dev/{name}/{system}", partial(candidates, rival, rows, name))
            labels = [[document.relevant for document in query.documents] for query in rows]
            systems[system][name] = list(map(ScoredQuery, scores, labels))
    lengths = {name: cache(f"dev/{name}/tokens", partial(tokens, ranker, rows)) for name, rows in held_out.items()}
    found = {
        "headroom": headroom(dev),
        "rules": compare_rules(fit, dev),
        "best_case": best_case(dev),
        "conformal": conformal(fit, dev),
        "evidence": send(systems, lengths),
    }
    text = json.dumps(short(found), separators=(",", ":"))
    options.output.write_text(text + "\n", encoding="utf-8")
    draw(found["evidence"], list(systems), options.figure)
    choices = ["all", "zero", *(f"{system}, top {k}" for system in systems for k in (1, 3, 5, 10))]
    print(headroom_table(found["headroom"]), rule_table(found["best_case"]), rule_table(found["rules"]), sep="\n\n")
    for kind, promise in product(("recall", "complete"), PROMISES):
        print(f"\n{kind} {promise}\n\n{conformal_table(found['conformal'], kind, promise)}")
    print(f"\n{evidence_table(found['evidence'], choices)}")


if __name__ == "__main__":
    main()
