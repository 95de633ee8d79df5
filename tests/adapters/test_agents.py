"""The middleware in LangChain's own agents, which a scripted model drives."""

import pytest

pytest.importorskip("langchain.agents.middleware")

from langchain.agents import create_agent
from langchain_core.documents import Document
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.prompts import PromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.tools import create_retriever_tool, tool

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


class Fixed(BaseRetriever):
    """Finds everything."""

    def _get_relevant_documents(self, query, *, run_manager):
        return [Document(text) for text in TEXTS]


made_by_langchain = create_retriever_tool(Fixed(), "library", "Look something up.")


@tool
def fails(query: str) -> str:
    """Fail."""
    raise ValueError("the index is gone")


async def answer(
    used, asynchronous, query="how many?", threshold="native", fallback="native", **options
):
    """The message of a tool in an agent that calls it once."""
    compressor = RSRankCompressor(model=Numbers(), threshold=threshold, fallback=fallback)
    return await answer_with(
        [create_rsrank_middleware(compressor, **options)], used, asynchronous, query
    )


async def answer_with(middleware, used, asynchronous=False, query="how many?"):
    call = {"name": used.name, "args": {"query": query}, "id": "1", "type": "tool_call"}
    model = Scripted(messages=iter([AIMessage("", tool_calls=[call]), AIMessage("Done.")]))
    tools = [search, plain, fails, made_by_langchain]
    agent = create_agent(model, tools, middleware=middleware)
    question = {"messages": [("user", "Tell me.")]}
    actual = await agent.ainvoke(question) if asynchronous else agent.invoke(question)
    assert actual["messages"][-1].text == "Done."
    (message,) = [one for one in actual["messages"] if isinstance(one, ToolMessage)]
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


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_the_text_of_langchains_own_retriever_tools_is_pruned_without_being_named(
    asynchronous,
):
    message = await answer(made_by_langchain, asynchronous)
    assert message.content == "3 three\n\n1 one"


async def test_only_the_tools_that_are_named_are_pruned():
    assert (await answer(search, False, tools=["library"])).content == "\n\n".join(TEXTS)


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_a_name_that_no_tool_has_is_a_warning_once(asynchronous, caplog):
    await answer(search, asynchronous, tools=["serch"])
    (record,) = caplog.records
    assert "'serch' are to be pruned, and the agent lacks it. Did you mean 'search'" in (
        record.message
    )
    caplog.clear()
    await answer(search, asynchronous, tools=["search"])
    assert not caplog.records


async def test_two_middlewares_for_two_tools_serve_one_agent():
    strict = RSRankCompressor(model=Numbers(), threshold=2.0)
    lax = RSRankCompressor(model=Numbers())
    both = [
        create_rsrank_middleware(strict, tools=["search"]),
        create_rsrank_middleware(lax, tools=["plain"]),
    ]
    assert [one.name for one in both] == ["RSRankMiddleware[search]", "RSRankMiddleware[plain]"]
    assert (await answer_with(both, search)).content == "3 three"
    assert (await answer_with(both, plain)).content == "3 three\n\n1 one"


async def test_a_prompt_decides_how_the_agent_reads_a_document():
    prompt = PromptTemplate.from_template("<{page_content}>")
    message = await answer(search, False, document_prompt=prompt)
    assert message.content == "<3 three>\n\n<1 one>"


async def test_a_tools_error_reaches_the_agent_as_it_is():
    with pytest.raises(ValueError, match="the index is gone"):
        await answer(fails, False, tools=["fails"])
