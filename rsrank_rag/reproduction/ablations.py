"""Ablations (paper, Appendix B): named changes of a recipe or of what is read, as ``ablations.toml`` lists them.

Every ablation changes one thing. `ablation_runs` carries them out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..errors import InputError
from ..training.recipe import SHIPPED, read_toml

Signal = Literal["values", "keys", "hidden"]
"""Value vectors (the paper's choice), keys, or the hidden states that enter a layer (Appendix B.2)."""

Null = Literal["empty", "matched", "none"]
"""What is subtracted: the query after no document (Eq. 3), the query after filler of the document's length (Eq. 2), or
nothing (raw representations, Appendix B.1)."""

Share = Literal["all", "first half", "second half", "every second", "first", "last"]
"""Which of the layers or heads that the recipe reads."""

Scorer = Literal["B", "oracle similarity", "cosine"]
"""B, or a yardstick: similarity to the shift of all relevant documents, which knows the labels (Section 4.2), or the
cosine that the recipe's model gives as a bi-encoder."""

BASE = "base"


@dataclass(frozen=True)
class Ablation:
    """One change."""

    name: str
    group: str  # the table it stands in
    changes: tuple[str, ...] = ()  # entries of the recipe, as after ``--set``
    signal: Signal = "values"
    null: Null = "empty"
    layers: Share = "all"
    heads: Share = "all"
    queries: int | None = None  # B learns from so many, drawn at random, for ``sample_epochs``; 0 is a random B
    scorer: Scorer = "B"

    def __str__(self) -> str:
        """The change in words."""
        parts = [change.split(".", 1)[-1] for change in self.changes]
        read = {name: getattr(self, name) for name in ("signal", "null", "layers", "heads")}
        parts += [f"{name}: {value}" for name, value in read.items() if value != getattr(Ablation, name)]
        if self.queries is not None:
            parts.append(f"{self.queries} training queries" if self.queries else "random B")
        if self.scorer != "B":
            parts.append("knows the labels" if self.scorer == "oracle similarity" else "the model as a bi-encoder")
        return ", ".join(parts) or "nothing"


ABLATIONS: Mapping[str, Ablation] = {
    entry["name"]: Ablation(**{**entry, "changes": tuple(entry.get("changes", ()))})
    for entry in read_toml(str(Path(__file__).with_suffix(".toml")), SHIPPED, "list of ablations")["ablations"]
}
"""All that are known, by name."""

GROUPS: tuple[str, ...] = tuple(dict.fromkeys(ablation.group for ablation in ABLATIONS.values()))


def chosen(names: Sequence[str]) -> list[Ablation]:
    """The ablations that names, groups or ``all`` stand for, the unchanged recipe first; else InputError."""
    found = {BASE: ABLATIONS[BASE]}
    for name in names:
        matching = {key: a for key, a in ABLATIONS.items() if name in ("all", key, a.group)}
        if not matching:
            raise InputError(
                f"There is no ablation {name!r}. Give 'all', a group ({', '.join(GROUPS)}) or a name: "
                f"{', '.join(ABLATIONS)}."
            )
        found |= matching
    return list(found.values())


def pick(items: Sequence[int], share: Share) -> tuple[int, ...]:
    """Some of the items; at least one.

    >>> pick(range(1, 6), "first half"), pick(range(1, 6), "second half"), pick(range(1, 6), "every second")
    ((1, 2, 3), (4, 5), (1, 3, 5))
    """
    middle = (len(items) + 1) // 2
    slices = {
        "all": slice(None),
        "first half": slice(middle),
        "second half": slice(min(middle, len(items) - 1), None),
        "every second": slice(None, None, 2),
        "first": slice(1),
        "last": slice(-1, None),
    }
    return tuple(items[slices[share]])
