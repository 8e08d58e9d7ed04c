"""TLS certificates that are renewed, damaged or encrypted on disk."""

import asyncio
import contextlib
import logging
import socket
import ssl
import subprocess
from pathlib import Path

import pytest

from serve_llm.common.errors import OptionError
from serve_llm.common.options.sources import make_options
from serve_llm.server.http import connection
from serve_llm.server.http.certificate import CertificateFiles, load_certificate
from serve_llm.server.http.connection import HttpServer
from serve_llm.server.http.startup_app import StartupApp
from serve_llm.server.thread_pool import run_main

ELLIPTIC = ("ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")


def make_certificate(directory: Path, *options: str, key_type: tuple[str, ...] = ELLIPTIC) -> tuple[str, str]:
    """Return the paths of a key and its self-signed certificate."""
    directory.mkdir()
    key, cert = str(directory / "key.pem"), str(directory / "cert.pem")
    command = ["openssl", "req", "-x509", "-newkey", *key_type, "-days", "2"]
    command += ["-keyout", key, "-out", cert, "-subj", "/CN=127.0.0.1", *(options or ("-nodes",))]
    subprocess.run(command, check=True, capture_output=True)
    return key, cert


def make_server(key: str, cert: str) -> HttpServer:
    return HttpServer(StartupApp(with_page=False), make_options("demo").limits, key, cert)


async def read_certificate(address: tuple[str, int]) -> bytes:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    _, writer = await asyncio.open_connection(*address, ssl=context)
    found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    assert isinstance(found, bytes)
    return found


def test_a_renewed_certificate_is_used_and_a_damaged_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection, "TICK_SECONDS", 0.01)
    caplog.set_level(logging.INFO)
    key, cert = map(Path, make_certificate(tmp_path / "served"))
    new_key, new_cert = map(Path, make_certificate(tmp_path / "new"))
    old, new = (ssl.PEM_cert_to_DER_cert(path.read_text()) for path in (cert, new_cert))

    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            server = make_server(str(key), str(cert))
            serving = asyncio.ensure_future(server.serve(sockets=[listener]))
            address = listener.getsockname()
            assert await read_certificate(address) == old
            new_cert.replace(cert)  # its key follows
            while "cannot be used" not in caplog.text:
                assert await read_certificate(address) == old
            new_key.replace(key)
            while await read_certificate(address) == old:
                pass
            assert await read_certificate(address) == new
            cert.unlink()
            assert await read_certificate(address) == new
            server.should_exit = True
            await asyncio.wait_for(serving, 60)

    run_main(asyncio.wait_for(scenario(), 120))
    assert [record.levelname for record in caplog.records if "certificate" in record.getMessage()] == [
        "WARNING",
        "INFO",
    ]


def test_a_key_of_another_type_replaces_the_certificate_of_the_first(tmp_path: Path) -> None:
    """A client that supports both types may prefer the first one."""
    key, cert = map(Path, make_certificate(tmp_path / "served", key_type=("rsa:2048",)))
    new_key, new_cert = map(Path, make_certificate(tmp_path / "new"))
    server = load_certificate(str(key), str(cert))
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_mode = ssl.CERT_NONE
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    client.set_ciphers("ECDHE-RSA-AES128-GCM-SHA256")
    shake_hands(server, client)
    files = CertificateFiles(server, str(key), str(cert))
    new_key.replace(key)
    new_cert.replace(cert)
    files.reload_if_changed()
    with pytest.raises(ssl.SSLError):
        shake_hands(server, client)
    client.set_ciphers("ECDHE-RSA-AES128-GCM-SHA256:ECDHE-ECDSA-AES128-GCM-SHA256")
    shake_hands(server, client)


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True)]
    for _ in range(3):
        for end in ends:
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()


def test_an_encrypted_key_is_refused_instead_of_asking_for_its_password(tmp_path: Path) -> None:
    key, cert = make_certificate(tmp_path / "served", "-passout", "pass:secret")
    with pytest.raises(OptionError, match=r"--ssl-keyfile .*key\.pem.*: the key is encrypted; decrypt it"):
        make_server(key, cert)
