"""The paper's six sets (Section 5.2) and those of BEIR by name, from the Hugging Face Hub.

Each of the six sets is read at a fixed commit of a repository that holds plain data files, so the
same call gives the same queries. Other sets of BEIR are read at a commit of your choice.
``python -m research.hub_datasets --help`` writes a set to a file for ``rsrank evaluate``.
"""

import random
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import click
from click import option

from rsrank_rag.backends.hub_errors import HUB_ERRORS
from rsrank_rag.backends.options import LoadOptions, LoadSettings
from rsrank_rag.cli.arguments import PATH, command
from rsrank_rag.errors import InputError, required
from rsrank_rag.evaluation.datasets import LabelledDocument, LabelledQuery, read_sets
from rsrank_rag.partial_files import write_text

from .negatives import Negatives, choose, replace_negatives

Split = Literal["test", "train", "validation"]
Granularity = Literal["sentence", "paragraph"]
_Draw = Callable[[Iterable[str]], list[str]]


@dataclass(frozen=True)
class _Source:
    """Where a set lies on the Hub, and how its rows are laid out."""

    layout: Literal["hotpotqa", "musique", "beir"]
    repository: str
    config: str | None
    revision: str | None

    @property
    def splits(self) -> Mapping[str, str]:
        """Its names of the three splits. Test labels of the multi-hop sets are not public."""
        if self.layout == "beir":
            return {"train": "train", "validation": "dev", "test": "test"}
        return {"train": "train", "validation": "validation", "test": "validation"}

    def table(self, config: str | None, split: str) -> Any:
        """A `datasets.Dataset`: Arrow files, mapped into memory."""
        datasets = required("datasets", f"Loading {self.repository} needs datasets.", "research")
        try:
            return datasets.load_dataset(
                self.repository, config, split=split, revision=self.revision
            )
        except (*HUB_ERRORS, datasets.exceptions.DatasetsError) as error:
            # A failed build names its reason only in the cause.
            cause = error.__cause__ or error
            raise InputError(
                f"{self.repository} (config {config or 'default'!r}, split {split!r}, "
                f"revision {self.revision!r}) could not be loaded from the Hub: "
                f"{type(cause).__name__}: {str(cause).rstrip('. ')}. Connect once to download it, "
                "leave revision out if you gave one, or read a file of your own with read_labelled."
            ) from error


_SOURCES: Mapping[str, _Source] = {
    "2wiki": _Source(
        "hotpotqa", "framolfese/2WikiMultihopQA", None, "fe713bfbd1afbca1a65246741a75890405d56a3a"
    ),
    "hotpotqa": _Source(
        "hotpotqa", "hotpotqa/hotpot_qa", "distractor", "1908d6afbbead072334abe2965f91bd2709910ab"
    ),
    "musique": _Source(
        "musique", "dgslibisey/MuSiQue", None, "c8f4f8c9465fb69d31a8eae894c3fd509c4ca321"
    ),
    "fiqa": _Source("beir", "mteb/fiqa", "default", "27a168819829fe9bcd655c2df245fb19452e8e06"),
    "nfcorpus": _Source(
        "beir", "mteb/nfcorpus", "default", "ec0fa4fe99da2ff19ca1214b7966684033a58814"
    ),
    "fever": _Source("beir", "mteb/fever", "default", "bea83ef9e8fb933d90a2f1d5515737465d613e12"),
}

# The sets that `load_named` knows, besides those of BEIR.
NAMES: tuple[str, ...] = tuple(_SOURCES)

_BEIR_NAME = re.compile(r"beir[:/]([A-Za-z0-9][A-Za-z0-9._-]*)")


def load_sets(
    places: Iterable[str | Path],
    *,
    limit: int | None = None,
    negatives: Negatives | None = None,
    titles: bool = True,
    options: LoadOptions | None = None,
) -> dict[str, list[LabelledQuery]]:
    """Files of labelled queries and sets by name from the Hub: name -> queries.

    Args:
        places: ``.jsonl`` or ``.jsonl.gz`` files, names of `NAMES` or ``beir:NAME``. A file goes
            before a name.
        limit: Only the first queries of each file; of a set by name so many at random.
        negatives: The irrelevant documents of each query. For a file they come from the candidates
            of all its queries. None keeps the file's own, and takes 15 at random for sets of BEIR.
            The multi-hop sets by name keep their own.
        titles: The first stage reads a file's titles in front of the texts.
        options: How to load the bi-encoder of dense negatives.
    """
    files = []
    named = []
    for place in dict.fromkeys(map(str, places)):
        if Path(place).is_file() or _source(place) is None:
            files.append(place)
        else:
            named.append(place)
    sets = read_sets(files)
    for name, queries in sets.items():
        if negatives is not None:
            # The corpus is that of the whole file, so draw before the limit cuts the queries.
            queries = replace_negatives(queries, negatives, titles=titles, options=options)
        sets[name] = queries[:limit]
    for name in named:
        sets[name] = load_named(
            name, queries=limit, negatives=negatives or Negatives(), options=options
        )
    return sets


