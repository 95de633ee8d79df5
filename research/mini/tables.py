"""Write the tables of README.md, docs/ and research/docs from their JSON files.

    python research/mini/tables.py    # after research/mini/measure.py has written docs/mini.json

Each table stands between the lines ``<!-- figures: NAME -->`` and ``<!-- end of figures -->`` and
is replaced whole.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data import EVERYDAY, REAL, SETS
from rsrank_rag.evaluation.metrics import ScoredQuery, ranking_measures, selection_measures
from rsrank_rag.evaluation.statistics import estimate_mean
from rsrank_rag.ranking.rule import Rule

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/mini.md", "research/docs/results.md")
METRICS = {"ndcg@5": "nDCG@5", "recall@5": "Recall@5", "f1": "F1@τ"}
NOT_MEASURED = "–"
BLOCK = re.compile(r"(<!-- figures: ([^>]+?) -->\n).*?(<!-- end of figures -->)", re.S)

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


def rows_of(figures: Figures) -> tuple[list[str], list[str]]:
    """The sets of families that were seen in training, and those that never were."""
    names = [row["dataset"] for row in next(iter(figures.values()))["sets"]]
    return [name for name in names if family(name) in SEEN], [
        name for name in names if family(name) not in SEEN
    ]


def family_mean(values: Mapping[str, float], sets: Sequence[str]) -> float:
    """Each family counts once, however many sets there are of it."""
    families = dict.fromkeys(map(family, sets))
    return statistics.fmean(
        statistics.fmean(values[s] for s in sets if family(s) == f) for f in families
    )


def values_of(figures: Figures, system: str, metric: str) -> dict[str, float]:
    """Set -> value."""
    rows = figures[system]["sets"]
    return {row["dataset"]: {**row, **row["rules"]["threshold"]}[metric] for row in rows}


def by_rule(figures: Figures, system: str, metric: str) -> dict[str, float]:
    """Set -> value by the system's own rule; answers lost as a share."""
    values = {}
    for row in figures[system]["sets"]:
        value = {**row, **row["rules"]["in_use"]}[metric]
        values[row["dataset"]] = value / row["answerable"] if metric == "lost" else value
    return values


def columns_of(figures: Figures, metric: str) -> dict[str, dict[str, float]]:
    """System -> row of the table -> value: the sets, then the means over families."""
    seen, unseen = rows_of(figures)
    found = {}
    for system in figures:
        values = values_of(figures, system, metric)
        means = {"mean, seen": seen, "mean, never seen": unseen, "mean of all": [*seen, *unseen]}
        found[system] = {**{s: values[s] for s in (*seen, *unseen)}} | {
            name: family_mean(values, sets) for name, sets in means.items() if sets
        }
    return found


