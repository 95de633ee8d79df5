"""Time of `mini` and of cross-encoders of MiniLM's shape on a CPU, also with ONNX Runtime in int8.

    pip install -e '.[bench]'
    python -m benchmarks.peers      # writes docs/peers.json
    python -m benchmarks.tables     # writes its table in docs/benchmarks.md

The script starts one process for each number of threads and each processor: as it is, limited to
AVX-512 with VNNI as many servers are, and limited to AVX2. Within a process all systems take turns
in random order, with the same texts. The peers have random weights, so only their time means
something. Torch, oneDNN and MKL are limited by their own settings. ONNX Runtime is limited by
`processor.c`, which answers ONNX Runtime's questions about the processor (needs cc and objdump). A
column in which ONNX Runtime asked no such question is not written. Columns of other processors or
other numbers of threads (``--processors``, ``--threads``) stay in the file. The floor is the time
that the floating-point operations of a call without cached prefixes would take at the rate of a
large matrix product in float32. Torch counts the operations, because ONNX Runtime counts none.
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

from research import markdown

ROOT = Path(__file__).parents[1]
PROCESSORS = {"as it is": None, "AVX-512 with VNNI": "avx512vnni", "AVX2": "avx2"}
"""The instructions that `processor.c` leaves to a processor; None for all."""
LIMITS = {
    "avx512vnni": {
        "ATEN_CPU_CAPABILITY": "avx512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
    },
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
}
"""Variables that limit torch, oneDNN and MKL to these instructions."""
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

    def score(query: str, documents: Sequence[str]) -> object:
        pairs = [(query, document) for document in documents]
        return ranker.predict(pairs, show_progress_bar=False)

    return score


def onnx(
    layers: int, bits: int, tokenizer: Any, threads: int, folder: Path, batch: int = 32
) -> Score:
    """A cross-encoder in ONNX Runtime, with its optimizer and its dynamic quantization.

    The first process that needs the model writes it to the folder.
    """
    import onnxruntime

    path = folder / f"{layers}-{bits}.onnx"
    if not path.exists():
        export(layers, bits, path)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"])
    names = [model_input.name for model_input in session.get_inputs()]

    def score(query: str, documents: Sequence[str]) -> list[float]:
        # CrossEncoder and FlashRank sort by length, too.
        order = sorted(range(len(documents)), key=lambda i: len(documents[i]))
        scores = [0.0] * len(documents)
        for start in range(0, len(order), batch):
            rows = order[start : start + batch]
            texts = [documents[i] for i in rows]
            tokens = tokenizer([query] * len(rows), texts, padding=True, return_tensors="np")
            logits = session.run(None, {name: tokens[name] for name in names})[0]
            for row, logit in zip(rows, logits, strict=True):
                scores[row] = float(logit[0])
        return scores

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
    plain = str(path.with_suffix(".plain"))
    fused = str(path.with_suffix(".fused"))
    axes = {name: {0: "rows", 1: "tokens"} for name in names}
    model = BertForSequenceClassification(config).eval()
    torch.onnx.export(
        model, (example,) * 3, plain, input_names=names, dynamic_axes=axes, dynamo=False
    )
    optimized = optimize_model(plain, "bert", num_heads=config.num_attention_heads, hidden_size=384)
    optimized.save_model_to_file(fused if bits == 8 else str(path))
    if bits == 8:
        # The type of what the fused operators return.
        extra = {"DefaultTensorType": TensorProto.FLOAT}
        quantize_dynamic(
            fused, path, per_channel=True, weight_type=QuantType.QInt8, extra_options=extra
        )


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all systems in this process: the figures of one column."""
    import torch

    from rsrank_rag import RSRank

    from .timing import System, machine, matmul_ceiling, measure
    from .workload import QUERY, on_torch, passages

    torch.set_num_threads(options.threads)
    documents = passages(options.documents, options.words)
    threads = options.threads
    ranker = RSRank.from_pretrained("mini", dtype="int8", cache_size=4 * 10**9)
    exact = RSRank.from_pretrained("mini", dtype="float32", cache_size=4 * 10**9)
    plain = on_torch(dtype="float32")
    tokenizer: Any = plain.prompts.tokenizer
    (counted,) = measure(
        [System("on torch", lambda: plain.score(QUERY, documents))], turns=0, memory=False
    )
    store = ranker.cache.tiers
    ranker.score(QUERY, documents)
    prefixes = dict(store.in_memory)

    def system(name: str, score: Score, prepare: Callable[[], object] = lambda: None) -> System:
        return System(name, lambda: score(QUERY, documents), prepare)

    def cache(share: float) -> Callable[[], None]:
        def prepare() -> None:
            store.clear()
            for key in list(prefixes)[: round(share * len(prefixes))]:
                store.add(key, prefixes[key])

        return prepare

    with tempfile.TemporaryDirectory() as own:
        folder = options.folder or Path(own)
        systems = []
        for share in SHARES:
            systems.append(system(f"mini, {share:.0%} cached", ranker.score, cache(share)))
        systems += [
            system("mini in float32, 0% cached", exact.score, exact.cache.tiers.clear),
            system(BASE, onnx(6, 8, tokenizer, threads, folder)),
            system("ONNX Runtime, 12 layers, int8", onnx(12, 8, tokenizer, threads, folder)),
            system("ONNX Runtime, 6 layers, float32", onnx(6, 32, tokenizer, threads, folder)),
            system("CrossEncoder, 6 layers, float32", cross_encoder(6, "float32", tokenizer)),
        ]
        measured = measure(systems, options.turns, memory=False)
    base = {result.name: result for result in measured}[BASE]
    ceiling = matmul_ceiling(torch.device("cpu"), torch.float32)
    rows = []
    for result in measured:
        rows.append(
            {
                "system": result.name,
                "milliseconds": round(1e3 * result.median, 1),
                "of_onnx_int8": round(1 / result.times_faster_than(base), 3),
            }
        )
    limited = True
    if options.processor != "as it is":
        limited = ctypes.c_int.in_dll(ctypes.CDLL(None), "processor_answers").value > 0
    return {
        "machine": machine(),
        "onnx_runtime_limited_too": limited,
        "matmul_tflops": round(ceiling / 1e12, 3),
        "floor_milliseconds": round(1e3 * counted.flops / ceiling, 1),
        "rows": rows,
    }


