"""The text side of an edge, from a model folder: tokenizer, chat template, grammar checks; the encoder over them."""

import hashlib

from protos.forwardplane.v1.bridge_pb2 import CoreModel
from protos.service.model_files import ModelFolder
from protos.wire.errors import InvalidModelFile
from scheduler_svc.config import GrammarConfig
from scheduler_svc.edge.model_facts import ModelFacts, model_facts
from scheduler_svc.edge.prompt_encoder import PromptEncoder
from scheduler_svc.edge.resolve_request import check_generation_defaults
from scheduler_svc.text.chat_template import ChatTemplate
from scheduler_svc.text.grammar_checker import GrammarChecker
from scheduler_svc.text.grammar_setup import grammar_greeting
from scheduler_svc.text.tokenizer import TextTokenizer


class EdgeText:
    """Made by the edge's composition root; the template's process lives from start to stop."""

    def __init__(self, folder: ModelFolder, grammar_config: GrammarConfig) -> None:
        """Read the folder's files.

        Raises:
            InvalidModelFile: one cannot be used, or is not the one that the card describes.
        """
        self.card = card = folder.card
        check_generation_defaults(card)
        if hashlib.sha256(folder.tokenizer.read_bytes()).hexdigest() != card.tokenizer_fingerprint:
            raise InvalidModelFile("tokenizer.json is not the file that model.json describes", field="tokenizer.json")
        self.tokenizer = TextTokenizer.from_file(folder.tokenizer)
        self._template = _template(folder, self.tokenizer)
        first_token_id = card.bos_token_id if card.add_bos else None
        self._grammars = GrammarChecker(grammar_greeting(folder, grammar_config))
        self.encoder = PromptEncoder(
            self.tokenizer, template=self._template, first_token_id=first_token_id, grammars=self._grammars
        )

    @property
    def facts(self) -> ModelFacts:
        """Of the model, before the core said anything."""
        return model_facts(self.card, CoreModel(), has_chat_template=self._template is not None)

    async def start(self) -> None:
        """Compile the template.

        Raises:
            InvalidModelFile: it does not compile.
        """
        if self._template is not None:
            await self._template.start()
        await self._grammars.start()

    async def stop(self) -> None:
        """End the template's process and the encoder's threads. Safe to repeat."""
        self.encoder.close()
        await self._grammars.stop()
        if self._template is not None:
            await self._template.close()


def _template(folder: ModelFolder, tokenizer: TextTokenizer) -> ChatTemplate | None:
    if folder.chat_template is None:
        return None
    try:
        source = folder.chat_template.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InvalidModelFile("the chat template cannot be read as text", field=folder.chat_template.name) from error
    card = folder.card
    special_tokens = {
        "bos_token": "" if card.bos_token_id is None else tokenizer.token(card.bos_token_id),
        "eos_token": tokenizer.token(card.eos_token_ids[0]) if card.eos_token_ids else "",
    }
    return ChatTemplate(source, special_tokens=special_tokens)
