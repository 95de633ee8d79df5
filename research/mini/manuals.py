"""Typed queries over manual pages, for the last leg of training.

    python research/mini/manuals.py --output runs/manuals.jsonl

manuals.json holds our queries, which passages answer them, and where each passage stands: a package
with its version, a page, and the words of the rendered page. The pages' licences are permissive
(MIT, ISC, BSD, Apache-2.0, PostgreSQL, curl), and the text of the pages stays in the packages. The
command downloads the packages, renders the pages, checks each passage by its hash and writes
labelled rows in the form of the other training sets.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import tempfile
from pathlib import Path

MANUALS = Path(__file__).with_name("manuals.json")
HEADINGS = frozenset({"SYNOPSIS", "SYNTAX", "DESCRIPTION", "LIBRARY"})
"""Headings that follow the section NAME."""


def digest(text: str) -> str:
    """The first twelve hexadecimal digits of a text's SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def words_of(page: Path) -> list[str]:
    """The words of a manual page, rendered without hyphens and without justified lines."""
    environment = {**os.environ, "MANWIDTH": "200", "LC_ALL": "C.UTF-8", "MAN_KEEP_FORMATTING": ""}
    command = ["man", "--no-hyphenation", "--no-justification", "-l", str(page)]
    rendered = subprocess.run(command, env=environment, capture_output=True, check=True).stdout
    plain = subprocess.run(["col", "-b"], input=rendered, capture_output=True, check=True).stdout
    return plain.decode("utf-8", "replace").split()


def title_of(words: list[str]) -> str:
    """The page's own line under NAME: the tool and what it does."""
    start = words.index("NAME") + 1
    end = next(place for place in range(start, len(words)) if words[place] in HEADINGS)
    return " ".join(words[start:end])


def unpack(package: str, version: str, folder: Path) -> None:
    """Download a Debian package and unpack it below ``folder``."""
    subprocess.run(["apt-get", "download", f"{package}={version}"], cwd=folder, check=True)
    (archive,) = folder.glob(f"{package}_*.deb")
    subprocess.run(["dpkg-deb", "-x", str(archive), str(folder / package)], check=True)


def build(manuals: dict, folder: Path) -> list[dict]:
    """Labelled rows with the passages' texts.

    Raises:
        SystemExit: A passage is not where manuals.json says.
    """
    for package, version in manuals["packages"].items():
        unpack(package, version, folder)
    pages: dict[tuple[str, str], list[str]] = {}
    texts: dict[str, str] = {}
    titles: dict[str, str] = {}
    for name, passage in manuals["passages"].items():
        key = (passage["package"], passage["page"])
        if key not in pages:
            pages[key] = words_of(folder / passage["package"] / passage["page"])
        start, count = passage["words"]
        texts[name] = " ".join(pages[key][start : start + count])
        titles[name] = title_of(pages[key])
        if digest(texts[name]) != passage["sha256"]:
            raise SystemExit(f"{name} is not at words {start} to {start + count} of {key}.")
    rows = []
    for number, query in enumerate(manuals["queries"]):
        documents = []
        for name in [*query["relevant"], *query["irrelevant"]]:
            documents.append(
                {
                    "id": name,
                    "title": titles[name],
                    "text": texts[name],
                    "relevant": name in query["relevant"],
                }
            )
        rows.append(
            {
                "id": f"manuals-{number}",
                "query": query["query"],
                "of": query["of"],
                "source": "manuals.passage",
                "documents": documents,
            }
        )
    return rows


def main() -> None:
    """Write the labelled rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="JSON lines to write")
    options = parser.parse_args()
    manuals = json.loads(MANUALS.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        rows = build(manuals, Path(folder))
    options.output.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{len(rows)} queries, {len(manuals['passages'])} passages: {options.output}")


if __name__ == "__main__":
    main()
