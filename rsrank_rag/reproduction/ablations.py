"""Ablations (paper, Appendix B) as data: named changes of a recipe or of what is read.

Every ablation changes one thing. `ablation_runs` carries them out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ..errors import InputError

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


@dataclass(frozen=True, slots=True)
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

    @property
    def seeded(self) -> bool:
        """Whether another seed gives another result."""
        return self.scorer == "B"

    def __str__(self) -> str:
        """The change in words."""
        parts = [change.split(".", 1)[-1] for change in self.changes]
        parts += [f"{name}: {value}" for name in ("signal", "null", "layers", "heads") if (value := self._other(name))]
        if self.queries is not None:
            parts.append(f"{self.queries} training queries" if self.queries else "random B")
        if self.scorer != "B":
            parts.append("knows the labels" if self.scorer == "oracle similarity" else "the model as a bi-encoder")
        return ", ".join(parts) or "nothing"

    def _other(self, name: str) -> str | None:
        """A field's value where it is not the default."""
        value: str = getattr(self, name)
        return None if value in ("values", "empty", "all") else value


_ASK = r'template.suffix="\nRelevant: "'
_SHARES: tuple[Share, ...] = ("first half", "second half", "every second", "first", "last")
_LOSSES = ("calibration", "margin", "orthogonality", "alignment", "frobenius")

ABLATIONS: Mapping[str, Ablation] = {
    ablation.name: ablation
    for ablation in (
        Ablation(BASE, BASE),
        Ablation("cosine", "yardstick", scorer="cosine"),
        Ablation("oracle similarity", "yardstick", scorer="oracle similarity"),
        Ablation("random B", "yardstick", queries=0),
        Ablation("raw", "shift", null="none"),
        Ablation("matched", "shift", null="matched"),
        *(Ablation(f"closed-{name}", "shift", (f"method={name}",)) for name in ("oracle", "separation", "combined")),
        Ablation("keys", "signal", signal="keys", null="matched"),
        Ablation("hidden", "signal", signal="hidden"),
        *(Ablation(f"no-{name}", "loss", (f"fit.{name}_weight=0",)) for name in _LOSSES),
        *(Ablation(f"P={size}", "P", (f"fit.projection_dim={size}",)) for size in (1, 4, 16, 32, 64, 128)),
        *(Ablation(f"layers: {share}", "layers", layers=share) for share in _SHARES),
        *(Ablation(f"heads: {share}", "heads", heads=share) for share in _SHARES[:4]),
        Ablation("suffix, query scored", "positions", (_ASK,)),
        Ablation("suffix, suffix scored", "positions", (_ASK, "template.positions=suffix")),
        Ablation("suffix, both scored", "positions", (_ASK, "template.positions=query+suffix")),
        Ablation("8 query tokens in training", "positions", ("features.max_tokens=8",)),
        Ablation("short instruction", "template", ('template.instruction="Document: "',)),
        Ablation("bare separator", "template", (r'template.separator="\n"',)),
        Ablation("no titles", "template", ("features.titles=false",)),
        *(Ablation(f"{size} documents", "candidates", (f"features.max_documents={size}",)) for size in (5, 10, 20)),
        *(Ablation(f"{count} queries", "samples", queries=count) for count in (0, 50, 100, 200, 400, 800)),
    )
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
