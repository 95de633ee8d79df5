"""Embeddings of all-mpnet-base-v2, the teacher of the second stage: each text once, kept on disk.

    python research/mini/teacher.py --data ../shared/data/train \
        --teacher runs/all-mpnet-base-v2 --output runs/teacher

all-mpnet-base-v2 (Apache-2.0) ranks typed queries better than MiniLM does, at eight times the work.
The command embeds the texts of `typed.Pool` in parts of 1,536 texts; a second call goes on where
the first one was stopped.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModel, AutoTokenizer
from typed import Pool, TechnicalSampler

PART = 1536
"""Texts a file."""
MOST_TOKENS = 170
BATCH_CHARACTERS = 24_000
"""Characters of a batch with its padding: about 6,000 tokens."""


class Teacher:
    """The embeddings that are on disk.

    Args:
        folder: Files that `embed_all` wrote. More may come while training runs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: set[Path] = set()
        self.embeddings: dict[str, Tensor] = {}
        self.refresh()

    def refresh(self) -> None:
        """Read the files that are new."""
        for path in sorted(self.folder.glob("*.pt")):
            if path not in self.files:
                self.embeddings.update(torch.load(path, weights_only=True))
                self.files.add(path)

    def __call__(self, text: str) -> Tensor | None:
        """The unit embedding of a text, (768,), or None where the teacher has not read the text."""
        embedding = self.embeddings.get(text)
        return None if embedding is None else embedding.float()


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
def embed_all(texts: Sequence[str], model: Path, folder: Path) -> None:
    """Write the embeddings of all texts that ``folder`` does not hold yet."""
    folder.mkdir(parents=True, exist_ok=True)
    done = Teacher(folder)
    todo = [text for text in texts if done(text) is None]
    tokenizer = AutoTokenizer.from_pretrained(model)
    encoder = AutoModel.from_pretrained(model, dtype=torch.bfloat16).eval()
    for start in range(0, len(todo), PART):
        embeddings: dict[str, Tensor] = {}
        for batch in batches(todo[start : start + PART]):
            inputs = tokenizer(
                batch, padding=True, truncation=True, max_length=MOST_TOKENS, return_tensors="pt"
            )
            hidden = encoder(**inputs).last_hidden_state.float()
            valid = inputs["attention_mask"][..., None]
            pooled = functional.normalize((hidden * valid).sum(1) / valid.sum(1), dim=-1)
            embeddings |= {
                text: row.clone() for text, row in zip(batch, pooled.half(), strict=True)
            }
        path = folder / f"{len(done.files) + start // PART:04d}.pt"
        torch.save(embeddings, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)
        print(f"{min(start + PART, len(todo))} of {len(todo)} texts", flush=True)


def main() -> None:
    """Embed every text of the second stage."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with the training sets")
    parser.add_argument("--teacher", type=Path, required=True, help="folder of all-mpnet-base-v2")
    parser.add_argument("--output", type=Path, required=True, help="folder for the embeddings")
    parser.add_argument("--manuals", type=Path, default=None, help="rows that manuals.py wrote")
    parser.add_argument("--library-docs", type=Path, default=None, help="from library_docs.py")
    options = parser.parse_args()
    pool = Pool(options.data)
    texts = pool.teacher_texts()
    if options.manuals is not None:
        sampler = TechnicalSampler(pool, 0, options.manuals, options.library_docs)
        texts += sampler.teacher_texts()
    embed_all(texts, options.teacher, options.output)


if __name__ == "__main__":
    main()
