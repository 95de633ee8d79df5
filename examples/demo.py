"""What `make demo` shows: passages scored, the irrelevant ones dropped at zero, and why.

The same in the shell: rsrank rank --query "..." --documents examples/passages.txt
"""

from pathlib import Path

import click

from rsrank_rag import RSRank
from rsrank_rag.cli.ranking import explanation_text

QUERY = "How do honeybees tell each other where the flowers are?"


def main() -> None:
    """Rank the passages in passages.txt and take two scores apart."""
    passages = (Path(__file__).parent / "passages.txt").read_text(encoding="utf-8").splitlines()

    ranker = RSRank.from_pretrained()  # the built-in model "mini"
    result = ranker.rank(QUERY, passages)
    click.echo(result)
    click.echo(f"\n{len(result.kept)} of {len(passages)} passages go to the language model.")
    click.echo(f"Nothing was tuned on these passages. The model's rule: {ranker.native_rule}.\n")

    click.echo("Why? The score by the query's tokens (rows), by layers and similarity terms:\n")
    for document in (result.kept[:1], result.dropped[-1:]):
        for ranked in document:
            explanation = ranker.explain(QUERY, ranked.text)
            click.echo(explanation_text(explanation, ranker.native_rule) + "\n")
    click.echo('Your own text:  .venv/bin/rsrank rank --query "..." --documents FILE')


if __name__ == "__main__":
    main()
