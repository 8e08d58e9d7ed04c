"""A TLS certificate that is renewed on disk is used for new connections without a restart."""

from __future__ import annotations

import logging
import os
import ssl
from functools import partial

logger = logging.getLogger(__name__)

Stamp = tuple[tuple[int, int, int], ...]


class CertificateFiles:
    """The files of a certificate and its key, which `context`, that of the listening socket, has loaded."""

    def __init__(self, context: ssl.SSLContext, keyfile: str, certfile: str) -> None:
        self._context = context
        self._keyfile = keyfile
        self._certfile = certfile
        self._stamp = self._read_stamp()

    def reload_if_changed(self) -> None:
        """Load both files again if one of them has changed. While they do not fit together, as between two renames, the
        previous certificate stays in use."""
        stamp = self._read_stamp()
        if stamp is None or stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            renewed = load_certificate(self._keyfile, self._certfile)
        except (OSError, ValueError) as error:  # an ssl.SSLError is an OSError
            logger.warning(
                "The changed --ssl-certfile %s and --ssl-keyfile %s cannot be used, so the previous certificate is: %s",
                self._certfile,
                self._keyfile,
                error,
            )
        else:
            # Not loaded into the same context, which would keep a certificate with a key of another type.
            self._context.sni_callback = partial(_set_context, renewed)
            logger.info("New connections use the changed certificate in %s", self._certfile)

    def _read_stamp(self) -> Stamp | None:
        """Return what changes with the content; None while a file is missing."""
        try:
            found = [os.stat(path) for path in (self._certfile, self._keyfile)]
        except OSError:
            return None
        return tuple((status.st_ino, status.st_size, status.st_mtime_ns) for status in found)


def load_certificate(keyfile: str, certfile: str) -> ssl.SSLContext:
    """Raises OSError or ValueError if a server cannot use these files."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certfile, keyfile, _refuse_password)
    return context


def _set_context(renewed: ssl.SSLContext, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
    """Called for each new connection, whether its client names the host or not."""
    connection.context = renewed


def _refuse_password() -> str:
    """Instead of OpenSSL, which would ask for it on the terminal and block the server."""
    raise ValueError("the key is encrypted; decrypt it with `openssl pkey`")
