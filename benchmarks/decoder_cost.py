"""What a decoder costs: 20 documents of about 130 tokens, new and with cached prefixes.

    python -m benchmarks.decoder_cost --model qwen2.5-coder-0.5b --backbone FOLDER \
        --output docs/decoder-cost.json

The floor is the time of the real tokens' linear maps at the speed of a large matrix product. The
script starts one process for each number of threads.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from research import markdown
from rsrank_rag import RSRank
from rsrank_rag.backends.options import ModelSource
from rsrank_rag.backends.torch.backbone import Backbone
from rsrank_rag.method.batches import Batches
from rsrank_rag.method.prefix import padded_length

from .timing import System, machine, matmul_ceiling, measure
from .workload import QUERY, passages

DOCUMENTS = 20
WORDS = 122
"""Words of a document: about 130 tokens with the template."""

NAMES = {"new": "new", "memory": "cached in memory", "disk": "cached on disk"}


def figures(model: str, backbone: str | None, turns: int) -> dict[str, Any]:
    """Seconds, share of the floor, padding, memory and bytes on disk."""
    documents = passages(DOCUMENTS, WORDS, 0.3)
    with tempfile.TemporaryDirectory() as folder:
        new = RSRank.from_pretrained(model, backbone=backbone, cache_size=0)
        parts = (new.backbone, new.prompts, new.projection, new.config)
        memory = RSRank(*parts, ModelSource(cache_size="4GB"))
        memory.score(QUERY, documents)
        RSRank(*parts, ModelSource(cache_folder=folder)).score(QUERY, documents)
        opened: list[RSRank] = []

        def reopen() -> None:
            # A new object has no prefix in memory.
            opened[:] = [RSRank(*parts, ModelSource(cache_folder=folder))]

        systems = [
            System("new", lambda: new.score(QUERY, documents)),
            System("memory", lambda: memory.score(QUERY, documents)),
            System("disk", lambda: opened[0].score(QUERY, documents), reopen),
        ]
        measured = measure(systems, turns)
        on_disk = sum(path.stat().st_size for path in Path(folder).rglob("*.prefix"))
    core = new.backbone
    assert isinstance(core, Backbone)
    lengths = [len(prompt.ids) for prompt in new.prompts.documents(documents, 0)]
    rows = (DOCUMENTS + 1) * len(new.prompts.query(QUERY).ids)
    per_token = 2 * _linear_numbers(core.model) / core.loaded_layers * core.last_layer
    ceiling = matmul_ceiling(core.device, core.dtype)
    result: dict[str, Any] = {
        "tokens": sum(lengths),
        "bytes_on_disk": on_disk // DOCUMENTS,
        "weights": sum(numbers.nbytes for numbers in core.model.parameters()),
        "padding": padding(new, documents),
        "tflops": ceiling / 1e12,
        "rows": {},
    }
    for system in measured:
        tokens = rows
        if system.name == "new":
            tokens += sum(lengths)
        result["rows"][system.name] = {
            "seconds": system.median,
            "floor": per_token * tokens / ceiling,
            "peak_bytes": system.peak,
        }
    return result


def padding(ranker: RSRank, documents: Sequence[str]) -> float:
    """The share of padding among the tokens of the documents' batches."""
    ids = [prompt.ids for prompt in ranker.prompts.documents(documents, 0)]
    slots = padded_length(len(ranker.prompts.query(QUERY).ids))
    batches = Batches(ids, ranker.token_budget, extra=slots)
    padded = 0
    for batch in batches:
        with batches.attempt():
            padded += len(batch) * max(map(len, batch))
    return 1 - sum(map(len, ids)) / padded


def _linear_numbers(model: nn.Module) -> int:
    """Numbers in linear maps, which run for each token."""
    total = 0
    for module in model.modules():
        if isinstance(module, nn.Linear):
            total += module.weight.numel()
    return total


def table(recorded: dict[str, Any]) -> str:
    """The figures as Markdown."""
    rows = []
    for model, by_threads in recorded["models"].items():
        for threads, result in by_threads.items():
            for name, row in result["rows"].items():
                cells = [f"`{model}`", threads, NAMES[name], f"{row['seconds']:.2f}"]
                cells.append(f"{row['seconds'] / row['floor']:.1f}")
                rows.append(cells)
    head = ["model", "threads", "documents", "seconds", "times the floor"]
    return markdown.table(head, rows, texts=3)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure one model with each number of threads, and write the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--backbone", help="folder of the language model")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--output", type=Path, help="JSON; figures of other models stay in it")
    parser.add_argument("--here", action="store_true", help="measure in this process, and print")
    options = parser.parse_args(arguments)
    if options.here:
        torch.set_num_threads(options.threads[0])
        print(json.dumps(figures(options.model, options.backbone, options.turns)))
        return
    results = {}
    for threads in options.threads:
        command = [sys.executable, "-m", "benchmarks.decoder_cost", "--here"]
        command += ["--model", options.model, "--threads", str(threads)]
        command += ["--turns", str(options.turns)]
        if options.backbone:
            command += ["--backbone", options.backbone]
        process = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        results[str(threads)] = json.loads(process.stdout.splitlines()[-1])
    recorded: dict[str, Any] = {"machine": machine(), "models": {}}
    if options.output and options.output.exists():
        recorded["models"] = json.loads(options.output.read_text(encoding="utf-8"))["models"]
    recorded["models"][options.model] = results
    print(table(recorded))
    if options.output:
        text = json.dumps(recorded, indent=1) + "\n"
        options.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
