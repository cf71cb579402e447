"""Runs inside a peer's own environment: a GGUF file -> a folder in Hugging Face's form, dequantised to float32.

python hub_form.py MODEL.gguf TOKENIZER.json FOLDER
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast


def main() -> None:
    weights, tokenizer, folder = (Path(argument) for argument in sys.argv[1:])
    model = AutoModelForCausalLM.from_pretrained(str(weights.parent), gguf_file=weights.name, dtype=torch.float32)
    # Newer releases take what was read from a GGUF file for quantised still, and refuse to write it.
    for owner, name in ((model, "hf_quantizer"), (model.config, "quantization_config")):
        if hasattr(owner, name):
            delattr(owner, name)
    model.is_quantized = False
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_file=str(tokenizer)).save_pretrained(folder)


main()
