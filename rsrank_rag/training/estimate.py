"""What a recipe will take."""

from typing import NamedTuple


class Estimate(NamedTuple):
    """What a recipe will take on this machine, if the machine does nothing else.

    Attributes:
        queries: Labelled queries.
        pairs: Their documents.
        disk: Bytes of the features.
        memory: Bytes of the language model's weights.
        hours: Of reading features and training.
    """

    queries: int
    pairs: int
    disk: int
    memory: int
    hours: float

    def __str__(self) -> str:
        return (
            f"queries  {self.queries:,}\n"
            f"pairs    {self.pairs:,}\n"
            f"disk     {self.disk / 1e9:,.2f} GB for features\n"
            f"memory   {self.memory / 1e9:,.2f} GB for the language model's weights, and batches\n"
            f"time     about {self.hours:,.2f} hours on this machine"
        )
