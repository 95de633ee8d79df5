"""Time of `mini` and of cross-encoders of MiniLM's shape on a CPU, also with ONNX Runtime in int8.

    pip install -e '.[bench]'
    python -m benchmarks.peers      # writes docs/peers.json
    python -m benchmarks.tables     # writes its table in docs/benchmarks.md

One process for each processor (as it is; limited to AVX-512 with VNNI, as many servers are, and to
AVX2) and number of threads; within a process all systems take turns in random order, with the same
texts. The peers' weights are random: time only. Torch, oneDNN and MKL are limited by their own
settings, ONNX Runtime by `processor.c`, which answers what it asks the processor (needs cc and
objdump); a column for which it never asked is not kept. Columns of the file that were not asked for
(``--processors``, ``--threads``) stay. The floor is what the floating-point operations of a call
without cached prefixes would take at the rate of a large matrix product in float32. Torch counts
the operations, because ONNX Runtime counts none.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PROCESSORS = {"as it is": None, "AVX-512 with VNNI": "avx512vnni", "AVX2": "avx2"}
"""What `processor.c` is asked to leave."""
BASE = "ONNX Runtime, 6 layers, int8"
SHARES = (0.0, 0.5, 0.84, 1.0)
SHAPE = {
    "hidden_size": 384,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "vocab_size": 30522,
}


Score = Callable[[str, Sequence[str]], object]


def cross_encoder(layers: int, dtype: str, tokenizer: Any) -> Score:
    """sentence-transformers' CrossEncoder with random weights."""
    import torch
    from sentence_transformers import CrossEncoder
    from transformers import BertConfig, BertForSequenceClassification

    model = BertForSequenceClassification(
        BertConfig(num_hidden_layers=layers, num_labels=1, **SHAPE)
    )
    with tempfile.TemporaryDirectory() as folder:
        model.to(getattr(torch, dtype)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        ranker = CrossEncoder(folder, device="cpu", max_length=512, model_kwargs={"dtype": dtype})
    return lambda query, documents: ranker.predict(
        [(query, d) for d in documents], show_progress_bar=False
    )


def onnx(
    layers: int, bits: int, tokenizer: Any, threads: int, folder: Path, batch: int = 32
) -> Score:
    """A cross-encoder in ONNX Runtime, with its optimizer and its dynamic quantization.

    Written to the folder by the first process that wants it.
    """
    import onnxruntime

    path = folder / f"{layers}-{bits}.onnx"
    if not path.exists():
        export(layers, bits, path)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"])
    wanted = {given.name for given in session.get_inputs()}

    def score(query: str, documents: Sequence[str]) -> list[float]:
        order = sorted(
            range(len(documents)), key=lambda i: len(documents[i])
        )  # as CrossEncoder and FlashRank do
        found = [0.0] * len(documents)
        for start in range(0, len(order), batch):
            rows = order[start : start + batch]
            texts = tokenizer(
                [query] * len(rows), [documents[i] for i in rows], padding=True, return_tensors="np"
            )
            logits = session.run(None, {name: texts[name] for name in wanted})[0]
            for row, logit in zip(rows, logits, strict=True):
                found[row] = float(logit[0])
        return found

    return score


def export(layers: int, bits: int, path: Path) -> None:
    """Write a cross-encoder with random weights as an ONNX file."""
    import torch
    from onnx import TensorProto
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.transformers.optimizer import optimize_model
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        num_hidden_layers=layers, num_labels=1, attn_implementation="eager", **SHAPE
    )
    names = ["input_ids", "attention_mask", "token_type_ids"]
    example = torch.ones(2, 16, dtype=torch.long)
    plain, fused = (str(path.with_suffix(suffix)) for suffix in (".plain", ".fused"))
    axes = {name: {0: "rows", 1: "tokens"} for name in names}
    model = BertForSequenceClassification(config).eval()
    torch.onnx.export(
        model, (example,) * 3, plain, input_names=names, dynamic_axes=axes, dynamo=False
    )
    optimized = optimize_model(plain, "bert", num_heads=config.num_attention_heads, hidden_size=384)
    optimized.save_model_to_file(fused if bits == 8 else str(path))
    if bits == 8:
        extra = {"DefaultTensorType": TensorProto.FLOAT}  # of what the fused operators return
        quantize_dynamic(
            fused, path, per_channel=True, weight_type=QuantType.QInt8, extra_options=extra
        )


