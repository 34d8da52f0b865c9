"""Starts the sink, with a certificate authority of its own, and runs clients beside it."""

from __future__ import annotations

import datetime
import ipaddress
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.transfer_clients import Job

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Sink:
    """
    A running one.

    :param ca: file with its certificate authority.
    """

    http: int
    https: int
    ca: Path

    def job(self, *, tls: bool = False, **values: Any) -> Job:
        """What a client needs to reach it."""
        endpoint = f"https://127.0.0.1:{self.https}" if tls else f"http://127.0.0.1:{self.http}"
        return Job(endpoint=endpoint, ca=str(self.ca) if tls else "", **values)

    def meter(self, verb: str = "meter") -> dict[str, Any]:
        """What came since the last `reset`."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http}/-/{verb}") as answer:
            return dict(json.load(answer))


@contextmanager
def sink(folder: Path) -> Iterator[Sink]:
    """
    A server in a process of its own.

    :param folder: for what it keeps.
    """
    ca = certificate(folder)
    kept = folder / "kept"
    kept.mkdir()
    command = [sys.executable, str(HERE / "transfer_sink.py"), str(kept), str(folder / "server.pem")]
    process = subprocess.Popen(
        [*command, str(folder / "server.key")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield Sink(**json.loads(process.stdout.readline()), ca=ca)
    finally:
        process.kill()
        process.wait()


@dataclass(frozen=True)
class Run:
    """
    What a client told and what the sink saw.

    :param told: the client's own result.
    :param seen: see `Meter.told`, since just before the work.
    """

    told: dict[str, Any]
    seen: dict[str, Any]
    sink_cpu_s: float

    @property
    def cpu_s(self) -> float:
        """CPU seconds of the client's work."""
        return float(self.told["cpu_s"])

    @property
    def wall_s(self) -> float:
        """From the first byte at the sink to the last."""
        return float(self.seen["seconds"])

    def bound(self) -> str:
        """What kept it from being faster."""
        wall = max(float(self.told["wall_s"]), 1e-9)
        client, server = self.cpu_s / wall, self.sink_cpu_s / wall
        cores = os.cpu_count() or 1
        busy = "CPU" if client + server > 0.85 * cores else "waiting, not CPU"
        return f"{busy}: client {client:.2f} and sink {server:.2f} of {cores} cores"


class Failed(Exception):
    """A client did not do its work; says why."""


def run(server: Sink, name: str, job: Job) -> Run:
    """
    One client in a fresh process.

    :raises Failed: it ended with an error.
    """
    before = server.meter("reset")
    command = [sys.executable, "-W", "ignore", str(HERE / "transfer_clients.py"), name]
    done = subprocess.run(command, input=json.dumps(asdict(job)), capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    if done.returncode or not lines:
        raise Failed(f"{name}: {(done.stderr.strip() or done.stdout.strip())[-1500:]}")
    seen = server.meter()
    return Run(json.loads(lines[0].removeprefix("RESULT")), seen, seen["cpu_s"] - before["cpu_s"])


def certificate(folder: Path) -> Path:
    """Make an authority and a certificate for 127.0.0.1: `server.pem`, `server.key` and what is returned, `ca.pem`."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    now = datetime.datetime.now(datetime.UTC)
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "benchmark")])

    def signed(name: x509.Name, public: ec.EllipticCurvePublicKey, extension: x509.ExtensionType) -> bytes:
        builder = x509.CertificateBuilder().subject_name(name).issuer_name(issuer).public_key(public)
        builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(days=1))
        builder = builder.not_valid_after(now + datetime.timedelta(days=1)).add_extension(extension, critical=False)
        return builder.sign(ca_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    authority = signed(issuer, ca_key.public_key(), x509.BasicConstraints(ca=True, path_length=None))
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    host = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    (folder / "ca.pem").write_bytes(authority)
    (folder / "server.pem").write_bytes(signed(host, key.public_key(), names))
    plain = serialization.NoEncryption()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    (folder / "server.key").write_bytes(pem)
    return folder / "ca.pem"
