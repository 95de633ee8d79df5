"""``python -m rsrank_rag`` is ``rsrank``."""

from .cli import app

app()
