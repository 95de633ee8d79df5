"""Write the tables of README.md, docs/ and research/docs from their JSON files.

    python research/mini/tables.py    # after research/mini/measure.py has written docs/mini.json

Each table is replaced whole.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data import EVERYDAY, REAL, SETS
from research import markdown
from research.markdown import points, rewritten
from rsrank_rag.evaluation.metrics import ScoredQuery, ranking_measures, selection_measures
from rsrank_rag.evaluation.statistics import bootstrap, estimate
from rsrank_rag.ranking.rule import Rule

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/mini.md", "research/docs/results.md")
METRICS = {"ndcg@5": "nDCG@5", "recall@5": "Recall@5", "f1": "F1@τ"}
NOT_MEASURED = "–"
BLOCK = markdown.BLOCK
Figures = Mapping[str, Mapping[str, Any]]


def family(dataset: str) -> str:
    """A set's questions, whatever its documents are: ``2wiki`` of ``2wiki.sentence``.

    >>> family("2wiki.sentence")
    '2wiki'
    """
    return dataset.partition(".")[0]


SEEN = {family(name) for name in (*SETS, EVERYDAY, REAL)}
"""Families of which the training sets have other questions."""
TYPED = (EVERYDAY, REAL)
"""Sets of questions as people type them."""
MULTI_HOP = ("2wiki", "hotpotqa", "musique")
"""Families whose questions need several passages."""


def sets_of(figures: Figures) -> tuple[list[str], list[str]]:
    """The sets of families that were seen in training, and those that never were."""
    seen = []
    unseen = []
    for row in next(iter(figures.values()))["sets"]:
        name = row["dataset"]
        if family(name) in SEEN:
            seen.append(name)
        else:
            unseen.append(name)
    return seen, unseen


def family_mean(values: Mapping[str, float], sets: Sequence[str]) -> float:
    """Each family counts once, however many sets there are of it."""
    by_family: dict[str, list[float]] = {}
    for name in sets:
        by_family.setdefault(family(name), []).append(values[name])
    return statistics.fmean(map(statistics.fmean, by_family.values()))


def values_of(figures: Figures, system: str, metric: str) -> dict[str, float]:
    """Set -> value at the threshold alone."""
    values = {}
    for row in figures[system]["sets"]:
        values[row["dataset"]] = {**row, **row["rules"]["threshold"]}[metric]
    return values


def by_rule(figures: Figures, system: str, metric: str) -> dict[str, float]:
    """Set -> value by the system's own rule; answers lost as a share."""
    values = {}
    for row in figures[system]["sets"]:
        value = {**row, **row["rules"]["in_use"]}[metric]
        if metric == "lost":
            value = value / row["answerable"]
        values[row["dataset"]] = value
    return values


def columns_of(figures: Figures, metric: str) -> dict[str, dict[str, float]]:
    """System -> row of the table -> value: the sets, then the means over families."""
    seen, unseen = sets_of(figures)
    everything = [*seen, *unseen]
    groups = {"mean, seen": seen, "mean, never seen": unseen, "mean of all": everything}
    columns = {}
    for system in figures:
        values = values_of(figures, system, metric)
        column = {name: values[name] for name in everything}
        for label, names in groups.items():
            if names:
                column[label] = family_mean(values, names)
        columns[system] = column
    return columns


def table(figures: Figures, metrics: Sequence[str] = ("ndcg@5", "f1")) -> str:
    """A row a set and mean, columns of several metrics; the best of each metric is bold."""
    systems = list(figures)
    seen, _ = sets_of(figures)
    counts = {row["dataset"]: str(row["queries"]) for row in figures[systems[0]]["sets"]}
    columns = {metric: columns_of(figures, metric) for metric in metrics}
    head = ["set", "seen", "queries"]
    for metric in metrics:
        head += [f"{METRICS[metric]} {system}" for system in systems]
    rows = []
    for name in columns[metrics[0]][systems[0]]:
        kind = ""
        if name in counts:
            kind = "yes" if name in seen else "no"
        cells = [name, kind, counts.get(name, "")]
        for metric in metrics:
            values = []
            for system in systems:
                values.append(points(columns[metric][system][name]))
            best = max(values, key=float)
            for value in values:
                cells.append(f"**{value}**" if value == best else value)
        rows.append(cells)
    return markdown.table(head, rows, texts=2)


RULES = {
    "in_use": "the rule of `mini`",
    "threshold": "zero",
    "top1": "top 1",
    "top3": "top 3",
    "top5": "top 5",
    "first3": "first 3 in the file's order",
}
"""Rules of `rsrank evaluate` by their names."""


