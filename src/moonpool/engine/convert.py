"""`python -m moonpool.engine.convert FILE.gguf OUT`: a GGUF model to a float32 safetensors directory.

Runs as its own process, so that whoever pulls a model does not keep torch in memory.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from moonpool.engine.loading import silence


def convert(gguf: Path, out: Path) -> None:
    """Write config, generation config, tokenizer with its chat template, and weights to `out`."""
    silence()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The weights are float by now, but the model still says that it is quantized and would refuse to be saved.
    for name, value in (("hf_quantizer", None), ("is_quantized", False), ("quantization_method", None)):
        setattr(model, name, value)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
