"""From validated bodies to prompts in tokens, without holding up the event loop over a long text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.language.side_threads import SideThreads
from cluster.language.text import TextModel
from planner.errors import ContextLengthExceeded, InvalidRequest
from protos.openai import ChatBody, CompletionBody, Prompt
from protos.openai_embeddings import EmbeddingBody
from protos.openai_messages import Conversation


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """One prompt. `text` as the client wrote it, None where it sent ids; the first `num_added` ids are not in it."""

    ids: list[int]
    text: str | None = None
    num_added: int = 0


class PromptEncoder:
    """Writes and tokenises prompts. Owner: the application; lives on its event loop. Long texts go to `threads`."""

    def __init__(self, text: TextModel, threads: SideThreads) -> None:
        self._text = text
        self._threads = threads

    async def completion(self, body: CompletionBody, context: int) -> list[EncodedPrompt]:
        """The prompts of a text completion, in order. Raises `ContextLengthExceeded` where a text cannot fit."""
        truncates = body.truncate_prompt_tokens is not None
        prompts = await self._given(body.prompt, body.add_special_tokens, None if truncates else context, "prompt")
        return [_truncated(prompt, body.truncate_prompt_tokens, body.max_tokens or 1, context) for prompt in prompts]

    async def inputs(self, body: EmbeddingBody, context: int) -> list[EncodedPrompt]:
        """What vectors are wanted of, in order. Raises `ContextLengthExceeded` where a text cannot fit."""
        truncates = body.truncate_prompt_tokens is not None
        prompts = await self._given(body.input, body.add_special_tokens, None if truncates else context, "input")
        return [_truncated(prompt, body.truncate_prompt_tokens, 0, context) for prompt in prompts]

    async def _given(
        self, given: Prompt, add_special_tokens: bool | None, context: int | None, param: str
    ) -> list[EncodedPrompt]:
        if isinstance(given, str):
            given = [given]
        special = add_special_tokens is not False
        texts = [one for one in given if isinstance(one, str)]
        if texts:
            for text in texts:
                self._refuse_hopeless(text, context, param)
            return await self._threads.run(
                sum(map(len, texts)), lambda: [self._encode_text(text, special=special) for text in texts]
            )
        if add_special_tokens:
            raise InvalidRequest(f"add_special_tokens needs {param} to be text", param="add_special_tokens")
        lists = [one for one in given if isinstance(one, list)]
        return [EncodedPrompt(ids) for ids in lists or [[one for one in given if isinstance(one, int)]]]

    async def chat(self, body: ChatBody, context: int) -> EncodedPrompt:
        """The prompt of a conversation, as the model's chat template writes it."""
        special = body.add_special_tokens is True
        limit = None if body.truncate_prompt_tokens is not None else context
        ids = await self.conversation(body, context=limit, add_special_tokens=special)
        return _truncated(EncodedPrompt(ids), body.truncate_prompt_tokens, body.max_tokens or 1, context)

    async def conversation(self, body: Conversation, *, context: int | None, add_special_tokens: bool) -> list[int]:
        """Token ids of a conversation's prompt. With `context`, one that cannot fit is refused before tokenising."""

        def write() -> list[int]:
            text = written(body, self._text)
            self._refuse_hopeless(text, context, "messages")
            return self._text.encode(text, add_special_tokens=add_special_tokens)

        size = self._threads.size_of(body.messages, body.tools, body.chat_template_kwargs)
        return await self._threads.run(size, write)

    async def ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of one text."""
        return await self._threads.run(
            len(text), lambda: self._text.encode(text, add_special_tokens=add_special_tokens)
        )

    async def decoded(self, ids: Sequence[int]) -> str:
        """The text of token ids."""
        return await self._threads.run(4 * len(ids), lambda: self._text.decode(list(ids)))

    def _encode_text(self, text: str, *, special: bool) -> EncodedPrompt:
        ids = self._text.encode(text, add_special_tokens=special)
        bare = self._text.encode("", add_special_tokens=special)
        return EncodedPrompt(ids, text, num_added=len(bare) if ids[: len(bare)] == bare else 0)

    async def bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word as tokens, at the head of a text, behind a space and in the middle of a text."""
        return await self._threads.run(sum(map(len, words)), lambda: self._spelled(words))

    def _spelled(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            spelled = (self._text.encode(one, add_special_tokens=False) for one in (word, f" {word.lstrip()}"))
            found |= dict.fromkeys(tuple(ids) for ids in (*spelled, self._text.encode_after(word)) if ids)
        return tuple(found)

    def _refuse_hopeless(self, text: str, context: int | None, param: str) -> None:
        if context is None:
            return
        least = self._text.tokens.least(text)
        if least >= context:
            raise ContextLengthExceeded(
                f"the prompt has at least {least} tokens; the context length is {context}", param=param
            )


def written(conversation: Conversation, text: TextModel) -> str:
    """A conversation as the model's chat template writes it. Raises `InvalidRequest`."""
    if text.chat_template is None:
        raise InvalidRequest("this model has no chat template; use /v1/completions", param="messages")
    return text.chat_template.render(
        [message.for_template() for message in conversation.messages],
        add_generation_prompt=conversation.opens_answer,
        continue_final_message=conversation.continue_final_message,
        options=conversation.chat_template_kwargs,
        tools=[tool.for_template() for tool in conversation.offered_tools],
    )


def _truncated(prompt: EncodedPrompt, kept: int | None, num_answer: int, context: int) -> EncodedPrompt:
    """The prompt's last `kept` tokens; -1: as many as leave room for an answer of `num_answer` tokens."""
    if kept is None:
        return prompt
    if kept > context:
        raise InvalidRequest(
            f"truncate_prompt_tokens is {kept}; the context length is {context}", param="truncate_prompt_tokens"
        )
    if kept == -1:
        kept = max(1, context - num_answer)
    return prompt if len(prompt.ids) <= kept else EncodedPrompt(prompt.ids[-kept:])
