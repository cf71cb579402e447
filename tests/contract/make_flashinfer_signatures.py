"""Writes `signatures/flashinfer.json`: the calls of flashinfer that we make, as its source declares them.

    pip download flashinfer-python==0.6.18 --no-deps && unzip flashinfer_python-*.whl -d wheel
    python tests/contract/make_flashinfer_signatures.py wheel

Reads the source; imports nothing, so that it works without CUDA.
"""

import ast
import json
import sys
from pathlib import Path

TARGET = Path(__file__).parent / "signatures" / "flashinfer.json"
CALLS = {
    "BatchPrefillWithPagedKVCacheWrapper.__init__": "prefill.py",
    "BatchPrefillWithPagedKVCacheWrapper.plan": "prefill.py",
    "BatchPrefillWithPagedKVCacheWrapper.run": "prefill.py",
    "BatchPrefillWithPagedKVCacheWrapper.reset_workspace_buffer": "prefill.py",
    "BatchDecodeWithPagedKVCacheWrapper.__init__": "decode.py",
    "BatchDecodeWithPagedKVCacheWrapper.plan": "decode.py",
    "BatchDecodeWithPagedKVCacheWrapper.run": "decode.py",
    "BatchDecodeWithPagedKVCacheWrapper.reset_workspace_buffer": "decode.py",
}
HIDDEN = {"BatchDecodeWithPagedKVCacheWrapper.plan": "_plan_impl"}
"""Methods that take `**kwargs` and hand them on: the one that names them."""


def signatures(package: Path) -> dict[str, list[str]]:
    """ "name KIND required|optional" of each parameter but self, of each call."""
    return {call: _parameters(package / file, call) for call, file in CALLS.items()}


def version(package: Path) -> str:
    """Of an unpacked or installed distribution."""
    (metadata,) = package.parent.glob("flashinfer_python-*.dist-info")
    return metadata.name.split("-")[1].removesuffix(".dist")


def _parameters(path: Path, call: str) -> list[str]:
    owner, method = call.split(".")
    wanted = HIDDEN.get(call, method)
    tree = ast.parse(path.read_text())
    (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner]
    overloads = [node for node in found.body if isinstance(node, ast.FunctionDef) and node.name == wanted]
    arguments = overloads[-1].args  # the last one is the implementation
    positional = arguments.args[1:]
    required = len(positional) - len(arguments.defaults)
    listed = [_line(each.arg, "POSITIONAL_OR_KEYWORD", index < required) for index, each in enumerate(positional)]
    if arguments.vararg is not None:
        listed.append(_line(arguments.vararg.arg, "VAR_POSITIONAL", False))
    for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        listed.append(_line(each.arg, "KEYWORD_ONLY", default is None))
    assert arguments.kwarg is None, f"{call} takes any keyword: name the method behind it in HIDDEN"
    return listed


def _line(name: str, kind: str, is_required: bool) -> str:
    return f"{name} {kind} {'required' if is_required else 'optional'}"


def main(root: Path) -> None:
    package = root / "flashinfer"
    content = {"version": version(package), "calls": signatures(package)}
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
