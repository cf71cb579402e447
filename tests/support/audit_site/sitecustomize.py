"""Watches a process of ours for code that comes from data. Put on PYTHONPATH; writes to the file that AUDIT_LOG names.

Python tells its audit hooks of every class that a pickle names, every code object that is compiled or run, every
marshalled one that is loaded. Imports do these things with the files of installed packages, and so do a few
libraries with text of their own, which the nearest caller's file says. Whatever else does it is written down.
"""

import os
import pathlib
import sys

LOG = os.environ.get("AUDIT_LOG", "")
OWN_CACHES = ("site-packages/torch/_inductor/", "site-packages/torch/_functorch/")
"""torch's compiler pickles into a folder of the user's own."""
OF_LIBRARIES = (
    "site-packages/torch/",
    "site-packages/jinja2/",
    "/dataclasses.py",
    "/collections/__init__.py",
    "<frozen runpy>",
)
"""Files that compile text of their own while the service runs; jinja2's is the model's template, in its process."""
IS_LOAD = "bench" in sys.orig_argv or "--multiprocessing-fork" in sys.orig_argv
"""The client's load generator talks to processes of its own by pickle. No service starts processes that way."""
WATCHED = ("pickle.find_class", "exec", "compile", "marshal.loads", "marshal.load")


def place() -> str:
    """The nearest caller's file; empty while a module is imported, and for what the interpreter itself begins with."""
    frame = sys._getframe(1).f_back
    nearest = "" if frame is None else frame.f_code.co_filename
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return ""
        frame = frame.f_back
    return nearest


def write(text: str) -> None:
    with pathlib.Path(LOG).open("a", encoding="utf-8") as file:
        file.write(text + "\n")


def hook(event: str, arguments: tuple) -> None:
    if event not in WATCHED:
        return
    where = place()
    if event == "pickle.find_class":
        if any(part in where for part in OWN_CACHES):
            return
    elif not where or any(part in where for part in OF_LIBRARIES):
        return
    write(f"{event} by {where} {str(arguments)[:120]}")


if LOG and not IS_LOAD:
    write(f"watching {' '.join(sys.orig_argv[1:4])}")
    sys.addaudithook(hook)
