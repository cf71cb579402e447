"""Chat messages to prompt text, through the model's own template.

Knows nothing of gRPC or token ids. Guards: whatever a template does, this process goes on; one that runs away or eats
memory fails its own request.
"""

import json
from collections.abc import Mapping, Sequence

from protos.wire.errors import InvalidModelFile, InvalidRequest
from scheduler_svc.text.killable_process import ChildKilled, KillableProcess

_MODULE = "scheduler_svc.text.template_process"
_FIELD = "chat_template"


class ChatTemplate:
    """The template of the served model. Made, started and closed by the edge's composition root."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, str], render_timeout_s: float = 2.0) -> None:
        """Prepare the child process that will render.

        Args:
            source: jinja2 text.
            special_tokens: variables such as `bos_token`.
            render_timeout_s: most seconds one rendering may take.
        """
        greeting = json.dumps({"template": source, "special_tokens": dict(special_tokens)}).encode()
        self._child = KillableProcess(_MODULE, greeting=greeting)
        self._render_timeout_s = render_timeout_s

    async def start(self) -> None:
        """Start the child and compile the template.

        Raises:
            InvalidModelFile: the template does not compile.
        """
        try:
            reply = await self._child.start()
        except ChildKilled as error:
            raise InvalidModelFile("the chat template did not compile in time", field=_FIELD) from error
        failure = json.loads(reply or b"{}").get("failed")
        if failure:
            raise InvalidModelFile(f"the chat template does not compile: {failure}", field=_FIELD)

    async def render(self, messages: Sequence[tuple[str, str]]) -> str:
        """The prompt for (role, content) pairs, ready for the assistant's turn.

        Raises:
            InvalidRequest: the template refuses these messages, or does not finish with them in time.
            InvalidModelFile: the template itself fails.
        """
        turns = [{"role": role, "content": content} for role, content in messages]
        request = json.dumps({"messages": turns}).encode()
        try:
            body = await self._child.call(request, timeout_s=self._render_timeout_s)
        except ChildKilled as error:
            message = f"the model's chat template did not finish within {self._render_timeout_s} s"
            raise InvalidRequest(message, field="chat") from error
        reply: dict[str, str] = json.loads(body)
        if "refused" in reply:
            raise InvalidRequest(f"the model's chat template refuses the messages: {reply['refused']}", field="chat")
        if "failed" in reply:
            raise InvalidModelFile(f"the model's chat template failed: {reply['failed']}", field=_FIELD)
        return reply["text"]

    async def close(self) -> None:
        """End the child. Safe to repeat."""
        await self._child.close()
