"""Embeddings of all-mpnet-base-v2, the teacher of `mini`: each text once, in int8 on disk.

    python research/mini/teacher.py --data ../shared/data/train \
        --model runs/all-mpnet-base-v2 --output runs/teacher

The command embeds everyday's queries and passages in files of 1,024 texts. A second call goes on
where the first one stopped, and training reads new files while they come.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from batches import Pool
from torch import Tensor
from torch.nn import functional
from transformers import AutoModel, AutoTokenizer

PART = 1024
"""Texts a file."""
MOST_TOKENS = 200
BATCH_CHARACTERS = 20_000
"""Characters of a batch with its padding: about 5,000 tokens."""


class Teacher:
    """The embeddings that are on disk.

    Args:
        folder: Files that `embed_all` wrote. More may come while training runs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: set[Path] = set()
        self.rows: dict[bytes, np.ndarray] = {}
        self.refresh()

    def refresh(self) -> None:
        """Read the files that are new."""
        for path in sorted(self.folder.glob("*.npz")):
            if path not in self.files:
                part = np.load(path)
                self.rows.update(zip(map(bytes, part["keys"]), part["rows"], strict=True))
                self.files.add(path)

    def __call__(self, text: str) -> Tensor | None:
        """The unit embedding of a text, (768,), or None where the teacher has not read the text."""
        row = self.rows.get(key_of(text))
        if row is None:
            return None
        return functional.normalize(torch.from_numpy(row).float(), dim=0)


def key_of(text: str) -> bytes:
    """Eight bytes that stand for a text."""
    return hashlib.sha256(text.encode()).digest()[:8]


def batches(texts: Iterable[str]) -> Iterable[list[str]]:
    """Texts of similar length, a batch's worth at a time."""
    batch: list[str] = []
    for text in sorted(texts, key=len):
        if batch and (len(batch) + 1) * len(text) > BATCH_CHARACTERS:
            yield batch
            batch = []
        batch.append(text)
    if batch:
        yield batch


@torch.inference_mode()
def embed_all(texts: Sequence[str], model: Path, folder: Path, device: str) -> None:
    """Write the embeddings of all texts that ``folder`` does not hold yet."""
    folder.mkdir(parents=True, exist_ok=True)
    done = Teacher(folder)
    todo = [text for text in dict.fromkeys(texts) if key_of(text) not in done.rows]
    tokenizer = AutoTokenizer.from_pretrained(model)
    encoder = AutoModel.from_pretrained(model, dtype=torch.bfloat16).eval().to(device)
    for start in range(0, len(todo), PART):
        keys = []
        rows = []
        for batch in batches(todo[start : start + PART]):
            inputs = tokenizer(
                batch, padding=True, truncation=True, max_length=MOST_TOKENS, return_tensors="pt"
            ).to(device)
            hidden = encoder(**inputs).last_hidden_state.float()
            valid = inputs["attention_mask"][..., None]
            pooled = functional.normalize((hidden * valid).sum(1) / valid.sum(1), dim=-1)
            scaled = 127 * pooled / pooled.abs().amax(1, keepdim=True)
            rows.append(scaled.round().to(torch.int8).cpu().numpy())
            for text in batch:
                keys.append(np.frombuffer(key_of(text), dtype=np.uint8))
        path = folder / f"{len(done.files) + start // PART:04d}.npz"
        with path.with_suffix(".new").open("wb") as file:
            np.savez(file, keys=np.stack(keys), rows=np.concatenate(rows))
        path.with_suffix(".new").replace(path)
        print(f"{min(start + PART, len(todo))} of {len(todo)} texts", flush=True)


def main() -> None:
    """Embed every text of the training."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with the training sets")
    parser.add_argument("--model", type=Path, required=True, help="folder of all-mpnet-base-v2")
    parser.add_argument("--output", type=Path, required=True, help="folder for the embeddings")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    texts = Pool.of(options.data).teacher_texts()
    embed_all(texts, options.model, options.output, options.device)


if __name__ == "__main__":
    main()
