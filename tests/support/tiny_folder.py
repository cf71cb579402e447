"""A complete model folder around the tiny tokenizer, and the command that serves it with one edge process."""

import hashlib
import sys
from pathlib import Path

from protos.service.model_files import encode_card
from tests.support.edge_harness import CHATML, tiny_card
from tests.support.tiny_tokenizer import EOS, byte_level_tokenizer, write_tokenizer


def tiny_folder(folder: Path, **card: object) -> Path:
    """The weights are empty, since no edge opens them."""
    folder.mkdir()
    tokenizer = byte_level_tokenizer()
    written = write_tokenizer(folder, tokenizer)
    fingerprint = hashlib.sha256(written.read_bytes()).hexdigest()
    changes = {"tokenizer_fingerprint": fingerprint, **card}
    (folder / "model.json").write_bytes(encode_card(tiny_card(tokenizer.token_to_id(EOS), **changes)))
    (folder / "model.gguf").touch()
    (folder / "chat_template.jinja").write_text(CHATML)
    return folder


def edge_command(socket_dir: Path, model: Path, *flags: str) -> list[str]:
    where = ("--role", "edge", "--socket-dir", str(socket_dir), "--model", str(model), "--health-port", "0")
    return [sys.executable, "-m", "scheduler_svc", *where, *flags]
