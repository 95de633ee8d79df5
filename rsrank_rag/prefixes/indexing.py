"""Documents read ahead of time, onto the disk."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from ..errors import InputError
from ..method.backbone import Backbone
from ..method.batching import Batches, Ids
from ..method.template import PromptTokenizer
from .store import PrefixStore


class Indexer:
    """Writes prefixes of whole corpora; InputError if nothing is kept on disk."""

    def __init__(self, store: PrefixStore | None, core: Backbone, prompts: PromptTokenizer) -> None:
        if store is None or store.disk is None:
            raise InputError("There is no folder to keep prefixes in. Load the model with prefix_cache=FOLDER.")
        self.store, self.core, self.prompts = store, core, prompts

    def waiting(self, documents: Sequence[str], *, whole: bool = False) -> dict[Ids, int]:
        """Documents that are not on disk, if need be as ``whole`` files, and where each first stands."""
        first: dict[Ids, int] = {}
        for position, prompt in enumerate(self.prompts.documents(documents, 0)):
            if not prompt.empty and not self.store.is_on_disk(prompt.ids, whole=whole):
                first.setdefault(prompt.ids, position)
        return first

    def disk_bytes(self, documents: Collection[Ids]) -> int:
        """What the files of documents will take: 8 bits, a scale for each token and head, and what is pooled."""
        core = self.core
        token = 2 * (core.last_layer - core.fusion_layer) * core.num_heads * (core.head_dim + 2)
        pooled = 4 * core.config.hidden_size if core.fusion_layer else 0
        return sum(map(len, documents)) * token + len(documents) * pooled

    @torch.inference_mode()
    def write(self, documents: Mapping[Ids, int], budget: int, done: Callable[[int], object]) -> None:
        """Run documents in batches of so many padded tokens, and write them; see `RSRank.index` for what may fail."""
        batches = Batches(documents, budget)
        with self.store.writing(len(documents), self.disk_bytes(documents)):
            for batch in batches:
                with batches.attempt():
                    self.store.write(batch, self.core.prefill)
                    done(len(batch))
