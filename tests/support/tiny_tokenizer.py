"""Tiny tokenizers of the two kinds that are streamed, as `tokenizer.json` text. Ids below 256 are the raw bytes."""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from scheduler_svc.text.tokenizer import TextTokenizer

EOS = "<|im_end|>"
SPECIALS = ("<|endoftext|>", "<|im_start|>", EOS)


def byte_alphabet() -> list[str]:
    """The character of each byte value."""
    printable = [*range(33, 127), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(value) if value in printable else chr(next(others)) for value in range(256)]


def byte_level_tokenizer() -> Tokenizer:
    """Byte-level BPE: 256 bytes, some merges (among them ones that straddle characters), three special tokens."""
    alphabet = byte_alphabet()
    vocabulary = {char: value for value, char in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []

    def merge(left: bytes, right: bytes) -> None:
        pair = tuple("".join(alphabet[value] for value in part) for part in (left, right))
        assert pair[0] in vocabulary
        assert pair[1] in vocabulary
        merges.append(pair)
        vocabulary.setdefault("".join(pair), len(vocabulary))

    emoji = "🙂".encode()
    for left, right in [(b"h", b"e"), (b"l", b"l"), (b"he", b"ll"), (b"hell", b"o"), (b" ", b"t"), (b"h", b"e")]:
        merge(left, right)
    merge(b" t", b"he")
    merge(emoji[:1], emoji[1:2])
    merge(emoji[2:3], emoji[3:4])
    merge(emoji[2:], b"!")
    merge(b"\xc3", b"\xa9")
    merge(b"a", b"\xe2")
    merge(b"\x82", b"\xac")
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return tokenizer


def byte_fallback_tokenizer(*, strip_left: int = 0) -> Tokenizer:
    """BPE with byte fallback, as Gemma and Llama 2: ids below 256 are raw bytes, then words, then specials."""
    vocabulary = {f"<0x{value:02X}>": value for value in range(256)}
    for word in ("▁", "▁the", "a", "b", "é", "▁hello", "!", "\n", "<unk>"):
        vocabulary[word] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strip_left:
        steps.append(decoders.Strip(" ", strip_left, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return tokenizer


def write_tokenizer(folder: Path, tokenizer: Tokenizer | None = None) -> Path:
    """Writes `tokenizer.json`; the byte-level one unless told otherwise."""
    path = folder / "tokenizer.json"
    path.write_text((tokenizer or byte_level_tokenizer()).to_str(), encoding="utf-8")
    return path


def text_tokenizer(folder: Path, tokenizer: Tokenizer | None = None) -> TextTokenizer:
    return TextTokenizer.from_file(write_tokenizer(folder, tokenizer))
