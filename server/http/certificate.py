"""A TLS certificate that is renewed on disk is used for new connections without a restart."""

from __future__ import annotations

import logging
import os
import ssl

logger = logging.getLogger(__name__)

Stamp = tuple[tuple[int, int, int], ...]


class CertificateFiles:
    """The files of a certificate and its key, which `context` has loaded."""

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
            check_certificate(self._keyfile, self._certfile)  # one that fails would make `_context` useless
            self._context.load_cert_chain(self._certfile, self._keyfile, _refuse_password)
        except (OSError, ValueError) as error:  # an ssl.SSLError is an OSError
            logger.warning(
                "The changed --ssl-certfile %s and --ssl-keyfile %s cannot be used, so the previous certificate is: %s",
                self._certfile,
                self._keyfile,
                error,
            )
        else:
            logger.info("New connections use the changed certificate in %s", self._certfile)

    def _read_stamp(self) -> Stamp | None:
        """Return what changes with the content; None while a file is missing."""
        try:
            found = [os.stat(path) for path in (self._certfile, self._keyfile)]
        except OSError:
            return None
        return tuple((status.st_ino, status.st_size, status.st_mtime_ns) for status in found)


def check_certificate(keyfile: str, certfile: str) -> None:
    """Raises OSError or ValueError if a server cannot use these files."""
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, _refuse_password)


def _refuse_password() -> str:
    """Instead of OpenSSL, which would ask for it on the terminal and block the server."""
    raise ValueError("the key is encrypted; decrypt it with `openssl pkey`")
