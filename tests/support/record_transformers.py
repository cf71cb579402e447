"""Records tests/golden/hub_models.npz: what transformers computes for the small models of `hub_models.py`.

    python -m venv build/record && build/record/bin/pip install torch transformers numpy
    build/record/bin/python tests/support/record_transformers.py

In float32, attention spelled out. The file holds the log-probabilities of `IDS` at every position of `PROMPT`.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.support.hub_models import CASES, IDS, PROMPT, config_of, make_tensors, write_hub  # noqa: E402 - not installed


def main() -> None:
    found = {}
    for case in CASES:
        config = config_of(case)
        with tempfile.TemporaryDirectory() as folder:
            write_hub(Path(folder), config, make_tensors(config))
            model, info = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
            )
        assert not info["missing_keys"], (case, info)
        assert not info["unexpected_keys"], (case, info)
        with torch.inference_mode():
            logits = model(torch.tensor([PROMPT])).logits[0].double()
        found[case] = torch.log_softmax(logits, -1)[:, IDS].float().numpy()
        print(case, "largest probability", round(float(torch.softmax(logits, -1).amax(-1).mean()), 3))
    np.savez_compressed(ROOT / "tests" / "golden" / "hub_models.npz", **found)


if __name__ == "__main__":
    main()
