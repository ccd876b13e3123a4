"""Certificates for tests, made by the `openssl` command."""

from __future__ import annotations

import subprocess
from pathlib import Path

PASSWORD = "a password of the key"


def make_certificate(folder: Path) -> dict[str, str]:
    """PEM files of a self-signed certificate for localhost and 127.0.0.1: `cert`, `key`, `encrypted` (the key
    with PASSWORD), and `other`, a key of no certificate."""
    cert, key, encrypted, other = (folder / name for name in ("cert.pem", "key.pem", "enc.pem", "other.pem"))
    new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-days", "2"]
    for command in (
        ["req", "-x509", *new_key, "-keyout", key, "-out", cert, *subject],
        ["pkey", "-in", key, "-aes256", "-passout", f"pass:{PASSWORD}", "-out", encrypted],
        ["genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", other],
    ):
        subprocess.run(["openssl", *map(str, command)], check=True, capture_output=True)
    return {"cert": str(cert), "key": str(key), "encrypted": str(encrypted), "other": str(other)}