def run(options: argparse.Namespace) -> dict[str, Any]:
    """All systems in this process."""
    import torch

    from rsrank_rag import RSRank

    from .timing import System, machine, matmul_ceiling, measure
    from .workload import QUERY, on_torch, passages

    torch.set_num_threads(options.threads)
    documents, threads = passages(options.documents, options.words), options.threads
    ranker, exact = (
        RSRank.from_pretrained("mini", dtype=dtype, cache_size=4 * 10**9)
        for dtype in ("int8", "float32")
    )
    plain = on_torch(dtype="float32")
    tokenizer: Any = plain.prompts.tokenizer
    (counted,) = measure(
        [System("on torch", lambda: plain.score(QUERY, documents))], turns=0, memory=False
    )
    store = ranker.cache.tiers
    ranker.score(QUERY, documents)
    prefixes = dict(store.on_device.entries)

    def system(name: str, score: Score, prepare: Callable[[], object] = lambda: None) -> System:
        return System(name, lambda: score(QUERY, documents), prepare)

    def cache(share: float) -> Callable[[], None]:
        def prepare() -> None:
            store.clear()
            for key in list(prefixes)[: round(share * len(prefixes))]:
                store.on_device.put(key, prefixes[key])

        return prepare

    with tempfile.TemporaryDirectory() as own:
        folder = options.folder or Path(own)
        systems = [
            *[system(f"mini, {share:.0%} cached", ranker.score, cache(share)) for share in SHARES],
            system("mini in float32, 0% cached", exact.score, exact.cache.tiers.clear),
            system(BASE, onnx(6, 8, tokenizer, threads, folder)),
            system("ONNX Runtime, 12 layers, int8", onnx(12, 8, tokenizer, threads, folder)),
            system("ONNX Runtime, 6 layers, float32", onnx(6, 32, tokenizer, threads, folder)),
            system("CrossEncoder, 6 layers, float32", cross_encoder(6, "float32", tokenizer)),
        ]
        measured = measure(systems, options.turns, memory=False)
    base = next(m for m in measured if m.name == BASE)
    ceiling = matmul_ceiling(torch.device("cpu"), torch.float32)
    rows = [
        {
            "system": m.name,
            "milliseconds": round(1e3 * m.median, 1),
            "of_onnx_int8": round(1 / m.times_faster_than(base), 3),
        }
        for m in measured
    ]
    limited = (
        options.processor == "as it is"
        or ctypes.c_int.in_dll(ctypes.CDLL(None), "processor_answers").value > 0
    )
    return {
        "machine": machine(),
        "onnx_runtime_limited_too": limited,
        "matmul_tflops": round(ceiling / 1e12, 3),
        "floor_milliseconds": round(1e3 * counted.flops / ceiling, 1),
        "rows": rows,
    }


def table(results: Sequence[dict[str, Any]]) -> str:
    """Markdown of times relative to ONNX Runtime in int8 with 6 layers, one column a process."""
    threads = {1: "1 thread", 2: "2 threads"}
    heads = [f"{r['processor']}, {threads.get(r['threads'], r['threads'])}" for r in results]
    machines: dict[str, list[str]] = {}
    for result in results:
        machine = result["machine"].replace(f", {result['threads']} threads", "")
        machines.setdefault(machine, []).append(str(threads.get(result["threads"])))
    where = "".join(
        f"- {', '.join(sorted({*of}))}: {machine}\n" for machine, of in machines.items()
    )
    head = f"`mini` runs on ONNX Runtime, in int8 where no dtype is named.\n\n{where}\n"
    lines = ["| of ONNX int8's time | " + " | ".join(heads) + " |", "|---|" + "--:|" * len(results)]
    of = [{row["system"]: row for row in result["rows"]} for result in results]
    for name in dict.fromkeys(name for column in of for name in column):
        cells = [f"{column[name]['of_onnx_int8']:.2f}" if name in column else "" for column in of]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    own = [f"{column[BASE]['milliseconds']:.0f}" for column in of]
    floors = [f"{result['floor_milliseconds']:.0f}" for result in results]
    lines.append("| ONNX Runtime, 6 layers, int8, in ms | " + " | ".join(own) + " |")
    lines.append("| floor of mini, 0% cached, in ms | " + " | ".join(floors) + " |")
    return head + "\n".join(lines)


