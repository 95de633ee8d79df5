"""Tables of what was measured on decoders, each made from ``research/docs/decoders.json``.

`python -m benchmarks.tables` writes them into the pages.
"""

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from rsrank_rag.evaluation.metrics import ScoredQuery, ranking_measures, selection_measures
from rsrank_rag.ranking.rule import Rule

from ..best_threshold import best_threshold
from ..markdown import points, table
from ..reproduction.thresholds import own_best, paired_t_test, set_best, threshold_stability
from ..unanswerable import auroc, best_scores
from .measure import Figures, Scores

PAPERS_SETS = {
    "2wiki.sentence": "2Wiki",
    "hotpotqa.sentence": "HotpotQA",
    "musique.paragraph": "MuSiQue",
    "fiqa": "FiQA",
    "fever.sentence": "FEVER",
    "nfcorpus": "NFCorpus",
}

PAPER = {
    "nDCG@5": (80.2, 79.6, 84.0, 97.5, 99.2, 83.4),
    "Recall@5": (85.1, 83.0, 88.8, 95.6, 99.7, 34.3),
    "F1 at zero": (60.5, 51.8, 61.2, 85.9, 83.4, 62.2),
}
"""RSRank on Qwen3-8B, as the paper reports it, set by set."""

TYPED_SETS = {
    "everyday.passage": "everyday questions",
    "everyday.passage.typo": "the same with a typo",
    "realdocs.passage": "questions over real documents",
}


SHIPPED = {
    "mini": ("28M", "no torch"),
    "qwen2.5-coder-0.5b": ("494M", "`[lm]`, 1 GB"),
    "qwen2.5-coder-1.5b": ("1.5B", "`[lm]`, 3 GB"),
}
"""Size and needs of the models that ship."""

LADDER = {
    "multi-hop (2Wiki, HotpotQA)": ("2wiki.sentence", "hotpotqa.sentence"),
    "typed (everyday, real documents)": ("everyday.passage", "realdocs.passage"),
    "FEVER": ("fever.sentence",),
}
"""Sets of the README's table."""


def measures(queries: Sequence[ScoredQuery]) -> dict[str, float]:
    """nDCG@5, Recall@5 and F1 at zero of a set, and F1 at the set's best threshold."""
    ranking = ranking_measures(queries)
    selection = selection_measures(queries, Rule(0.0))
    answerable = ~np.isnan(selection["recall"])
    return {
        "nDCG@5": float(ranking["ndcg@5"][answerable].mean()),
        "Recall@5": float(ranking["recall@5"][answerable].mean()),
        "F1 at zero": float(selection["f1"].mean()),
        "F1 at best": best_threshold(queries)[1],
    }


def overview(figures: Any) -> str:
    """nDCG@5, F1 at zero and F1 by the default rule of each set and system."""
    scores = Figures.model_validate(figures).scores
    head = ["questions (number)"]
    for metric in ("nDCG@5", "F1 at zero", "F1, default rule"):
        head += [f"{metric} {system}" for system in scores.systems]
    rows = []
    for name, title in scores.present(PAPERS_SETS | TYPED_SETS).items():
        rows.append([f"{title} ({len(scores.labels[name])})", *_overview_cells(scores, name)])
    return table(head, rows)


def _overview_cells(scores: Scores, name: str) -> list[str]:
    ranking = []
    at_zero = []
    by_rule = []
    for system, of_system in scores.systems.items():
        queries = scores.scored(system, name)
        values = measures(queries)
        ranking.append(points(values["nDCG@5"]))
        at_zero.append(points(values["F1 at zero"]))
        selected = selection_measures(queries, of_system.rule)
        by_rule.append(points(float(selected["f1"].mean())))
    return [*ranking, *at_zero, *by_rule]


def ladder(figures: Any) -> str:
    """The shipped models: what each is, and nDCG@5 / F1 by the default rule, means over sets."""
    scores = Figures.model_validate(figures).scores
    groups = {}
    for title, names in LADDER.items():
        present = [name for name in names if name in scores.labels]
        if present:
            groups[title] = present
    rows = []
    for system, of_system in scores.systems.items():
        if system not in SHIPPED:
            continue
        cells = [f"`{system}`", *SHIPPED[system]]
        for group in groups.values():
            ranking = []
            selection = []
            for name in group:
                queries = scores.scored(system, name)
                ranking.append(measures(queries)["nDCG@5"])
                selection.append(float(selection_measures(queries, of_system.rule)["f1"].mean()))
            means = points(statistics.fmean(ranking)), points(statistics.fmean(selection))
            cells.append(" / ".join(means))
        rows.append(cells)
    return table(["name", "size", "needs", *groups], rows)