def lost_answers(figures: Figures, system: str, rule: str) -> float:
    """Percent of the answerable queries of all sets for which a rule keeps nothing relevant."""
    lost = 0
    answerable = 0
    for row in figures[system]["sets"]:
        lost += row["rules"][rule]["lost"]
        answerable += row["answerable"]
    return 100 * lost / answerable


def typed_table(figures: Figures) -> str:
    """The README's first table: what each rule loses and keeps of typed questions."""
    own, cosine = list(figures)[:2]
    systems = {
        f"**{own}, its rule**": (own, "in_use"),
        f"{own}, zero alone": (own, "threshold"),
        f"{own}, top 3": (own, "top3"),
        f"{cosine}, its best rule": (cosine, "in_use"),
    }
    rows = []
    for label, (system, rule) in systems.items():
        sets = {row["dataset"]: row for row in figures[system]["sets"]}
        cells = [label]
        for name in TYPED:
            measures = sets[name]["rules"][rule]
            cells.append(_share(measures["lost"], sets[name]["answerable"]))
            cells.append(f"{measures['kept']:.1f}")
        rows.append(cells)
    head = ["", "everyday: lost", "kept", "handbooks, manuals: lost", "kept"]
    return markdown.table(head, rows)


def shift_table(figures: Figures) -> str:
    """Ranking and selection with the shift and without it: means over kinds of sets."""
    groups: dict[str, list[Mapping[str, Any]]] = {"typed": [], "multi-hop": [], "others": []}
    for row in figures[next(iter(figures))]["shift"]:
        group = "others"
        if row["dataset"] in TYPED:
            group = "typed"
        elif family(row["dataset"]) in MULTI_HOP:
            group = "multi-hop"
        groups[group].append(row)
    rows = []
    for label, group in groups.items():
        cells = [label]
        for key in ("ndcg@5", "f1", "rule f1", "lost"):
            for name in (key, f"{key} without"):
                cells.append(points(statistics.fmean(row[name] for row in group)))
        rows.append(cells)
    head = ["sets", "nDCG@5: with the shift", "without", "F1 at zero: with", "without"]
    head += ["F1 by the rule: with", "without", "answers lost: with", "without"]
    return markdown.table(head, rows)


def overview_table(figures: Figures) -> str:
    """The README's second table: means over families of the public sets, by each system's rule."""
    systems = list(figures)[:2]
    seen, unseen = sets_of(figures)
    seen = [name for name in seen if name not in TYPED]
    head = [""]
    for system in systems:
        head += [f"{system}: seen", "not seen"]
    rows = []
    for metric, label in (("ndcg@5", "nDCG@5"), ("f1", "F1"), ("lost", "answers lost")):
        cells = [label]
        for system in systems:
            values = by_rule(figures, system, metric)
            cells.append(points(family_mean(values, seen)))
            cells.append(points(family_mean(values, unseen)))
        rows.append(cells)
    return markdown.table(head, rows)


def rules_table(figures: Figures) -> str:
    """What zero keeps of all sets, and what other rules would keep of the same scores."""
    name = next(iter(figures))
    sets = figures[name]["sets"]
    counts = [row["queries"] for row in sets]
    rows = []
    for rule, label in RULES.items():
        f1 = np.average([row["rules"][rule]["f1"] for row in sets], weights=counts)
        kept = np.average([row["rules"][rule]["kept"] for row in sets], weights=counts)
        lost = lost_answers(figures, name, rule)
        rows.append([label, points(f1), f"{lost:.1f}%", f"{kept:.1f}"])
    return markdown.table(["rule", "F1", "answers lost", "kept per query"], rows)


def threshold_table(figures: Figures) -> str:
    """F1 at zero, and F1 at the threshold that is best on each set's own labels."""
    rows = []
    for row in next(iter(figures.values()))["sets"]:
        best = row["best_threshold"]
        cells = [row["dataset"], points(row["rules"]["threshold"]["f1"]), points(best["f1"])]
        rows.append([*cells, f"{best['threshold']:+.2f}"])
    head = ["set", "F1 at zero", "F1 at the set's best", "that threshold"]
    return markdown.table(head, rows)


def _share(part: int, whole: int) -> str:
    return f"{part / max(whole, 1):.0%}"


