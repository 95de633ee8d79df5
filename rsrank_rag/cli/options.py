"""Options that several ``rsrank`` commands share: which model, and how it is loaded."""

from __future__ import annotations

from typing import Annotated

import typer

from ..evaluation.systems.registry import forms

Model = Annotated[str, typer.Option("--model", "-m", help="Built-in name, artifact folder or Hub id.")]
System = Annotated[str, typer.Option("--model", "-m", help=f"Built-in name, artifact folder or Hub id; or {forms()}.")]
Revision = Annotated[str | None, typer.Option(help="Commit, tag or branch on the Hub.")]
Device = Annotated[str | None, typer.Option(help="cuda, cuda:1, mps, cpu. Default: the best one present.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16, float16. Default: bfloat16 where it is fast.")]
EightBit = Annotated[bool, typer.Option("--load-in-8bit", help="int8 weights (bitsandbytes).")]
FourBit = Annotated[bool, typer.Option("--load-in-4bit", help="4-bit weights (bitsandbytes).")]
Fp8 = Annotated[bool, typer.Option("--load-in-fp8", help="float8 weights (torchao).")]
Offline = Annotated[bool, typer.Option("--local-files-only", help="Never ask the Hub.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code from the model's repository (jina-reranker-v2).")
]
