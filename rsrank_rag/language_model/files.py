"""The files that a language model is read from, and what is in them."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from huggingface_hub import constants, try_to_load_from_cache

from ..partial_files import digest_of, write_text

TOKENIZER = ("tokenizer*.json", "tokenizer.model", "spiece.model", "special_tokens_map.json", "added_tokens.json")
DECIDING = ("config.json", *TOKENIZER, "vocab.*", "merges.txt", "modeling*.py", "configuration*.py")
"""Files beside the weights that decide a score."""

REMEMBERED = 1 << 28  # bytes from which on a file's hash is remembered: hashing takes about 1 s/GB on one core


def folder_of(name: str | Path, revision: str | None, cache_dir: str | Path | None = None) -> Path | None:
    """Where a language model's files are: a folder here, or in the Hub's cache; None before they are downloaded."""
    if Path(name).is_dir():
        return Path(name)
    found = try_to_load_from_cache(str(name), "config.json", cache_dir, revision)
    return Path(found).parent if isinstance(found, str) else None


def hashes(folder: Path | None) -> dict[str, str]:
    """sha256 of each file of a language model that decides a score, by name."""
    if folder is None:
        return {}
    one = (folder / "model.safetensors").is_file()
    weights = ("model.safetensors",) if one else ("model.safetensors.index.json", "model-*-of-*.safetensors")
    found = {path for pattern in (*DECIDING, *weights) for path in folder.glob(pattern)}
    files = sorted(path for path in found if path.is_file())
    with ThreadPoolExecutor() as threads:  # hashing waits for no other thread
        return dict(zip((path.name for path in files), threads.map(_remembered, files), strict=True))


def _remembered(path: Path) -> str:
    """sha256 of a file; a large one is read once, and again when it has been touched."""
    status = path.stat()
    if status.st_size < REMEMBERED:
        return digest_of(path)
    state = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
    name = hashlib.sha256(str(path.resolve()).encode()).hexdigest()
    note = Path(constants.HF_HOME) / "rsrank" / f"{name}.json"
    with suppress(OSError, ValueError):
        digest, *then = json.loads(note.read_text(encoding="utf-8"))
        if then == state:
            return str(digest)
    digest = digest_of(path)
    with suppress(OSError):  # nowhere to write: it is read each time
        write_text(note, json.dumps([digest, *state]))
    return digest
