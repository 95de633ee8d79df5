"""The middleware in LangChain's own agents, which a scripted model drives."""

import pytest

pytest.importorskip("langchain.agents.middleware")

from langchain.agents import create_agent
from langchain_core.documents import Document
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.tools import tool

from rsrank_rag import Fallback, Reranker
from rsrank_rag.langchain import RSRankCompressor, create_rsrank_middleware

TEXTS = ["-4 four", "1 one", "3 three"]


class Numbers(Reranker):
    def score(self, query, documents):
        assert query == "how many?"
        return [float(text.split()[0]) for text in documents]


class Scripted(GenericFakeChatModel):
    def bind_tools(self, tools, **kwargs):
        return self


@tool(response_format="content_and_artifact")
def search(query: str):
    """Look something up."""
    return "\n\n".join(TEXTS), [Document(text, id=text[-1]) for text in TEXTS]


@tool
def plain(query: str) -> str:
    """Look something up, as text alone."""
    return "\n\n".join(TEXTS)


@tool
def fails(query: str) -> str:
    """Fail."""
    raise ValueError("the index is gone")


async def answer(
    used, asynchronous, query="how many?", threshold="native", fallback="native", **options
):
    """The message of a tool in an agent that calls it once."""
    call = {"name": used.name, "args": {"query": query}, "id": "1", "type": "tool_call"}
    model = Scripted(messages=iter([AIMessage("", tool_calls=[call]), AIMessage("Done.")]))
    compressor = RSRankCompressor(model=Numbers(), threshold=threshold, fallback=fallback)
    middleware = create_rsrank_middleware(compressor, **options)
    agent = create_agent(model, [search, plain, fails], middleware=[middleware])
    question = {"messages": [("user", "Tell me.")]}
    found = await agent.ainvoke(question) if asynchronous else agent.invoke(question)
    assert found["messages"][-1].text == "Done."
    (message,) = [one for one in found["messages"] if isinstance(one, ToolMessage)]
    return message


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_what_a_retrieval_tool_returns_is_pruned_for_its_query(asynchronous):
    message = await answer(search, asynchronous)
    assert message.content == "3 three\n\n1 one"
    scores = [document.metadata["relevance_score"] for document in message.artifact]
    assert scores == [3.0, 1.0]
    message = await answer(search, asynchronous, threshold=5.0)
    assert (message.content, message.artifact) == ("No passage scored above the threshold.", [])
    message = await answer(search, asynchronous, threshold=5.0, nothing_relevant="Nothing.")
    assert message.content == "Nothing."


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_an_agent_reads_that_nothing_scored_above_the_threshold(asynchronous):
    message = await answer(search, asynchronous, threshold=5.0, fallback=Fallback(1, 4))
    assert message.content == (
        "Nothing scored above the threshold. The nearest passages:\n\n3 three"
    )
    assert message.artifact[0].metadata["rsrank_weak"]


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_text_is_pruned_only_of_tools_that_are_named(asynchronous):
    assert (await answer(plain, asynchronous)).content == "\n\n".join(TEXTS)
    named = await answer(plain, asynchronous, tools=["plain"])
    assert named.content == "3 three\n\n1 one"
    other = await answer(search, asynchronous, query_key="question")
    assert other.content == "\n\n".join(TEXTS)


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_the_answer_to_a_blank_query_reaches_the_agent_as_it_is(asynchronous):
    message = await answer(search, asynchronous, query=" ")
    assert message.content == "\n\n".join(TEXTS)


async def test_a_tools_error_reaches_the_agent_as_it_is():
    with pytest.raises(ValueError, match="the index is gone"):
        await answer(fails, False, tools=["fails"])
