"""TLS on the listener (the certificate, how old a protocol may be) and to the workers."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from pathlib import Path

from service.secrets import note_file
from service.settings_text import SettingsError
from service.worker_settings import FleetConfig


class TlsVersion(StrEnum):
    """The oldest version that clients may use."""

    TLS_1_2 = "1.2"
    TLS_1_3 = "1.3"


MINIMUM = {
    TlsVersion.TLS_1_2: ssl.TLSVersion.TLSv1_2,
    TlsVersion.TLS_1_3: ssl.TLSVersion.TLSv1_3,
}


class Certificate:
    """A certificate of bidgate's own.

    Args:
        cert_file: PEM, the certificate and those between it and the root.
        key_file: PEM, its private key; None when it stands in cert_file.
        password: of the private key.
        setting: that names cert_file.
    """

    def __init__(
        self,
        cert_file: Path,
        key_file: Path | None,
        password: str | None,
        setting: str = "server.tls_cert_file",
    ) -> None:
        self._setting = setting
        self._cert_file = cert_file
        self._key_file = key_file
        self._password = password

    def load(self, context: ssl.SSLContext) -> None:
        """Load it.

        Raises:
            SettingsError: the files are no certificate and its key.
        """
        for file in (self._cert_file, self._key_file):
            if file is not None:
                note_file(file)
        try:
            # An encrypted key without a password would make OpenSSL ask on the terminal.
            context.load_cert_chain(self._cert_file, self._key_file, self._password or "")
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or getattr(error, "reason", None) or error
            raise SettingsError(
                f"{self._setting}: cannot use {self._cert_file} with its key: {why}"
            ) from error


def server_context(
    certificate: Certificate, minimum: TlsVersion, client_ca_file: Path | None
) -> ssl.SSLContext:
    """A context for a listener.

    Args:
        certificate: the listener's.
        minimum: oldest protocol.
        client_ca_file: PEM; with it, clients must show a certificate signed by one of these.

    Raises:
        SettingsError: a file cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = MINIMUM[minimum]
    context.set_alpn_protocols(["http/1.1"])
    certificate.load(context)
    if client_ca_file is not None:
        _trust(context, client_ca_file, "server.tls_client_ca_file")
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def worker_context(fleet: FleetConfig) -> ssl.SSLContext | None:
    """A context for connections to workers at https; None where the system's will do.

    Raises:
        SettingsError: a file cannot be used.
    """
    if fleet.worker_ca_file is None and fleet.worker_client_cert_file is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["http/1.1"])
    if fleet.worker_ca_file is None:
        context.load_default_certs()
    else:
        _trust(context, fleet.worker_ca_file, "fleet.worker_ca_file")
    if fleet.worker_client_cert_file is not None:
        password = fleet.worker_client_key_password
        Certificate(
            fleet.worker_client_cert_file,
            fleet.worker_client_key_file,
            None if password is None else password.get_secret_value(),
            "fleet.worker_client_cert_file",
        ).load(context)
    return context


@dataclass
class ListenerTls:
    """TLS of the listener, for connections that are accepted from now on.

    Attributes:
        context: a new one when settings or files were read again, as none forgets an authority.
    """

    context: ssl.SSLContext


class WorkerTls:
    """The context for connections to workers that are made from now on.

    A context never forgets an authority, so files that changed make a new one. Connections of the
    context before it serve what runs on them and nothing else (worker_link.py).

    Args:
        fleet: the settings that name the files.

    Attributes:
        context: None where the system's will do.

    Raises:
        SettingsError: a file cannot be used.
    """

    def __init__(self, fleet: FleetConfig) -> None:
        self.context = worker_context(fleet)
        self._made_of = _tls_digest(fleet)

    def renew(self, fleet: FleetConfig) -> None:
        """Look at the settings and their files again; what did not change keeps its connections.

        Raises:
            SettingsError: a file cannot be used; the context stays.
        """
        made_of = _tls_digest(fleet)
        if made_of != self._made_of:
            self.context = worker_context(fleet)
            self._made_of = made_of


def _tls_digest(fleet: FleetConfig) -> bytes:
    """What a context for workers is made of."""
    digest = sha256()
    files = fleet.worker_ca_file, fleet.worker_client_cert_file, fleet.worker_client_key_file
    for path in files:
        digest.update(f"{path}\0".encode())
        if path is not None:
            try:
                digest.update(sha256(path.read_bytes()).digest())
            except OSError:
                digest.update(b"unreadable")
    password = fleet.worker_client_key_password
    digest.update(b"" if password is None else password.get_secret_value().encode())
    return digest.digest()


def _trust(context: ssl.SSLContext, ca_file: Path, setting: str) -> None:
    note_file(ca_file)
    try:
        context.load_verify_locations(ca_file)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise SettingsError(f"{setting}: cannot use {ca_file}: {why}") from error
