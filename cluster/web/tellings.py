"""How the answers of completions and chats are told, from the body that asked for them."""

from __future__ import annotations

from cluster.answers.answer import Answer
from cluster.answers.maker import AnswerMaker
from cluster.language.message_reader import NewReader
from cluster.web.prompt_voice import PromptVoice
from cluster.web.telling import ChunkTelling
from cluster.web.voices import ChatVoice, CompletionVoice
from protos.openai import ChatBody, CompletionBody


def completion_telling(maker: AnswerMaker, body: CompletionBody, answer: Answer, name: str) -> ChunkTelling:
    """Of /v1/completions. `name`: of the model, as it answers."""
    tokens = maker.service.text.tokens
    voice = CompletionVoice(name, tokens, PromptVoice(answer, tokens, body), scored=body.logprobs is not None)
    return ChunkTelling(voice, include_usage=body.include_usage)


def chat_telling(
    maker: AnswerMaker, body: ChatBody, answer: Answer, name: str, new_reader: NewReader | None
) -> ChunkTelling:
    """Of /v1/chat/completions."""
    tokens = maker.service.text.tokens
    prompt = PromptVoice(answer, tokens, body)
    voice = ChatVoice(name, tokens, prompt, scored=body.logprobs, new_reader=new_reader)
    return ChunkTelling(voice, include_usage=body.include_usage)
