"""How the answers of completions and chats are told, from the body that asked for them."""

from __future__ import annotations

from collections.abc import Callable

from cluster.answers.answer import Answer
from cluster.answers.maker import AnswerMaker
from cluster.language.detokeniser import TokenBytes, id_name
from cluster.language.message_reader import NewReader
from cluster.web.prompt_voice import PromptVoice
from cluster.web.telling import ChunkTelling
from cluster.web.voices import ChatVoice, CompletionVoice, Voice
from protos.openai import ChatBody, CompletionBody, GenerationBody


def completion_telling(maker: AnswerMaker, body: CompletionBody, answer: Answer, name: str) -> ChunkTelling:
    """Of /v1/completions. `name`: of the model, as it answers."""
    tokens = maker.service.text.tokens
    prompt = PromptVoice(answer, tokens, body)
    voice = CompletionVoice(name, token_name(body, tokens), prompt, scored=body.logprobs is not None)
    return _chunks(voice, body, answer)


def chat_telling(
    maker: AnswerMaker, body: ChatBody, answer: Answer, name: str, new_reader: NewReader | None
) -> ChunkTelling:
    """Of /v1/chat/completions."""
    tokens = maker.service.text.tokens
    prompt = PromptVoice(answer, tokens, body)
    naming = token_name(body, tokens)
    voice = ChatVoice(name, tokens, naming, prompt, scored=body.logprobs, new_reader=new_reader)
    return _chunks(voice, body, answer)


def _chunks(voice: Voice, body: GenerationBody, answer: Answer) -> ChunkTelling:
    counts_so_far = answer.counts if body.continuous_usage else None
    return ChunkTelling(voice, include_usage=body.include_usage, counts_so_far=counts_so_far)


def token_name(body: GenerationBody, tokens: TokenBytes) -> Callable[[int], str]:
    """How log probabilities name a token: by its text, or by its id where that is asked for."""
    return id_name if body.return_tokens_as_token_ids else tokens.name