def absent_table(figures: Figures) -> str:
    """How well the best score tells lists with a relevant passage from lists without one."""
    by_set = {}
    for system, result in figures.items():
        by_set[system] = {row["dataset"]: row for row in result["sets"]}
    seen, unseen = sets_of(figures)
    rows = [[name] for name in (*seen, *unseen)]
    head = ["set"]
    for label, key, form in (
        ("AUROC", "auroc", "{:.1%}"),
        ("false accepts", "false_accepts@90", "{:.0%}"),
    ):
        for system in figures:
            head.append(f"{label} {system}")
            for row in rows:
                value = by_set[system][row[0]].get(key)
                row.append(NOT_MEASURED if value is None else form.format(value))
    return markdown.table(head, rows)


def short_table(figures: Figures) -> str:
    """Questions, words, keywords and greetings over examples/island, and unanswerable questions."""
    kinds = {
        "questions": "full question",
        "keywords": "keywords",
        "words": "one word",
        "unanswered": "full question without an answer",
        "nothing": "greeting or off-topic",
    }
    parts = {
        "mrr": ("MRR", "{:.3f}"),
        "found": ("wanted one kept", "{:.0%}"),
        "kept": ("kept of 61", "{:.1f}"),
        "silent": ("keeps none", "{:.0%}"),
    }
    rows: list[list[str]] = []
    for kind, name in kinds.items():
        # Older figures lack this kind.
        if any(kind not in system["short"] for system in figures.values()):
            continue
        of_kind = [system["short"][kind] for system in figures.values()]
        # Queries without an answer have no reciprocal rank.
        shown = ("mrr", "found", "kept") if "mrr" in of_kind[0] else ("silent",)
        for part in shown:
            label, form = parts[part]
            first = f"{name} ({of_kind[0]['queries']:.0f}): {label}"
            rows.append([first, *[form.format(row[part]) for row in of_kind]])
    for dataset, row in next(iter(figures.values()))["unanswered"].items():
        cells = [f"{dataset}, no relevant candidate ({row['queries']}): kept"]
        for system in figures.values():
            cells.append(f"{system['unanswered'][dataset]['kept']:.0%}")
        rows.append(cells)
    return markdown.table(["", *figures], rows)


def difference_tables(figures: Figures) -> str:
    """The first system minus each other one; bold where the interval leaves zero out."""
    first = next(iter(figures))
    tables = []
    for other, by_set in figures[first].get("differences", {}).items():
        rows = []
        for name, row in by_set.items():
            rows.append([name, *[_difference(*row[metric]) for metric in METRICS]])
        table_of_sets = markdown.table(["set", *METRICS.values()], rows)
        tables.append(f"**{first} minus {other}**\n\n{table_of_sets}")
    return "\n\n".join(tables)


def _difference(mean: float, low: float, high: float) -> str:
    text = f"{100 * mean:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"
    return f"**{text}**" if low > 0 or high < 0 else text


def differences(
    first: Mapping[str, Sequence[ScoredQuery]],
    second: Mapping[str, Sequence[ScoredQuery]],
    thresholds: tuple[float, float],
) -> dict[str, dict[str, list[float]]]:
    """Set -> metric -> mean paired difference over queries and its 95% interval."""
    by_set = {}
    for name in first:
        pair = []
        for scored, tau in zip((first[name], second[name]), thresholds, strict=True):
            f1 = selection_measures(scored, Rule(tau))["f1"]
            pair.append({**ranking_measures(scored), "f1": f1})
        row = {}
        for metric in METRICS:
            change = estimate(bootstrap(pair[0][metric] - pair[1][metric]))
            mean = change.mean
            low = mean if change.low is None else change.low
            high = mean if change.high is None else change.high
            row[metric] = [mean, low, high]
        by_set[name] = row
    return by_set


def blocks(figures: Figures) -> dict[str, str]:
    """Every table, by name."""
    return {
        "mini": table(figures),
        "mini in short": overview_table(figures),
        "typed": typed_table(figures),
        "shift": shift_table(figures),
        "rules": rules_table(figures),
        "results": table(figures, tuple(METRICS)),
        "thresholds": threshold_table(figures),
        "absent": absent_table(figures),
        "short": short_table(figures),
        "differences": difference_tables(figures),
    }


def read(root: Path = ROOT) -> Figures:
    """The figures."""
    figures: Figures = json.loads((root / "docs/mini.json").read_text(encoding="utf-8"))
    return figures


def main() -> None:
    """Rewrite the pages."""
    tables = blocks(read())
    for page in PAGES:
        path = ROOT / page
        path.write_text(rewritten(path.read_text(encoding="utf-8"), tables), encoding="utf-8")


if __name__ == "__main__":
    main()
