"""`mini` beside what people run on a CPU instead: cross-encoders of MiniLM's shape, also through ONNX Runtime in int8.

    pip install -e '.[bench]'
    python -m benchmarks.peers --json docs/peers.json

One process for each processor (as it is; limited to AVX2) and number of threads; within a process all systems take
turns in random order, with the same texts. The peers' weights are random: time only. The limit holds for torch; ONNX
Runtime knows no such switch and always uses all that the processor has. The floor is what the floating-point operations
of a call would take at the rate of a large matrix product in the same dtype.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

PROCESSORS = {
    "all of it": {},
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
}
"""Environment that limits torch and oneDNN."""
BASE = "ONNX Runtime, 6 layers, int8"
SHARES = (0.0, 0.5, 0.84, 1.0)
SHAPE = {"hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536, "vocab_size": 30522}


Score = Callable[[str, Sequence[str]], object]


def cross_encoder(layers: int, dtype: str, tokenizer: Any) -> Score:
    """sentence-transformers' CrossEncoder with random weights."""
    import torch
    from sentence_transformers import CrossEncoder
    from transformers import BertConfig, BertForSequenceClassification

    model = BertForSequenceClassification(BertConfig(num_hidden_layers=layers, num_labels=1, **SHAPE))
    with tempfile.TemporaryDirectory() as folder:
        model.to(getattr(torch, dtype)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        ranker = CrossEncoder(folder, device="cpu", max_length=512, model_kwargs={"dtype": dtype})
    return lambda query, documents: ranker.predict([(query, d) for d in documents], show_progress_bar=False)


def onnx(
    layers: int, bits: int, tokenizer: Any, threads: int, batch: int = 32
) -> Callable[[str, Sequence[str]], object]:
    """A cross-encoder through ONNX Runtime: fused by its optimizer, quantized by its dynamic quantization."""
    import onnxruntime
    import torch
    from onnx import TensorProto
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.transformers.optimizer import optimize_model
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(num_hidden_layers=layers, num_labels=1, attn_implementation="eager", **SHAPE)
    names = ["input_ids", "attention_mask", "token_type_ids"]
    example = torch.ones(2, 16, dtype=torch.long)
    with tempfile.TemporaryDirectory() as folder:
        plain, fused, small = (str(Path(folder) / f"{name}.onnx") for name in ("plain", "fused", "small"))
        axes = {name: {0: "rows", 1: "tokens"} for name in names}
        model = BertForSequenceClassification(config).eval()
        torch.onnx.export(model, (example,) * 3, plain, input_names=names, dynamic_axes=axes, dynamo=False)
        optimize_model(plain, "bert", num_heads=config.num_attention_heads, hidden_size=384).save_model_to_file(fused)
        if bits == 8:
            extra = {"DefaultTensorType": TensorProto.FLOAT}  # of what the fused operators return
            quantize_dynamic(fused, small, per_channel=True, weight_type=QuantType.QInt8, extra_options=extra)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        session = onnxruntime.InferenceSession(small if bits == 8 else fused, options, ["CPUExecutionProvider"])
    wanted = {given.name for given in session.get_inputs()}

    def score(query: str, documents: Sequence[str]) -> list[float]:
        order = sorted(range(len(documents)), key=lambda i: len(documents[i]))  # as CrossEncoder and FlashRank do
        found = [0.0] * len(documents)
        for start in range(0, len(order), batch):
            rows = order[start : start + batch]
            texts = tokenizer([query] * len(rows), [documents[i] for i in rows], padding=True, return_tensors="np")
            logits = session.run(None, {name: texts[name] for name in wanted})[0]
            for row, logit in zip(rows, logits, strict=True):
                found[row] = float(logit[0])
        return found

    return score


def run(options: argparse.Namespace) -> dict[str, Any]:
    """All systems in this process."""
    import torch

    from rsrank_rag import RSRank

    from .timing import System, machine, matmul_ceiling, measure
    from .workload import QUERY, keep_share, passages

    torch.set_num_threads(options.threads)
    ranker = RSRank.from_pretrained("mini", prefix_cache=4 * 10**9)
    tokenizer, documents = ranker.prompts.tokenizer, passages(options.documents, options.words)
    dtype = str(ranker.backbone.dtype).removeprefix("torch.")

    def system(name: str, score: Score) -> System:
        return System(name, lambda: score(QUERY, documents))

    peers = [
        system(BASE, onnx(6, 8, tokenizer, options.threads)),
        system("ONNX Runtime, 12 layers, int8", onnx(12, 8, tokenizer, options.threads)),
        system("ONNX Runtime, 6 layers, float32", onnx(6, 32, tokenizer, options.threads)),
        system("CrossEncoder, 6 layers, bfloat16", cross_encoder(6, "bfloat16", tokenizer)),
        system("CrossEncoder, 6 layers, float32", cross_encoder(6, "float32", tokenizer)),
    ]
    ours = [
        System(
            f"mini, {share:.0%} kept",
            lambda: ranker.score(QUERY, documents),
            partial(keep_share, ranker, documents, share),
        )
        for share in SHARES
    ]
    found = measure([*ours, *peers], options.turns)
    base, cold = (next(m for m in found if m.name == name) for name in (BASE, "mini, 0% kept"))
    ceiling = matmul_ceiling(torch.device("cpu"), ranker.backbone.dtype)
    rows = [
        {
            "system": m.name,
            "milliseconds": round(1e3 * m.median, 1),
            "of_onnx_int8": round(1 / m.times_faster_than(base), 3),
            "of_mini_cold": round(1 / m.times_faster_than(cold), 3),
            "floor_milliseconds": round(1e3 * m.flops / ceiling, 1) if m.name.startswith("mini") else None,
        }
        for m in found
    ]
    return {"machine": machine(), "dtype": dtype, "matmul_tflops": round(ceiling / 1e12, 3), "rows": rows}


def table(result: dict[str, Any]) -> str:
    """One process's result, in Markdown."""
    head = (
        f"{result['processor']}, {result['threads']} thread{'s' * (result['threads'] > 1)}, mini in {result['dtype']}"
    )
    lines = [f"| {head} | ms | of ONNX int8 | of mini cold | floor, ms |", "|---|--:|--:|--:|--:|"]
    for row in result["rows"]:
        floor = "" if row["floor_milliseconds"] is None else f"{row['floor_milliseconds']:.0f}"
        times = f"{row['milliseconds']:.0f} | {row['of_onnx_int8']:.2f} | {row['of_mini_cold']:.2f}"
        lines.append(f"| {row['system']} | {times} | {floor} |")
    return "\n".join(lines)


def main() -> None:
    """Start a process for each processor and number of threads, or be one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=100)
    parser.add_argument("--words", type=int, default=100)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--processors", choices=PROCESSORS, nargs="+", default=list(PROCESSORS))
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        options.threads = options.threads[0]
        print(json.dumps(run(options)))
        return
    results = []
    for processor in options.processors:
        for threads in options.threads:
            command = [sys.executable, "-W", "ignore", "-m", "benchmarks.peers", "--here", "--threads", str(threads)]
            command += [f"--{name}={getattr(options, name)}" for name in ("documents", "words", "turns")]
            environment = {**os.environ, **PROCESSORS[processor], "OMP_NUM_THREADS": str(threads)}
            done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
            results.append({"processor": processor, "threads": threads, **json.loads(done.stdout.splitlines()[-1])})
            print(table(results[-1]), end="\n\n", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