def table(results: Sequence[dict[str, Any]]) -> str:
    """Markdown of times relative to ONNX Runtime in int8 with 6 layers, one column a process."""
    names = {1: "1 thread", 2: "2 threads"}
    heads = []
    machines: dict[str, set[str]] = {}
    columns = []
    systems: dict[str, None] = {}
    for result in results:
        threads = result["threads"]
        heads.append(f"{result['processor']}, {names.get(threads, threads)}")
        machine = result["machine"].replace(f", {threads} threads", "")
        machines.setdefault(machine, set()).add(str(names.get(threads)))
        column = {row["system"]: row for row in result["rows"]}
        columns.append(column)
        systems |= dict.fromkeys(column)
    head = "`mini` runs on ONNX Runtime, in int8 where no dtype is named.\n\n"
    for machine, labels in machines.items():
        head += f"- {', '.join(sorted(labels))}: {machine}\n"
    rows = []
    for system in systems:
        cells = [system]
        for column in columns:
            cells.append(f"{column[system]['of_onnx_int8']:.2f}" if system in column else "")
        rows.append(cells)
    times = ["ONNX Runtime, 6 layers, int8, in ms"]
    times += [f"{column[BASE]['milliseconds']:.0f}" for column in columns]
    floors = ["floor of mini, 0% cached, in ms"]
    floors += [f"{result['floor_milliseconds']:.0f}" for result in results]
    return head + "\n" + markdown.table(["of ONNX int8's time", *heads], [*rows, times, floors])


def environment(processor: str, threads: int, folder: Path) -> dict[str, str]:
    """Variables that limit a process's libraries to what a processor has."""
    instructions = PROCESSORS[processor]
    variables = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    if instructions is None:
        return variables
    library = folder / "processor.so"
    if not library.exists():
        source = str(Path(__file__).with_name("processor.c"))
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", str(library), source], check=True)
        copy_onnx_runtime(folder)
    path = [str(folder), str(ROOT)]
    if os.environ.get("PYTHONPATH"):
        path.append(os.environ["PYTHONPATH"])
    variables |= LIMITS[instructions]
    variables |= {
        "PROCESSOR": instructions,
        "LD_PRELOAD": str(library),
        "PYTHONPATH": os.pathsep.join(path),
    }
    return variables


def copy_onnx_runtime(folder: Path) -> None:
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
    with tempfile.TemporaryDirectory() as folder:
        for processor in options.processors:
            for threads in options.threads:
                column = measure_column(options, processor, threads, Path(folder))
                print(table([column]), end="\n\n", flush=True)
                if not column["onnx_runtime_limited_too"]:
                    print("Not kept: ONNX Runtime never asked for the processor.\n")
                elif not options.print:
                    write_column(column, ROOT / "docs/peers.json")


def measure_column(
    options: argparse.Namespace, processor: str, threads: int, folder: Path
) -> dict[str, Any]:
    """Measure all systems in a process with this processor and number of threads."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.peers", "--processor", processor]
    for name in ("documents", "words", "turns"):
        command.append(f"--{name}={getattr(options, name)}")
    command += ["--folder", str(folder), "--threads", str(threads)]
    variables = environment(processor, threads, folder)
    process = subprocess.run(command, env=variables, check=True, stdout=subprocess.PIPE, text=True)
    figures = json.loads(process.stdout.splitlines()[-1])
    return {"processor": processor, "threads": threads, **figures}


def write_column(column: dict[str, Any], file: Path) -> None:
    """Write a column to the file. It replaces the one of the same processor and threads."""
    columns = [column]
    for other in json.loads(file.read_text("utf-8")):
        if place(other) != place(column):
            columns.append(other)
    file.write_text(json.dumps(sorted(columns, key=place), indent=1) + "\n", encoding="utf-8")


def place(column: dict[str, Any]) -> tuple[int, int]:
    """Where a column stands in the table: by processor and threads."""
    return list(PROCESSORS).index(column["processor"]), column["threads"]


if __name__ == "__main__":
    main()