def _source(name: str) -> _Source | None:
    """The source of a set by name; None for an unknown name."""
    match = _BEIR_NAME.fullmatch(name)
    if match is None:
        return _SOURCES.get(name)
    repository = f"mteb/{match[1]}"
    for source in _SOURCES.values():
        if source.repository == repository:
            return source
    return _Source("beir", repository, "default", None)


def load_named(
    name: str,
    *,
    split: Split = "test",
    queries: int | None = None,
    granularity: Granularity | None = None,
    negatives: int | Negatives = 15,
    seed: int = 0,
    revision: str | None = None,
    options: LoadOptions | None = None,
) -> list[LabelledQuery]:
    """Load a set, in order of the queries' ids. Downloads are kept in the cache of `datasets`.

    2wiki, hotpotqa and musique come with each question's own gold and distractor paragraphs, and
    musique holds answerable questions only. Their test labels are hidden, so "test" gives the
    validation split. fiqa, nfcorpus and fever have test labels; their documents are the relevant
    ones and others of the whole corpus, shuffled. fever's corpus takes several GB on disk. It is
    the paper's zero-shot set: measure on it, do not train on it.

    Args:
        name: One of `NAMES`, or ``beir:scifact`` for the set of BEIR that is mteb/scifact.
        split: Which part.
        queries: At most so many, at random; None for all. The sample depends on the ids and the
            seed alone.
        granularity: What a document of 2wiki and hotpotqa is; None for "sentence", as in the paper.
        negatives: Irrelevant documents of a query of BEIR: so many at random, or as `Negatives`
            says.
        seed: Draws the queries and the negatives.
        revision: Another commit, branch or tag of the repository than the pinned one.
        options: How to load the bi-encoder of dense negatives.

    Raises:
        InputError: An argument cannot be used, or the set cannot be downloaded or has other
            columns.
    """
    source = _source(name)
    if source is None:
        raise InputError(
            f"There is no set {name!r}. Choose one of: {', '.join(NAMES)}; "
            "or beir:NAME, as beir:scifact."
        )
    source = replace(source, revision=revision or source.revision)
    if split not in source.splits:
        raise InputError(
            f"There is no split {split!r} of {name}. Choose one of: {', '.join(source.splits)}."
        )
    granularities = [None, "paragraph"]
    if source.layout == "hotpotqa":
        granularities.append("sentence")
    if granularity not in granularities:
        raise InputError(f"{name} cannot be had with granularity {granularity!r}. Leave it out.")
    for what, number, least in (("negatives", negatives, 0), ("queries", queries, 1)):
        if isinstance(number, int) and number < least:
            raise InputError(f"Give {what} >= {least}, not {number}.")
    drawn = Negatives(count=negatives) if isinstance(negatives, int) else negatives
    draw = partial(_sample, count=queries, seed=seed)
    try:
        if source.layout == "beir":
            tables = [
                source.table(source.config, source.splits[split]),
                source.table("queries", "queries"),
                source.table("corpus", "corpus"),
            ]
            choose_negatives = partial(choose, drawn, seed=seed, options=options)
            loaded = _from_beir(tables, draw, choose_negatives, seed)
        else:
            loaded = _from_multihop(
                source.table(source.config, source.splits[split]), source.layout, granularity, draw
            )
    except KeyError as error:
        raise InputError(
            f"{source.repository} at revision {source.revision!r} has no column {error.args[0]!r}, "
            f"which {name} needs. Leave revision out."
        ) from None
    if not loaded:
        raise InputError(
            f"{source.repository} has no labelled queries in {split!r} "
            f"at revision {source.revision!r}."
        )
    return loaded


def _sample(ids: Iterable[str], *, count: int | None, seed: int) -> list[str]:
    """Some of the ids, sorted; the same ones in whatever order they come."""
    ordered = sorted(ids)
    if count is None or count >= len(ordered):
        return ordered
    return sorted(random.Random(seed).sample(ordered, count))


def _column(table: Any, name: str) -> Any:
    """A column as a pyarrow array, which is not copied."""
    if name not in table.column_names:
        raise KeyError(name)
    return table.data.column(name)


def _from_multihop(
    table: Any, layout: str, granularity: Granularity | None, draw: _Draw
) -> list[LabelledQuery]:
    rows = {str(key): row for row, key in enumerate(_column(table, "id").to_pylist())}
    ids = list(rows)
    if layout == "musique":
        answerable = _column(table, "answerable").to_pylist()
        ids = [key for key, row in rows.items() if answerable[row]]
    queries = []
    for key in draw(ids):
        row = table[rows[key]]
        if layout == "musique":
            queries.append(_from_musique(row))
        else:
            queries.append(_from_hotpotqa(row, granularity or "sentence"))
    return queries


