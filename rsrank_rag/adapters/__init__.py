"""What the LangChain and LlamaIndex adapters have in common."""
