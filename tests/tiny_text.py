"""A tiny byte-level text model made on the spot, so that tests of text and HTTP need no checkpoint."""

from __future__ import annotations

from typing import Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from cluster.language.chat_template import ChatTemplate
from cluster.language.text import TextModel

SPECIALS: Final = ("<|end|>", "<|start|>", "<|stop|>")
EOS: Final = 2
MERGES: Final = (("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("a", "b"))
TEMPLATE: Final = (
    "{% for m in messages %}{{ '<|start|>' + m['role'] + ':' + m['content'] + '<|stop|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant:' }}{% endif %}"
)


def tiny_tokenizer() -> Tokenizer:
    """Three special tokens, the 256 bytes, and a few merges; 265 tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*SPECIALS, *alphabet, *("".join(pair) for pair in MERGES)]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=list(MERGES)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIALS])
    return tokenizer


def tiny_text(template: str | None = TEMPLATE) -> TextModel:
    """A text model over `tiny_tokenizer`; `<|stop|>` ends an answer."""
    chat = None if template is None else ChatTemplate(template, bos_token=SPECIALS[1], eos_token=SPECIALS[2])
    return TextModel(tiny_tokenizer(), eos_ids=frozenset({EOS}), chat_template=chat)
