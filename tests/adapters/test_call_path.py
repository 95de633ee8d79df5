"""The way from a framework's call to the model: few files, few frames, one hop to the thread."""

import sys
import threading
from pathlib import Path

import pytest
from conftest import DOCUMENTS, QUERY

import rsrank_rag

pytest.importorskip("langchain_core")
pytest.importorskip("llama_index.core")

from langchain_core.documents import Document
from llama_index.core.schema import NodeWithScore, TextNode

from rsrank_rag.langchain import RSRankCompressor
from rsrank_rag.llama_index import RSRankPostprocessor

PACKAGE = Path(rsrank_rag.__file__).parent
COMPUTATION = ("method", "language_model", "prefixes")
"""Folders that compute scores; the rest of the package leads to them."""

FILES = 10
FRAMES = 8
FRAMES_WITH_COMPUTATION = 12
LANGCHAIN_CALLS = 60


class CallPath:
    """Counts this package's files and the frames on the stack, in all threads begun after it."""

    def __init__(self, framework):
        self.framework = framework
        self.counting = False
        self.files, self.frames, self.frames_with_computation = set(), 0, 0
        self.framework_calls = 0

    def __call__(self, frame, event, argument):
        if not self.counting or event != "call":
            return
        self.framework_calls += self.framework in Path(frame.f_code.co_filename).parts
        if self.part(frame) is None:
            return
        parts = []
        while frame is not None:
            parts.append(self.part(frame))
            frame = frame.f_back
        own = [part for part in parts if part is not None]
        outside = [part for part in own if part.parts[0] not in COMPUTATION]
        self.files.update(outside)
        self.frames = max(self.frames, len(outside))
        self.frames_with_computation = max(self.frames_with_computation, len(own))

    def part(self, frame):
        path = Path(frame.f_code.co_filename)
        return path.relative_to(PACKAGE) if path.is_relative_to(PACKAGE) else None


def compress(made):
    return made.compress_documents([Document(text) for text in DOCUMENTS], QUERY)


def postprocess(made):
    nodes = [NodeWithScore(node=TextNode(text=text)) for text in DOCUMENTS]
    return made.postprocess_nodes(nodes, query_str=QUERY)


@pytest.mark.parametrize(
    ("adapter", "call", "framework", "max_length"),
    [
        (RSRankCompressor, compress, "langchain_core", 500),
        (RSRankPostprocessor, postprocess, "llama_index", 501),
    ],
)
def test_a_call_passes_few_files_and_frames_on_its_way_to_the_model(
    adapter, call, framework, max_length
):
    # A length that no other test uses, so that the model's thread begins here.
    made = adapter(model="mini", max_length=max_length, prefix_cache=False)
    path = CallPath(framework)
    before = sys.getprofile()
    threading.setprofile(path)
    try:
        made.warm_up()
        call(made)
        path.counting = True
        sys.setprofile(path)
        assert call(made)
    finally:
        path.counting = False
        sys.setprofile(before)
        threading.setprofile(None)
        made.close()
    assert {part.as_posix() for part in path.files} > {"adapters/worker.py", "rsrank.py"}
    assert len(path.files) <= FILES
    assert path.frames <= FRAMES
    assert path.frames_with_computation <= FRAMES_WITH_COMPUTATION
    if framework == "langchain_core":
        assert path.framework_calls <= LANGCHAIN_CALLS
