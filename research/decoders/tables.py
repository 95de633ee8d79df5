"""Tables of what was measured on decoders, each made from ``research/docs/decoders.json``.

`python -m benchmarks.tables` writes them into the pages.
"""

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from rsrank_rag.evaluation.metrics import ScoredQuery, ranking_measures, selection_measures
from rsrank_rag.ranking.rule import Rule

from ..best_threshold import best_threshold
from ..reproduction.thresholds import paired_t_test, threshold_stability
from ..unanswerable import auroc, best_scores
from .ablations import AblationRow
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


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first are right-aligned."""
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def points(share: float) -> str:
    """A share in points of 100."""
    return f"{100 * share:.1f}"


def measures(queries: Sequence[ScoredQuery]) -> dict[str, float]:
    """nDCG@5, Recall@5 and F1 at zero of a set, and F1 at the set's best threshold."""
    ranking = ranking_measures(queries)
    answerable = np.array([any(query.relevant) for query in queries])
    return {
        "nDCG@5": float(ranking["ndcg@5"][answerable].mean()),
        "Recall@5": float(ranking["recall@5"][answerable].mean()),
        "F1 at zero": float(selection_measures(queries, Rule(0.0))["f1"].mean()),
        "F1 at best": best_threshold(queries)[1],
    }


def overview(figures: Any) -> str:
    """nDCG@5, F1 at zero and F1 by the default rule of each set and system."""
    scores = Figures.model_validate(figures).scores
    head = ["questions (number)"]
    for metric in ("nDCG@5", "F1 at zero", "F1, default rule"):
        head += [f"{metric} {system}" for system in scores.systems]
    rows = []
    for name, title in {**PAPERS_SETS, **TYPED_SETS}.items():
        if name in scores.labels:
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
    names = [name for name in PAPERS_SETS if name in scores.labels]
    counts = [f"{PAPERS_SETS[name]} ({len(scores.labels[name])})" for name in names]
    places = [list(PAPERS_SETS).index(name) for name in names]
    blocks = []
    for metric, reported in PAPER.items():
        rows = []
        for system, of_system in scores.systems.items():
            if metric == "F1 at zero" and not of_system.own_threshold:
                continue
            values = [measures(scores.scored(system, name))[metric] for name in names]
            rows.append([system, *map(points, [*values, statistics.fmean(values)])])
        papers = [reported[place] for place in places]
        paper_row = [f"{value:.1f}" for value in [*papers, statistics.fmean(papers)]]
        rows.append(["Qwen3-8B, the paper", *paper_row])
        blocks.append(table([f"{metric} (queries)", *counts, "mean"], rows))
    return "\n\n".join(blocks)


def typed_by_rule(figures: Any) -> str:
    """What is lost and kept of typed questions by the artifact's rule."""
    return typed(figures, at_zero=False)


def typed(figures: Any, *, at_zero: bool = True) -> str:
    """What is lost and kept of typed questions, at zero and by the artifact's rule."""
    scores = Figures.model_validate(figures).scores
    head = ["questions", "model", "nDCG@5", "AUROC", "rule", "lost", "kept", "F1"]
    head.append("called relevant")
    rows = []
    for name, title in TYPED_SETS.items():
        if name not in scores.labels:
            continue
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
    names = [name for name in PAPERS_SETS if name in scores.labels]
    rows = []
    for system, of_system in scores.systems.items():
        sets = {name: scores.scored(system, name) for name in names}
        stability = threshold_stability(sets, of_system.threshold)
        best = [f"{stability.best[name]:.3f}" for name in names]
        row = [system, f"{stability.natural:.3f}", f"{stability.bias:.3f}"]
        rows.append([*row, f"{stability.variance:.4f}", *best])
    head = ["system", "threshold", "bias", "variance", *(PAPERS_SETS[name] for name in names)]
    return table(head, rows)


def gaps(figures: Any) -> str:
    """F1 at each query's and at the set's best threshold, with the t-test (paper, Table 1)."""
    scores = Figures.model_validate(figures).scores
    rows = []
    for system in scores.systems:
        for name, title in PAPERS_SETS.items():
            if name not in scores.labels:
                continue
            queries = scores.scored(system, name)
            own = [best_threshold([query])[1] for query in queries]
            shared = Rule(best_threshold(queries)[0])
            at_best = selection_measures(queries, shared)["f1"].tolist()
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
    blocks = []
    for group in dict.fromkeys(row.group for row in rows):
        cells = [_ablation_cells(row, all_layers) for row in rows if row.group == group]
        head = [group, "trained on", "layers", "FLOPs", "numbers in B", "nDCG@5", "Recall@5"]
        blocks.append(table([*head, "F1 at zero", "F1 at best"], cells))
    return "\n\n".join(blocks)


def _ablation_cells(row: AblationRow, all_layers: int) -> list[str]:
    share = f"{row.layers / all_layers:.0%}"
    numbers = [f"{row.training_queries}", f"{row.layers}", share, f"{row.parameters:,}"]
    metrics = ("ndcg@5", "recall@5", "f1@0", "f1@best")
    return [row.name, *numbers, *(row.metrics[metric].shown(points) for metric in metrics)]
