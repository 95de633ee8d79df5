# ruff: noqa: E402, T201, PT017 - it runs without pytest, and print is the answer
"""What README and docs show for `mini`, in an environment without torch.

Prints, as JSON, the scores of a query's texts that each way gives; the rest is checked here.
"""

import json
import re
import socket
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

for name in ("torch", "transformers", "accelerate", "onnx"):
    assert find_spec(name) is None, f"{name} is installed"

from langchain_core.documents import Document

from rsrank_rag import RSRank
from rsrank_rag.errors import InputError, pip_install
from rsrank_rag.langchain import RSRankCompressor
from rsrank_rag.remote.client import RemoteReranker

query, texts = sys.argv[2], sys.argv[3:]
root = Path(sys.argv[1])
rsrank = Path(sys.executable).with_name("rsrank")


def run(*arguments):
    """The output of a command, which must succeed."""
    done = subprocess.run([rsrank, *arguments], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
    return done.stdout


readme = (root / "README.md").read_text(encoding="utf-8")
for block in re.findall(r"^```python\n(.*?)^```", readme, flags=re.MULTILINE | re.DOTALL):
    exec(compile(block, "README.md", "exec"), {"__name__": "__docs__"})

ranker = RSRank.from_pretrained()
scores = [ranker.score(query, texts)]
compressor = RSRankCompressor(threshold=None)
compressed = compressor.compress_documents([Document(text) for text in texts], query)
by_text = {document.page_content: document.metadata["relevance_score"] for document in compressed}
scores.append([by_text[text] for text in texts])
assert abs(ranker.explain(query, texts[0]).score - scores[0][0]) < 1e-6
long = " ".join(texts * 40)
assert ranker.rank(query, [long], extract="sentences").kept[0].excerpts

with tempfile.TemporaryDirectory() as folder:
    documents = Path(folder, "texts.txt")
    documents.write_text("\n".join(texts), encoding="utf-8")
    prefixes = str(Path(folder, "prefixes"))
    run("index", "--documents", str(documents), "--cache-folder", prefixes)
    scores.append(RSRank.from_pretrained(cache_folder=prefixes).score(query, texts))
    run("rank", "--query", query, "--documents", str(documents))
    run("explain", "--query", query, "--document", texts[0])
    assert "Backbone: `./backbone`" in run("info", "mini")
    pairs = [json.dumps({"query": query, "document": text}) for text in texts]
    source = Path(folder, "pairs.jsonl")
    source.write_text("\n".join(pairs), encoding="utf-8")
    run("score", "--input", str(source), "--output", str(Path(folder, "out.jsonl")))

with tempfile.TemporaryDirectory() as folder:
    labelled = ("--data", "examples/labelled.jsonl")
    assert json.loads(run("evaluate", *labelled, "-m", "mini", "-m", "bm25", "--json"))
    run("tune", *labelled, "--output", str(Path(folder, "tuned")), "--recall", "0.5", "--force")

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = str(free.getsockname()[1])
service = subprocess.Popen([rsrank, "serve", "--model", "mini", "--port", port])
try:
    remote = RemoteReranker(f"http://127.0.0.1:{port}", max_retries=60)
    scores.append(remote.score(query, texts))
finally:
    service.terminate()
    service.wait(60)

with tempfile.TemporaryDirectory() as folder:
    ranker.save_pretrained(folder, include_backbone=True)
    scores.append(RSRank.from_pretrained(folder, cache_size=0).score(query, texts))

try:
    RSRank.from_pretrained(backbone=ranker.config.backbone.name, dtype="float16")
except InputError as error:
    assert pip_install("lm") in str(error)
else:
    raise AssertionError("torch was not missed")
training = subprocess.run(
    [rsrank, "train", "--config", "mini", "--data", "examples/labelled.jsonl", "--output", "x"],
    capture_output=True,
    text=True,
    cwd=root,
)
assert training.returncode == 1
assert pip_install("train") in training.stderr, training.stderr
print(json.dumps(scores))