def environment(processor: str, threads: int, folder: Path) -> dict[str, str]:
    """Variables that limit a process's libraries to what a processor has."""
    left, library = PROCESSORS[processor], folder / "processor.so"
    found = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    if left is None:
        return found
    if not library.exists():
        source = str(Path(__file__).with_name("processor.c"))
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", str(library), source], check=True)
        asking_us(folder)
    isa, mkl = {"avx512vnni": ("AVX512_CORE_VNNI", "AVX512"), "avx2": ("AVX2", "AVX2")}[left]
    found |= {
        "ATEN_CPU_CAPABILITY": left.removesuffix("vnni"),
        "ONEDNN_MAX_CPU_ISA": isa,
        "MKL_ENABLE_INSTRUCTIONS": mkl,
    }
    path = os.pathsep.join([str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return found | {"PROCESSOR": left, "LD_PRELOAD": str(library), "PYTHONPATH": path}


def asking_us(folder: Path) -> None:
    """Copy ONNX Runtime, with each CPUID (0F A2) replaced by 0F 04, which `processor.c` handles."""
    spec = importlib.util.find_spec("onnxruntime")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    copy = shutil.copytree(spec.submodule_search_locations[0], folder / "onnxruntime")
    (library,) = copy.glob("capi/onnxruntime_pybind11_state*.so")
    head = subprocess.run(
        ["objdump", "-h", "-j", ".text", library], check=True, stdout=subprocess.PIPE, text=True
    )
    address, offset = re.findall(r"\.text +\w+ +(\w+) +\w+ +(\w+)", head.stdout)[0]
    moved = int(offset, 16) - int(address, 16)
    code = bytearray(library.read_bytes())
    command = ["objdump", "-d", "-j", ".text", "--no-show-raw-insn", library]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as listing:
        assert listing.stdout is not None
        for line in listing.stdout:
            if line.endswith("cpuid\n"):
                place = int(line.partition(":")[0], 16) + moved
                assert code[place : place + 2] == b"\x0f\xa2", "not what objdump read"
                code[place + 1] = 0x04
    library.write_bytes(code)


def main() -> None:
    """Start a process for each processor and number of threads, or be one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--documents", type=int, default=100)
    parser.add_argument("--words", type=int, default=100)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--processors", choices=PROCESSORS, nargs="+", default=list(PROCESSORS))
    parser.add_argument("--print", action="store_true", help="write nothing")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--processor", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.processor:
        options.threads = options.threads[0]
        print(json.dumps(run(options)))
        return
    file = ROOT / "docs/peers.json"
    with tempfile.TemporaryDirectory() as folder:
        for processor in options.processors:
            for threads in options.threads:
                command = [
                    sys.executable,
                    "-W",
                    "ignore",
                    "-m",
                    "benchmarks.peers",
                    "--processor",
                    processor,
                ]
                command += [
                    f"--{name}={getattr(options, name)}" for name in ("documents", "words", "turns")
                ]
                command += ["--folder", folder, "--threads", str(threads)]
                variables = environment(processor, threads, Path(folder))
                done = subprocess.run(
                    command, env=variables, check=True, stdout=subprocess.PIPE, text=True
                )
                found = {
                    "processor": processor,
                    "threads": threads,
                    **json.loads(done.stdout.splitlines()[-1]),
                }
                print(table([found]), end="\n\n", flush=True)
                if not found["onnx_runtime_limited_too"]:
                    print("Not kept: ONNX Runtime never asked for the processor.\n")
                elif not options.print:
                    others = [
                        c for c in json.loads(file.read_text("utf-8")) if place(c) != place(found)
                    ]
                    file.write_text(
                        json.dumps(sorted([found, *others], key=place), indent=1) + "\n",
                        encoding="utf-8",
                    )


def place(column: dict[str, Any]) -> tuple[int, int]:
    """Where a column stands in the table: by processor and threads."""
    return list(PROCESSORS).index(column["processor"]), column["threads"]


if __name__ == "__main__":
    main()
