"""Reads hostile model files of one kind and says what became of each: `hostile_files KIND FOLDER`.

A process of its own, so that its peak of memory is that of the readers.
"""

import asyncio
import json
import random
import resource
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from protos.service.gguf_header import MAX_HEADER_BYTES, read_gguf_header
from protos.service.model_files import read_model_folder
from protos.service.safetensors_folder import read_safetensors_folder
from protos.service.safetensors_header import read_safetensors_header
from protos.wire.errors import EngineError
from scheduler_svc.text.chat_template import ChatTemplate
from scheduler_svc.text.tokenizer import TextTokenizer
from tests.support import gguf_bytes as g
from tests.support.gguf_bytes import Tensor, gguf

MEBI = 1 << 20
Cases = Iterator[tuple[str, bytes]]


def _u64(value: int) -> bytes:
    return struct.pack("<Q", value % 2**64)


def gguf_files() -> Cases:
    good = gguf(metadata=[g.entry("a", g.STRING, "b")], tensors=(Tensor(name="a"), Tensor(name="b")))
    head = b"GGUF" + struct.pack("<I", 3)
    yield "empty", b""
    yield "zeros", bytes(MEBI)
    for name, value in {"most": 2**64 - 1, "half": 2**63, "wrap": 2**61, "32": 2**32}.items():
        yield f"{name} tensors", head + _u64(value) + _u64(0) + bytes(64)
        yield f"{name} keys", head + _u64(0) + _u64(value) + bytes(64)
        yield f"key of {name}", head + _u64(0) + _u64(1) + _u64(value) + bytes(64)
        for kind in (g.STRING, 5, 9):
            array = head + _u64(0) + _u64(1) + _u64(1) + b"a" + struct.pack("<I", 9) + struct.pack("<I", kind)
            yield f"array of {name} {kind}", array + _u64(value) + bytes(64)
    nested = struct.pack("<I", 9) + struct.pack("<I", 9) + _u64(1)
    yield "arrays in arrays", head + _u64(0) + _u64(1) + _u64(1) + b"a" + nested * 100_000
    texts = head + _u64(0) + _u64(1) + _u64(1) + b"a" + struct.pack("<II", 9, g.STRING)
    count = (MAX_HEADER_BYTES - len(texts)) // 8 - 1
    yield "millions of empty texts", texts + _u64(count) + bytes(8 * count)
    one = _u64(1) + b"x"
    count = MAX_HEADER_BYTES // len(one) - 10
    yield "millions of texts", texts + _u64(count) + one * count
    yield from _damaged(good)


def safetensors_files() -> Cases:
    tensor = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    good = json.dumps({"a": tensor}).encode()

    def file(header: bytes, length: int | None = None) -> bytes:
        return _u64(len(header) if length is None else length) + header + bytes(24)

    yield "empty", b""
    for length in (0, 1, 2**31, 2**32, 2**63, 2**64 - 1, 100 * MEBI):
        yield f"header of {length}", file(good, length)
    for shape in ([2**31, 2**31, 4], [2**32, 2**32], [2**63], [-1], [0], [1.5], [[6]], "6", [True, 6], [10**400]):
        yield f"shape {str(shape)[:20]}", file(json.dumps({"a": {**tensor, "shape": shape}}).encode())
    for offsets in ([0, 2**63], [24, 0], [-24, 0], [2**64, 2**64 + 24], [0, 23], [0], None, ["0", "24"]):
        yield f"offsets {offsets}", file(json.dumps({"a": {**tensor, "data_offsets": offsets}}).encode())
    yield "many without data", file(json.dumps({str(n): tensor for n in range(100_000)}).encode())
    yield "lists", file(b"[" + b"[]," * (10 * MEBI) + b"0]")
    yield "objects", file(b'{"a":[' + b"{}," * (10 * MEBI) + b"0]}")
    yield "texts", file(b'{"a":[' + b'"ab",' * (6 * MEBI) + b"0]}")
    yield "numbers", file(b'{"a":[' + b"9999999," * (4 * MEBI) + b"0]}")
    yield "deep", file(b"[" * MEBI)
    yield "one number", file(b"1" * (8 * MEBI))
    yield from _damaged(file(good))


