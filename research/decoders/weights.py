"""Convert a language model from GGUF to a transformers folder of bfloat16 weights.

`pip install gguf`, then `python -m research.decoders.weights FILE.gguf FOLDER TOKENIZER`. TOKENIZER
is a folder with the model's own ``tokenizer.json`` and ``tokenizer_config.json``: a GGUF file holds
a vocabulary with padding, which an artifact takes for another tokenizer.
"""

import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM


def convert(file: Path, output: Path, tokenizer: Path) -> None:
    """Write the model of a GGUF file, with dequantised weights, and a copy of a tokenizer."""
    source, name = file.parent, file.name
    config = AutoConfig.from_pretrained(source, gguf_file=name)
    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.float32)
    # The config of the model that was read says that the model is quantised.
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(read.state_dict())
    model.to(torch.bfloat16).save_pretrained(output)
    for path in tokenizer.glob("tokenizer*.json"):
        shutil.copy(path, output)


if __name__ == "__main__":
    convert(*map(Path, sys.argv[1:4]))