def _from_hotpotqa(row: Mapping[str, Any], granularity: Granularity) -> LabelledQuery:
    facts = row["supporting_facts"]
    context = row["context"]
    gold = set(zip(facts["title"], facts["sent_id"], strict=True))
    documents: list[LabelledDocument] = []
    paragraphs = zip(context["title"], context["sentences"], strict=True)
    for number, (title, texts) in enumerate(paragraphs):
        # Two paragraphs may have one title.
        place = f"{number}:{title}"
        sentences = {i: text.strip() for i, text in enumerate(texts) if text.strip()}
        units = {}
        if granularity == "sentence":
            for i, text in sentences.items():
                units[f"{place}#{i}"] = text, (title, i) in gold
        elif sentences:
            units[place] = " ".join(sentences.values()), title in facts["title"]
        for name, (text, label) in units.items():
            documents.append(LabelledDocument(id=name, title=title, text=text, relevant=label))
    return LabelledQuery(id=str(row["id"]), query=row["question"], documents=tuple(documents))


def _from_musique(row: Mapping[str, Any]) -> LabelledQuery:
    documents = []
    for paragraph in row["paragraphs"]:
        document = LabelledDocument(
            id=str(paragraph["idx"]),
            title=paragraph["title"],
            text=paragraph["paragraph_text"],
            relevant=paragraph["is_supporting"],
        )
        documents.append(document)
    return LabelledQuery(id=str(row["id"]), query=row["question"], documents=tuple(documents))


def _from_beir(
    tables: Sequence[Any], draw: _Draw, choose: Callable[..., list[list[int]]], seed: int
) -> list[LabelledQuery]:
    labels, queries, corpus = tables
    relevant: dict[str, set[str]] = defaultdict(set)
    columns = []
    for name in ("query-id", "corpus-id", "score"):
        columns.append(_column(labels, name).to_pylist())
    for query, document, score in zip(*columns, strict=True):
        if score > 0:
            relevant[str(query)].add(str(document))
    query_rows = _rows(_column(queries, "_id"), relevant)
    corpus_rows = _rows(_column(corpus, "_id"), set().union(*relevant.values()))
    gold: dict[str, set[int]] = {}
    for key in query_rows:
        present = relevant[key] & corpus_rows.keys()
        if present:
            gold[key] = set(map(corpus_rows.__getitem__, present))
    wanted = []
    for key in draw(gold):
        wanted.append((key, queries[query_rows[key]]["text"], gold[key]))

    def read(rows: Sequence[int]) -> list[str]:
        return [_document(row).content() for row in corpus.select(rows)]

    loaded = []
    others_of = choose(wanted, len(corpus), read)
    for (key, text, own), others in zip(wanted, others_of, strict=True):
        rows = [*sorted(own), *others]
        random.Random(f"order:{seed}:{key}").shuffle(rows)
        documents = []
        for row, line in zip(rows, corpus.select(rows), strict=True):
            documents.append(_document(line, relevant=row in own))
        loaded.append(LabelledQuery(id=key, query=text, documents=tuple(documents)))
    return loaded


def _document(row: Mapping[str, Any], *, relevant: bool = False) -> LabelledDocument:
    return LabelledDocument(
        id=str(row["_id"]), title=row["title"] or None, text=row["text"], relevant=relevant
    )


def _rows(ids: Any, wanted: Collection[str]) -> dict[str, int]:
    """Row number of each wanted id that the column has. Arrow searches: there may be millions."""
    import pyarrow as pa
    import pyarrow.compute as pc

    ids = ids.cast(pa.string())
    rows = pc.indices_nonzero(pc.is_in(ids, value_set=pa.array(list(wanted), pa.string())))
    return dict(zip(ids.take(rows).to_pylist(), rows.to_pylist(), strict=True))


@command()
@option("--data", required=True, help="A name, beir:NAME, or a labelled .jsonl(.gz).")
@option("--output", "-o", type=PATH, required=True, help="Labelled .jsonl to write.")
@option(
    "--limit", type=click.IntRange(1), help="At most so many queries: of a file the first ones."
)
@option("--negatives", help="Irrelevant documents: bm25, dense, dense:ENCODER or random.")
def write(
    load: LoadSettings, data: str, output: Path, limit: int | None, negatives: str | None
) -> None:
    """Write labelled queries with other irrelevant documents, or a set by its name, to a file.

    `python -m research.hub_datasets --data beir:scifact --limit 200 --output scifact.jsonl`

    `python -m research.hub_datasets --data mine.jsonl --negatives bm25 --output hard.jsonl`
    """
    kind = None if negatives is None else Negatives.parse(negatives)
    options = load.load_options()
    (queries,) = load_sets([data], limit=limit, negatives=kind, options=options).values()
    lines = [f"{query.model_dump_json()}\n" for query in queries]
    write_text(output, "".join(lines))
    click.echo(f"{len(queries)} queries: {output}")


if __name__ == "__main__":
    write()
