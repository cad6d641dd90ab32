"""What the HTTP endpoints can be told, validated once and never changed after."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr

from cluster.access.tenants import tenant_name

ServedNames = tuple[Annotated[str, Field(min_length=1)], ...]
"""What clients call a model."""


class KeySettings(BaseModel):
    """An API key, of which only the SHA-256 is known here, in hexadecimal digits.

    * `tenant`: on whose account its requests run, whatever their headers say; None: an account of the key's own.
    * `max_open_requests`, `requests_per_minute`: of those that ask for tokens, at each gateway; None: without limit.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    tenant: Annotated[str, AfterValidator(tenant_name)] | None = None
    max_open_requests: int | None = Field(default=None, ge=1)
    requests_per_minute: int | None = Field(default=None, ge=1)


class ApiSettings(BaseModel):
    """Sizes in bytes or characters, times in seconds.

    * `served_model_names`: names that clients may use; the first one answers. Empty: the model's own name.
    * `api_keys`, and `keys` of which only hashes are known: any of them opens the endpoints; without any they are open.
    * `admin_keys` open what changes the service, and everything else.
    * `open_paths`: answered without a key.
    * `tenant_from_header`: whether a client may name its tenant; else its key does. Who may can claim several shares,
      so say no unless those that send the header are trusted, or a proxy in front sets it.
    * `body_timeout_s`: so long a client may take to send its body.
    * `default_max_tokens`: of a text completion that does not say; a chat gets what is left of the context.
    * `max_choices`: n of one prompt. `max_sequences`: choices of all prompts of one request together.
    * `inline_size`: longer texts and 16 times larger bodies are read by a thread, at most `text_threads` at once
      with `max_long_texts` more waiting. They also write log probabilities, where a sixteenth as many are to be written
      at once.
    * `max_sessions`, `max_sessions_per_key`: open sessions of the service, 0 for none at all; idle ones are forgotten
      after `session_idle_s`.
    * `batch_store`: a folder where files and batches are kept, with the prompts in them; None: nothing is kept. The
      gateways of one host may share it.
    * `max_files_per_key` files of `max_file_bytes`, each uploaded within `file_timeout_s`; `max_open_batches_per_key`
      batches of one key that have not ended, of `max_batch_lines` lines.
    * `embedding_pooling`: how an embedding is made of a text's hidden states where the request does not say.
    * `keepalive_s`: a stream that has nothing to say for so long says that it lives.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    served_model_names: ServedNames = ()
    api_keys: tuple[Annotated[SecretStr, Field(min_length=1)], ...] = ()
    keys: tuple[KeySettings, ...] = ()
    admin_keys: tuple[Annotated[SecretStr, Field(min_length=1)], ...] = ()
    open_paths: frozenset[str] = frozenset({"/health", "/ready", "/version", "/metrics"})
    tenant_from_header: bool = True
    max_body_bytes: int = Field(default=16 * 1024 * 1024, ge=1)
    body_timeout_s: float = Field(default=60.0, gt=0)
    default_max_tokens: int = Field(default=16, ge=1)
    max_choices: int = Field(default=128, ge=1)
    max_sequences: int = Field(default=1024, ge=1)
    inline_size: int = Field(default=4096, ge=0)
    text_threads: int = Field(default=2, ge=1)
    max_long_texts: int = Field(default=64, ge=0)
    keepalive_s: float = Field(default=10.0, gt=0)
    max_sessions: int = Field(default=4096, ge=0)
    max_sessions_per_key: int = Field(default=1024, ge=0)
    session_idle_s: float = Field(default=600.0, gt=0)
    batch_store: str | None = None
    max_file_bytes: int = Field(default=128 * 1024 * 1024, ge=1)
    file_timeout_s: float = Field(default=600.0, gt=0)
    max_files_per_key: int = Field(default=1000, ge=1)
    max_batch_lines: int = Field(default=50_000, ge=1)
    max_open_batches_per_key: int = Field(default=32, ge=1)
    embedding_pooling: Literal["last", "mean"] = "last"
    cors_origins: tuple[str, ...] = ("*",)
