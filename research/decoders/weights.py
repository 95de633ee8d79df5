"""Convert a language model from GGUF to a transformers folder: bfloat16 weights and tokenizer.

`pip install gguf`, then `python -m research.decoders.weights FILE.gguf FOLDER`.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


def convert(file: Path, output: Path) -> None:
    """Write the model and the tokenizer of a GGUF file, with dequantised weights."""
    source, name = file.parent, file.name
    config = AutoConfig.from_pretrained(source, gguf_file=name)
    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.float32)
    # The config of the model that was read says that the model is quantised.
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(read.state_dict())
    model.to(torch.bfloat16).save_pretrained(output)
    AutoTokenizer.from_pretrained(source, gguf_file=name).save_pretrained(output)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