def table(figures: Figures, metrics: Sequence[str] = ("ndcg@5", "f1")) -> str:
    """A row a set and mean, columns of several metrics; the best of each metric is bold."""
    systems, (seen, _) = list(figures), rows_of(figures)
    counts = {row["dataset"]: str(row["queries"]) for row in figures[systems[0]]["sets"]}
    columns = {metric: columns_of(figures, metric) for metric in metrics}
    head = [
        "set",
        "seen",
        "queries",
        *(f"{METRICS[metric]} {system}" for metric in metrics for system in systems),
    ]
    lines = [head, ["---", "---", *["--:"] * (len(head) - 2)]]
    for name in columns[metrics[0]][systems[0]]:
        cells = []
        for metric in metrics:
            points = [f"{100 * columns[metric][system][name]:.1f}" for system in systems]
            best = max(points, key=float)
            cells += [f"**{value}**" if value == best else value for value in points]
        kind = ("yes" if name in seen else "no") if name in counts else ""
        lines.append([name, kind, counts.get(name, ""), *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


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
    rows = figures[system]["sets"]
    lost = sum(row["rules"][rule]["lost"] for row in rows)
    return float(100 * lost / sum(row["answerable"] for row in rows))


def typed_table(figures: Figures) -> str:
    """The README's first table: what each rule loses and keeps of typed questions."""
    own, cosine = list(figures)[:2]
    rows = {
        f"**{own}, its rule**": (own, "in_use"),
        f"{own}, zero alone": (own, "threshold"),
        f"{own}, top 3": (own, "top3"),
        f"{cosine}, its best rule": (cosine, "in_use"),
    }
    lines = [
        "| | everyday: lost | kept | handbooks, manuals: lost | kept |",
        "|---|--:|--:|--:|--:|",
    ]
    for label, (system, rule) in rows.items():
        sets = {row["dataset"]: row for row in figures[system]["sets"]}
        cells = [label]
        for name in TYPED:
            found = sets[name]["rules"][rule]
            cells.append(_share(found["lost"], sets[name]["answerable"]))
            cells.append(f"{found['kept']:.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def shift_table(figures: Figures) -> str:
    """Ranking and selection with the shift and without it: means over kinds of sets."""
    rows = figures[next(iter(figures))]["shift"]
    typed = [row for row in rows if row["dataset"] in TYPED]
    multi_hop = [row for row in rows if family(row["dataset"]) in MULTI_HOP]
    others = [row for row in rows if row not in typed and row not in multi_hop]
    lines = [
        "| sets | nDCG@5: with the shift | without | F1 at zero: with | without "
        "| F1 by the rule: with | without | answers lost: with | without |",
        f"|---|{'--:|' * 8}",
    ]
    groups = {"typed": typed, "multi-hop": multi_hop, "others": others}
    for label, group in groups.items():
        cells = [label]
        for key in ("ndcg@5", "f1", "rule f1", "lost"):
            for name in (key, f"{key} without"):
                cells.append(f"{100 * statistics.fmean(row[name] for row in group):.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def overview_table(figures: Figures) -> str:
    """The README's second table: means over families of the public sets, by each system's rule."""
    systems = list(figures)[:2]
    seen, unseen = rows_of(figures)
    seen = [name for name in seen if name not in TYPED]
    lines = ["| | " + " | ".join(f"{name}: seen | not seen" for name in systems) + " |"]
    lines.append(f"|---|{'--:|' * 2 * len(systems)}")
    for metric, label in (("ndcg@5", "nDCG@5"), ("f1", "F1"), ("lost", "answers lost")):
        means = []
        for system in systems:
            for names in (seen, unseen):
                means.append(family_mean(by_rule(figures, system, metric), names))
        cells = " | ".join(f"{100 * mean:.1f}" for mean in means)
        lines.append(f"| {label} | {cells} |")
    return "\n".join(lines)


def rules_table(figures: Figures) -> str:
    """What zero keeps of all sets, and what other rules would keep of the same scores."""
    name = next(iter(figures))
    rows = figures[name]["sets"]
    queries = sum(row["queries"] for row in rows)
    lines = ["| rule | F1 | answers lost | kept per query |", "|---|--:|--:|--:|"]
    for rule, label in RULES.items():
        lost = lost_answers(figures, name, rule)
        means = []
        for key in ("f1", "kept"):
            means.append(sum(row["rules"][rule][key] * row["queries"] for row in rows) / queries)
        lines.append(f"| {label} | {100 * means[0]:.1f} | {lost:.1f}% | {means[1]:.1f} |")
    return "\n".join(lines)


def threshold_table(figures: Figures) -> str:
    """What the best threshold of each set, found on its labels, would add to zero."""
    lines = ["| set | F1 at zero | F1 at the set's best | that threshold |", "|---|--:|--:|--:|"]
    lines += [
        f"| {row['dataset']} | {100 * row['rules']['threshold']['f1']:.1f} "
        f"| {100 * row['best_threshold']['f1']:.1f} | {row['best_threshold']['threshold']:+.2f} |"
        for row in next(iter(figures.values()))["sets"]
    ]
    return "\n".join(lines)


def _share(part: int, whole: int) -> str:
    return f"{part / max(whole, 1):.0%}"


def absent_table(figures: Figures) -> str:
    """How well the best score tells lists with a relevant passage from lists without one."""
    systems = list(figures)
    rows = {s: {row["dataset"]: row for row in figures[s]["sets"]} for s in systems}
    seen, unseen = rows_of(figures)
    lines = [
        f"| set | {' | '.join(f'AUROC {s}' for s in systems)} "
        f"| {' | '.join(f'false accepts {s}' for s in systems)} |",
        f"|---|{'--:|' * 2 * len(systems)}",
    ]
    for name in (*seen, *unseen):
        cells = []
        for key, form in (("auroc", "{:.1%}"), ("false_accepts@90", "{:.0%}")):
            for system in systems:
                value = rows[system][name].get(key)
                cells.append(NOT_MEASURED if value is None else form.format(value))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def short_table(figures: Figures) -> str:
    """Questions, words, keywords and greetings over examples/island, and unanswerable questions."""
    lines = [f"| | {' | '.join(figures)} |", f"|---|{'--:|' * len(figures)}"]
    kinds = {
        "questions": "full question",
        "keywords": "keywords",
        "words": "one word",
        "unanswered": "full question without an answer",
        "nothing": "greeting or off-topic",
    }
    shown = {
        "mrr": "MRR {:.3f}",
        "found": "wanted one kept {:.0%}",
        "kept": "kept of 61: {:.1f}",
        "silent": "keeps none {:.0%}",
    }
    for kind, name in kinds.items():
        rows = [system["short"][kind] for system in figures.values() if kind in system["short"]]
        # Figures that were measured before this kind was have nothing of it.
        for part, text in shown.items() if len(rows) == len(figures) else ():
            if part in rows[0] and (part == "silent") == ("mrr" not in rows[0]):
                label, _, number = text.partition("{")
                cells = [("{" + number).format(row[part]) for row in rows]
                first = f"{name} ({rows[0]['queries']:.0f}): {label.strip(' :')}"
                lines.append(f"| {first} | {' | '.join(cells)} |")
    for dataset, row in next(iter(figures.values()))["unanswered"].items():
        cells = [f"{system['unanswered'][dataset]['kept']:.0%}" for system in figures.values()]
        lines.append(
            f"| {dataset}, no relevant candidate ({row['queries']}): kept | {' | '.join(cells)} |"
        )
    return "\n".join(lines)


def difference_tables(figures: Figures) -> str:
    """The first system minus each other one; bold where the interval leaves zero out."""
    first, parts = next(iter(figures)), []
    for other, found in figures[first].get("differences", {}).items():
        lines = [
            f"**{first} minus {other}**\n",
            f"| set | {' | '.join(METRICS.values())} |",
            "|---|--:|--:|--:|",
        ]
        for name, row in found.items():
            lines.append(
                f"| {name} | {' | '.join(_difference(*row[metric]) for metric in METRICS)} |"
            )
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _difference(mean: float, low: float, high: float) -> str:
    text = f"{100 * mean:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"
    return f"**{text}**" if low > 0 or high < 0 else text


def differences(
    first: Mapping[str, Sequence[ScoredQuery]],
    second: Mapping[str, Sequence[ScoredQuery]],
    thresholds: tuple[float, float],
) -> dict[str, dict[str, list[float]]]:
    """Set -> metric -> mean paired difference over queries and its 95% interval."""
    made = {}
    for name in first:
        pairs = []
        for scored, tau in zip((first[name], second[name]), thresholds, strict=True):
            f1 = selection_measures(scored, Rule(tau))["f1"]
            pairs.append({**ranking_measures(scored), "f1": f1})
        found = {metric: estimate_mean(pairs[0][metric] - pairs[1][metric]) for metric in METRICS}
        made[name] = {
            metric: [
                e.mean,
                e.mean if e.low is None else e.low,
                e.mean if e.high is None else e.high,
            ]
            for metric, e in found.items()
        }
    return made


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


def rewritten(text: str, found: Mapping[str, str]) -> str:
    """A page with its tables replaced; those that others make stay."""
    return BLOCK.sub(
        lambda match: f"{match[1]}{found[match[2]]}\n{match[3]}" if match[2] in found else match[0],
        text,
    )


def read(root: Path = ROOT) -> Figures:
    """The figures."""
    figures: Figures = json.loads((root / "docs/mini.json").read_text(encoding="utf-8"))
    return figures


def main() -> None:
    """Rewrite the pages."""
    found = blocks(read())
    for page in PAGES:
        path = ROOT / page
        path.write_text(rewritten(path.read_text(encoding="utf-8"), found), encoding="utf-8")


if __name__ == "__main__":
    main()
