"""Who may use bidgate, in the settings: clients' keys with tenants and limits, the admin key."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated, ClassVar, Final

from cyclopts import Parameter
from pydantic import BeforeValidator, ConfigDict, TypeAdapter, ValidationError

from service.secrets import Secret
from service.settings_text import SettingsError, describe, listed, read_yaml

KEYS_MAX: Final = 1024
TENANT_CHARS_MAX: Final = 128
SHA256_HEX: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientKey:
    """One API key: who it stands for and what it may use; limits left out do not limit.

    Attributes:
        key: the key itself, or {env: NAME} or {file: PATH}.
        key_sha256: instead of it, the SHA-256 of the key in hexadecimal.
        tenant: who pays; names the key's requests in metrics.
        requests_max: requests that it may have inside at once.
        requests_per_minute: rate of requests; a minute's worth may come at once.
        tokens_per_minute: rate of prompt and output tokens, of all prompts and routes; a minute's
            worth may come at once.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    key: Secret | None = None
    key_sha256: str | None = None
    tenant: str = ""
    requests_max: int | None = None
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None

    def __post_init__(self) -> None:
        """Refuse keys that are none and limits that let nothing through."""
        if (self.key is None) == (self.key_sha256 is None):
            raise ValueError("an entry has either key or key_sha256")
        if self.key_sha256 is not None and not SHA256_HEX.fullmatch(self.key_sha256):
            raise ValueError("key_sha256 must be 64 hexadecimal digits in lower case")
        if len(self.tenant) > TENANT_CHARS_MAX or not (
            self.tenant.isascii() and (self.tenant.isprintable())
        ):
            raise ValueError(
                f"tenant must be printable ASCII of at most {TENANT_CHARS_MAX} characters"
            )
        for name in ("requests_max", "requests_per_minute", "tokens_per_minute"):
            limit = getattr(self, name)
            if limit is not None and not 0 < limit < float("inf"):
                raise ValueError(f"{name} must be positive, got {limit}")

    @property
    def digest(self) -> bytes:
        """SHA-256 of the key."""
        if self.key is None:
            return bytes.fromhex(self.key_sha256 or "")
        return sha256(self.key.get_secret_value().encode()).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthConfig:
    """Who may ask what; without any key every route is open.

    Attributes:
        keys: clients' keys, each with a tenant and limits.
        keys_file: YAML file with more of them, a list.
        metrics_open: let /metrics be read without a key; it holds nothing that a client sent.
        admin_key: opens /admin/v1; without it there is no such route.
    """

    keys: Annotated[tuple[ClientKey, ...], BeforeValidator(listed), Parameter(parse=False)] = ()
    keys_file: Path | None = None
    metrics_open: bool = True
    admin_key: Secret | None = None


def client_keys(config: AuthConfig) -> tuple[ClientKey, ...]:
    """All clients' keys, those of the file included.

    Raises:
        SettingsError: the file cannot be used, or there are more than KEYS_MAX.
    """
    keys = (*config.keys, *(() if config.keys_file is None else _read(config.keys_file)))
    if len(keys) > KEYS_MAX:
        raise SettingsError(f"auth.keys: at most {KEYS_MAX} keys can be used, got {len(keys)}")
    return keys


def refuse_repeated(keys: Sequence[ClientKey]) -> None:
    """Refuse a key that stands twice: which of its limits should count?

    Raises:
        SettingsError: one does; says which entries, not the key.
    """
    first_place: dict[bytes, int] = {}
    for place, key in enumerate(keys, start=1):
        before = first_place.setdefault(key.digest, place)
        if before != place:
            raise SettingsError(f"auth.keys: entry {place} has the same key as entry {before}")


def _read(path: Path) -> tuple[ClientKey, ...]:
    entries = read_yaml(path)
    try:
        return TypeAdapter(tuple[ClientKey, ...]).validate_python(entries or ())
    except ValidationError as error:
        known = ClientKey.__dataclass_fields__
        raise SettingsError(*describe(error, known, path)) from None
