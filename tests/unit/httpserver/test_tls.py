"""TLS from files: what works, and what an operator is told when it doesn't."""

from __future__ import annotations

import ssl
import warnings
from pathlib import Path

import pytest
from support.certificates import PASSWORD

from diptych.common_config import ConfigError, Program, Role, override_config, publish, resolve
from diptych.common_config.testing import reset_for_tests
from diptych.httpserver.tls import TlsError, load_server_context, server_context, worker_context

from .conftest import connected, serving

Files = dict[str, str]


def trusting(certificate: Files) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=certificate["cert"])


@pytest.mark.parametrize("key", ["key", "encrypted"])
async def test_requests_over_tls(certificate: Files, key: str) -> None:
    password = PASSWORD if key == "encrypted" else None
    context = load_server_context(certificate["cert"], certificate[key], password)
    async with serving(tls=context) as server, connected(server, trusting(certificate)) as client:
        await client.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await client.answer()).body == b"hello"


def test_certificate_and_key_may_be_one_file(certificate: Files, tmp_path: Path) -> None:
    both = tmp_path / "both.pem"
    both.write_text(Path(certificate["cert"]).read_text() + Path(certificate["key"]).read_text())
    assert load_server_context(str(both), None, None)


async def test_plain_http_on_a_tls_port_and_old_tls_are_refused_quietly(
    certificate: Files, caplog: pytest.LogCaptureFixture
) -> None:
    context = load_server_context(certificate["cert"], certificate["key"], None)
    async with serving(tls=context) as server:
        async with connected(server) as client:
            await client.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"hello" not in await client.ended()
        with warnings.catch_warnings(action="ignore"):
            old = trusting(certificate)
            old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises((ssl.SSLError, ConnectionError)):
            async with connected(server, old):
                raise AssertionError
    assert caplog.records == []


@pytest.mark.parametrize(
    ("cert", "key", "password", "said"),
    [
        ("/none/cert.pem", None, None, "--ssl-certfile /none/cert.pem: No such file or directory"),
        ("cert", "/none/key.pem", None, "--ssl-keyfile /none/key.pem: No such file or directory"),
        ("cert", "other", None, "is not that of the certificate --ssl-certfile"),
        ("cert", "encrypted", None, "is encrypted and needs a --ssl-keyfile-password"),
        ("cert", "encrypted", "not-this-one", "is encrypted and needs another --ssl-keyfile-password"),
        ("cert", None, None, "no PEM certificate with its key"),
        ("key", "cert", None, "no PEM certificate with its key"),
        ("/", None, None, "--ssl-certfile /: Is a directory"),
    ],
)
def test_files_that_can_not_be_used_are_named(
    certificate: Files, cert: str, key: str | None, password: str | None, said: str
) -> None:
    with pytest.raises(TlsError) as caught:
        load_server_context(certificate.get(cert, cert), certificate.get(key or "", key), password)
    assert said in str(caught.value)
    assert password is None or password not in str(caught.value)


def test_settings_choose_what_is_served_and_whom_the_router_trusts(certificate: Files) -> None:
    with override_config():
        assert server_context() is None
        assert worker_context() is True
    with override_config(ssl_certfile=certificate["cert"], ssl_keyfile=certificate["key"]):
        assert isinstance(server_context(), ssl.SSLContext)


def test_the_router_trusts_the_authority_it_is_told(certificate: Files, tmp_path: Path) -> None:
    workers = {"prefill": [["https://127.0.0.1:1", "1"]], "decode": [["https://127.0.0.1:2"]]}
    bad = tmp_path / "bad.pem"
    bad.write_text("nothing")

    def with_flags(**flags: object) -> ssl.SSLContext | bool:
        reset_for_tests()
        try:
            publish(resolve(Program.ROUTER, flags={**workers, **flags}, env={}), role=Role.ROUTER)
            return worker_context()
        finally:
            reset_for_tests()

    assert isinstance(with_flags(worker_ca_file=certificate["cert"]), ssl.SSLContext)
    assert with_flags(worker_tls_verify=False) is False
    with pytest.raises(TlsError, match="no PEM certificate in it"):
        with_flags(worker_ca_file=str(bad))
    with pytest.raises(TlsError, match="No such file"):
        with_flags(worker_ca_file="/none")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"ssl_keyfile": "k"}, "--ssl-keyfile needs --ssl-certfile"),
        ({"ssl_keyfile_password": "hidden"}, "--ssl-keyfile-password needs --ssl-certfile"),
        ({"api_key": "same-key", "admin_api_key": "same-key"}, "--admin-api-key is the same as --api-key"),
        ({"admin_api_key": "with space"}, "--admin-api-key must be ASCII without spaces"),
        ({"api_key": "schlüssel"}, "--api-key must be ASCII without spaces"),
        ({"cluster_secret": "short"}, "--cluster-secret has fewer than 16 characters"),
    ],
)
def test_settings_that_can_not_be_are_refused_without_showing_them(flags: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(Program.COLOCATED, flags={"model_path": "m", **flags}, env={})
    (problem,) = caught.value.problems
    assert said in problem
    assert not any(value in problem for value in flags.values() if len(value) > 3)