def papers_sets(figures: Any) -> str:
    """nDCG@5, Recall@5 and F1 at zero on the paper's sets, the paper's figures beside ours."""
    scores = Figures.model_validate(figures).scores
    sets = scores.present(PAPERS_SETS)
    counts = [f"{title} ({len(scores.labels[name])})" for name, title in sets.items()]
    values: dict[str, dict[str, dict[str, float]]] = {}
    for system in scores.systems:
        values[system] = {name: measures(scores.scored(system, name)) for name in sets}
    blocks = []
    for metric, reported in PAPER.items():
        rows = []
        for system, of_system in scores.systems.items():
            if metric == "F1 at zero" and not of_system.own_threshold:
                continue
            rows.append([system, *_with_mean([values[system][name][metric] for name in sets])])
        shares = dict(zip(PAPERS_SETS, reported, strict=True))
        rows.append(["Qwen3-8B, the paper", *_with_mean([shares[name] / 100 for name in sets])])
        blocks.append(table([f"{metric} (queries)", *counts, "mean"], rows))
    return "\n\n".join(blocks)


def _with_mean(shares: Sequence[float]) -> list[str]:
    """Shares and their mean in points of 100."""
    return list(map(points, [*shares, statistics.fmean(shares)]))


def typed_by_rule(figures: Any) -> str:
    """What is lost and kept of typed questions by the artifact's rule."""
    return typed(figures, at_zero=False)


def typed(figures: Any, *, at_zero: bool = True) -> str:
    """What is lost and kept of typed questions, at zero and by the artifact's rule."""
    scores = Figures.model_validate(figures).scores
    head = ["questions", "model", "nDCG@5", "AUROC", "rule", "lost", "kept", "F1"]
    head.append("called relevant")
    rows = []
    for name, title in scores.present(TYPED_SETS).items():
        for system, of_system in scores.systems.items():
            queries = scores.scored(system, name)
            separation = auroc(*best_scores(queries)) or 0.0
            rules = {"zero": Rule(0.0), "default": of_system.rule}
            if not at_zero:
                del rules["zero"]
            for words, rule in rules.items():
                values = selection_measures(queries, rule)
                called = values["called_relevant"]
                called = called[~np.isnan(called)]
                row = [
                    f"{title} ({len(queries)})",
                    system,
                    points(measures(queries)["nDCG@5"]),
                    f"{separation:.2f}",
                    words,
                    f"{np.nanmean(values['lost']):.0%}",
                    f"{values['kept'].mean():.1f}",
                    points(float(values["f1"].mean())),
                    f"{called.mean():.0%}" if len(called) else "",
                ]
                rows.append(row)
    return table(head, rows)


def thresholds(figures: Any) -> str:
    """Bias and variance of the best thresholds of the paper's sets (paper, Section 2.1)."""
    scores = Figures.model_validate(figures).scores
    titles = scores.present(PAPERS_SETS)
    rows = []
    for system, of_system in scores.systems.items():
        sets = {name: scores.scored(system, name) for name in titles}
        stability = threshold_stability(sets, of_system.threshold)
        row = [system, f"{stability.natural:.3f}", f"{stability.bias:.3f}"]
        row.append(f"{stability.variance:.4f}")
        row += [f"{best:.3f}" for best in stability.best.values()]
        rows.append(row)
    return table(["system", "threshold", "bias", "variance", *titles.values()], rows)


def gaps(figures: Any) -> str:
    """F1 at each query's and at the set's best threshold, with the t-test (paper, Table 1)."""
    scores = Figures.model_validate(figures).scores
    rows = []
    for system in scores.systems:
        for name, title in scores.present(PAPERS_SETS).items():
            queries = scores.scored(system, name)
            own = own_best(queries)
            at_best = set_best(queries)
            test = paired_t_test(own, at_best)
            row = [system, title, str(len(queries)), points(statistics.fmean(own))]
            row += [points(statistics.fmean(at_best)), points(test.difference)]
            row += ["" if test.t is None else f"{test.t:.2f}"]
            row += ["" if test.p is None else f"{test.p:.1e}"]
            rows.append(row)
    return table(["system", "set", "N", "Q-Opt", "D-Opt", "gap", "t", "p"], rows)


def ablations(figures: Any) -> str:
    """One table for each group of changes.

    The share of FLOPs is that of the layers that run for a document: B over k layers needs the
    first k, because of layer k only the query's value vectors are read.
    """
    rows = Figures.model_validate(figures).ablations
    all_layers = 1 + max((row.layers for row in rows), default=0)
    groups: dict[str, list[list[object]]] = {}
    for row in rows:
        share = f"{row.layers / all_layers:.0%}"
        cells = [row.name, row.training_queries, row.layers, share, f"{row.parameters:,}"]
        for metric in ("ndcg@5", "recall@5", "f1@0", "f1@best"):
            cells.append(row.metrics[metric].shown(points))
        groups.setdefault(row.group, []).append(cells)
    head = ["trained on", "layers", "FLOPs", "numbers in B"]
    head += ["nDCG@5", "Recall@5", "F1 at zero", "F1 at best"]
    return "\n\n".join(table([group, *head], cells) for group, cells in groups.items())
