"""The `forwardplane` command: parses, calls, and turns errors into one line and an exit code.

Starts services as processes and imports neither.
"""

import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

from cyclopts import App, CycloptsError, Parameter
from rich.console import Console

from protos.client import exit_codes
from protos.client.demo_command import QUESTION, demo
from protos.client.embed_command import Pooling, embed
from protos.client.fetch_model import fetch_model
from protos.client.generate_command import GenerateArguments, generate
from protos.client.load_commands import add_load_commands, wide_console
from protos.client.serve_command import DEFAULT_MODEL, ServeOptions, serve
from protos.client.server_access import ServerAccess
from protos.client.status_command import status
from protos.service.config import EX_CONFIG, ConfigError
from protos.wire.errors import EngineError

DEFAULT_SERVE = ServeOptions()
DEFAULT_GENERATE = GenerateArguments()
DEFAULT_SERVER = ServerAccess()

app = App(
    name="forwardplane",
    version=lambda: version("forwardplane"),
    help="LLM inference in two gRPC services: a scheduler that plans each step, and workers that execute the plans.",
    help_epilogue="Exit codes: 0 done, 1 failure, 2 wrong usage, 3 refused (also by a service that it started), "
    "78 settings of its own that cannot be used.",
)
add_load_commands(app)


@app.command(name="serve")
def serve_command(*, options: ServeOptions = DEFAULT_SERVE) -> int:
    """Serve a model on this machine until Ctrl-C: one scheduler and its workers, each a process of its own.

    Example: `forwardplane serve --model smollm2-135m-instruct --port 50051`, then `forwardplane generate "Hello"`.
    """
    return serve(options, Console(stderr=True))


@app.command(name="demo")
def demo_command(question: str = QUESTION, *, options: ServeOptions = DEFAULT_SERVE) -> int:
    """Serve a model, ask one question, stream the answer, print a summary, and stop.

    Args:
        question: what to ask.
        options: what to serve, how, and on which ports.
    """
    return demo(options, question, Console())


@app.command(name="generate")
def generate_command(prompt: str | None = None, *, arguments: GenerateArguments = DEFAULT_GENERATE) -> int:
    """Ask a running server for text and stream it to the terminal.

    The prompt is a chat question unless --raw. With --json the one line printed last holds text, token_ids,
    finish_reason, usage, logprobs, and what was asked of the prompt: prompt_logprobs with prompt_first_pos, the
    position of the first, and hidden_states.

    Args:
        prompt: the question or the text to go on from.
        arguments: where to ask, what to ask for, and how to show it.
    """
    return generate(prompt, arguments, Console(soft_wrap=True))


@app.command(name="embed")
def embed_command(*texts: str, server: ServerAccess = DEFAULT_SERVER, pooling: Pooling = "last") -> int:
    """Turn texts into vectors of length 1, made of the model's final hidden states; one JSON line each.

    Args:
        texts: taken as they are, without the model's chat template.
        server: where to ask, and as whom.
        pooling: `last`: the state of the last token; `mean`: of all.
    """
    return embed(texts, Console(soft_wrap=True), server=server, pooling=pooling)


@app.command(name="status")
def status_command(*, server: ServerAccess = DEFAULT_SERVER) -> int:
    """Show a server's load, a table of its workers, and what their captured graphs were used for.

    Args:
        server: where to ask, and as whom.
    """
    return status(server, wide_console())


@app.command(name="fetch-model")
def fetch_model_command(
    name: str = DEFAULT_MODEL, *, model_cache: Annotated[Path | None, Parameter(name="--model-cache")] = None
) -> int:
    """Fetch a known model into the cache and print its folder. Safe to repeat.

    Args:
        name: name of a known model.
        model_cache: folder of fetched models. Default: ~/.cache/forwardplane/models.
    """
    console = Console(stderr=True)
    with console.status(f"fetching {name}") as status:
        folder = fetch_model(name, cache=model_cache, progress=status.update)
    Console(soft_wrap=True).print(str(folder.path), highlight=False)
    return exit_codes.OK


def run(call: Callable[[], object], console: Console) -> int:
    """What `call` returns as an exit code; an error becomes one line on `console`."""
    try:
        code = call()
    except CycloptsError:
        return exit_codes.USAGE
    except exit_codes.WrongUsage as error:
        console.print(f"forwardplane: {error}", style="red", highlight=False, markup=False)
        return exit_codes.USAGE
    except ConfigError as error:
        console.print(f"forwardplane: {error}", style="red", highlight=False, markup=False)
        return EX_CONFIG
    except EngineError as error:
        console.print(f"forwardplane: {error.message}", style="red", highlight=False, markup=False)
        return exit_codes.exit_code(error)
    except KeyboardInterrupt:
        return exit_codes.INTERRUPTED
    return code if isinstance(code, int) else exit_codes.OK


def main() -> None:
    """Entry point of the `forwardplane` command."""
    console = Console(stderr=True, soft_wrap=True)
    sys.exit(run(lambda: app(exit_on_error=False, result_action="return_value"), console))


if __name__ == "__main__":
    main()
