"""``python -m rsrank_rag`` is ``rsrank``."""

from .cli.main import app

app()
