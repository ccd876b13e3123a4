"""TLS from PEM files, with errors that an operator can act on."""

from __future__ import annotations

import ssl
from pathlib import Path

from diptych.common_config import get_router, get_serving


class TlsError(Exception):
    """The files can't be used. The message names the flag and the file, and nothing of what is in them."""


def server_context() -> ssl.SSLContext | None:
    """What `--ssl-certfile` and its neighbours ask for; None for plain HTTP. Raises `TlsError`."""
    serving = get_serving()
    if serving.ssl_certfile is None:
        return None
    return load_server_context(serving.ssl_certfile, serving.ssl_keyfile, serving.ssl_keyfile_password)


def load_server_context(certfile: str, keyfile: str | None, password: str | None) -> ssl.SSLContext:
    """Raises `TlsError`."""
    _readable("--ssl-certfile", certfile)
    if keyfile is not None:
        _readable("--ssl-keyfile", keyfile)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    asked = False

    def give_password() -> str:
        # Without a function OpenSSL would ask at the terminal.
        nonlocal asked
        asked = True
        return password or ""

    key = f"the key in {keyfile or certfile}"
    try:
        context.load_cert_chain(certfile, keyfile, give_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise TlsError(f"{key} is not that of the certificate --ssl-certfile {certfile}") from None
        if asked:
            how = "another" if password else "a"
            raise TlsError(f"{key} is encrypted and needs {how} --ssl-keyfile-password") from None
        files = certfile if keyfile is None else f"{certfile} and {keyfile}"
        raise TlsError(f"--ssl-certfile: no PEM certificate with its key can be read from {files}") from None
    return context


def worker_context() -> ssl.SSLContext | bool:
    """How the router looks at https workers, as aiohttp's `ssl` argument takes it. Raises `TlsError`."""
    router = get_router()
    if not router.worker_tls_verify:
        return False
    if router.worker_ca_file is None:
        return True
    _readable("--worker-ca-file", router.worker_ca_file)
    try:
        return ssl.create_default_context(cafile=router.worker_ca_file)
    except ssl.SSLError:
        raise TlsError(f"--worker-ca-file {router.worker_ca_file}: no PEM certificate in it") from None


def _readable(flag: str, file: str) -> None:
    try:
        Path(file).open("rb").close()
    except OSError as error:
        raise TlsError(f"{flag} {file}: {error.strerror}") from None