def folder_files() -> Cases:
    for kind in (b"[]", b"{}", b'"ab"', b"1e9999", b"NaN"):
        yield f"16 MiB of {kind!r}", b'{"a":[' + (kind + b",") * (16 * MEBI // (len(kind) + 1) - 4) + b"0]}"
    yield "deep", b"[" * MEBI
    yield "more than fits", bytes(17 * MEBI)


def tokenizer_files() -> Cases:
    yield "empty", b""
    yield "no text", b"\xff\xfe" * 100
    yield "deep", b"[" * MEBI
    yield "deep object", b'{"a":' * MEBI
    for kind in (b"[]", b"{}", b'"ab"'):
        yield f"40 MiB of {kind!r}", b'{"model":[' + (kind + b",") * (40 * MEBI // (len(kind) + 1)) + b"0]}"
    yield "huge", bytes(65 * MEBI)
    yield "one number", b'{"model":' + b"1" * MEBI + b"}"
    for model in ({}, {"type": "BPE"}, {"type": "BPE", "vocab": [], "merges": 1}, {"type": "x"}, 7, None):
        yield f"model {model}", json.dumps({"version": "1.0", "model": model, "added_tokens": []}).encode()
    for pattern in ("(", "(a+)+b" * 1000, "(?<!", "[" * 10_000, "a{99999999}"):
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        layout = {"version": "1.0", "pre_tokenizer": split, "model": {"type": "BPE", "vocab": {}, "merges": []}}
        yield f"pattern {pattern[:10]}", json.dumps(layout).encode()


def card_files() -> Cases:
    yield "empty", b""
    yield "deep", b"[" * MEBI
    yield "large", b" " * (17 * MEBI)
    for value in ("1e400", "-1", "NaN", "18446744073709551616", '"' + "x" * MEBI + '"', "[]"):
        yield f"context {value[:20]}", b'{"name":"x","architecture":"llama","context_tokens":' + value.encode() + b"}"


def templates() -> Cases:
    """Some fail when they are compiled, others with the first messages."""
    for name, text in {
        "does not compile": "{% for",
        "never ends": "{% for a in range(99999) %}{% for b in range(99999) %}{{ b }}{% endfor %}{% endfor %}",
        "endless range": "{% for a in range(10**12) %}x{% endfor %}",
        "multiplied text": "{{ 'x' * 10**10 }}",
        "multiplied list": "{{ ([0] * 10**9)|length }}",
        "power": "{{ (10**(10**9))|string|length }}",
        "doubled": "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "recursion": "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
        "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "globals": "{{ raise_exception.__globals__['sys'].exit(0) }}",
        "format": "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}",
        "includes": "{% include '/etc/passwd' %}",
        "imports": "{% import 'os' as os %}{{ os.system('true') }}",
        "deep braces": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "width": "{{ '%*d' % (10**9, 1) }}",
        "filters": "{{ 'x'|center(10**10) }}",
    }.items():
        yield name, text.encode()


def _damaged(good: bytes) -> Cases:
    draw = random.Random(5)
    for number in range(200):
        content = bytearray(good)
        for _ in range(draw.randint(1, 4)):
            content[draw.randrange(len(content))] = draw.choice([0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)])
        yield f"damaged {number}", bytes(content[: draw.randint(len(content) // 2, len(content))])


def read_folder(path: Path) -> None:
    path.rename(path.parent / "config.json")
    read_safetensors_folder(path.parent)


def read_card(path: Path) -> None:
    (path.parent / "model.gguf").touch()
    (path.parent / "tokenizer.json").touch()
    path.rename(path.parent / "model.json")
    read_model_folder(path.parent)


def render(path: Path) -> None:
    async def run() -> None:
        template = ChatTemplate(path.read_text(), special_tokens={}, render_timeout_s=1.0)
        try:
            await template.start()
            await template.render([("user", "hello")])
        finally:
            await template.close()

    asyncio.run(run())


KINDS: dict[str, tuple[Callable[[], Cases], Callable[[Path], object]]] = {
    "gguf": (gguf_files, read_gguf_header),
    "safetensors": (safetensors_files, read_safetensors_header),
    "folder": (folder_files, read_folder),
    "tokenizer": (tokenizer_files, TextTokenizer.from_file),
    "card": (card_files, read_card),
    "template": (templates, render),
}


def processor_seconds() -> float:
    """Of this process and of its children: the same on a busy machine."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def peak_bytes() -> int:
    """Of this process and of its children. `ru_maxrss` of this one would begin with its parent's."""
    status = Path("/proc/self/status").read_text()
    own = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return max(int(own.split()[1]), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) << 10


def main(kind: str, folder: Path) -> None:
    cases, read = KINDS[kind]
    path = folder / "file"
    for name, content in cases():
        path.write_bytes(content)
        del content
        begun = processor_seconds()
        outcome, message = "read", ""
        try:
            read(path)
        except EngineError as error:
            outcome, message = type(error).__name__, error.message
        seconds = processor_seconds() - begun
        said = {"name": name, "outcome": outcome, "message": message, "seconds": seconds, "peak": peak_bytes()}
        print(json.dumps(said))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
