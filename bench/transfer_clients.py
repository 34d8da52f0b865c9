"""
One client at work, in a process of its own: ours, or a peer.

`python bench/transfer_clients.py NAME` reads a `Job` as JSON from standard input, prepares (imports, connections, one
tiny object), works, and prints `RESULT {"cpu_s": ..., "wall_s": ..., "peak_mib": ...}` of the work alone, whatever it
started included. Part size and connections are the same for all.

Each peer is set up as cheap as it can be with one checksum of the bytes: no payload hash beside it where that can be
had (`unsigned`), CRC64NVME where the tool knows it.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench.meters import peak_mib, reset_peak

MIB = 1 << 20
PART = 32 * MIB
CONNECTIONS = 8
BUCKET = "sink"
REGION = "us-east-1"
ACCESS, SECRET = "bench", "bench-secret"


@dataclass(frozen=True, kw_only=True)
class Job:
    """
    :param endpoint: of the sink.
    :param ca: certificate authority of the sink; empty: plain HTTP.
    :param files: to send, or the folder to save.
    :param cap: bytes per second.
    :param peers: folder of the peers: `python` to import from, `bin` to run from.
    :param target: where a restore puts it.
    :param manifest: key and SHA-256 of what to restore.
    """

    endpoint: str
    ca: str = ""
    files: Sequence[str] = ()
    cap: float | None = None
    peers: str = ""
    target: str = ""
    manifest: tuple[str, str] = ("", "")
    connections: int = CONNECTIONS
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def host(self) -> str:
        """Host and port."""
        return self.endpoint.partition("://")[2]


Work = Callable[[], object]
Sender = Callable[[str, str], object]
"""Sends a file (path, key)."""


# --- ours -------------------------------------------------------------------------------------------------------------


def mover(job: Job) -> Any:
    """Our engine at the sink; bucket `kept` where something is to be restored."""
    from airflow_gpu_burst.store import StoreConfig
    from airflow_gpu_burst.transfer import Settings, open_mover

    config = StoreConfig(
        uri=f"s3://{job.extra.get('bucket', BUCKET)}/ours",
        endpoint_url=job.endpoint,
        region=REGION,
        ca_bundle=job.ca,
        access_key_id=ACCESS,
        secret_access_key=SECRET,
    )
    return open_mover(config, Settings(cap=job.cap, connections=job.connections, part_size=PART))


def ours(job: Job) -> Work:
    """Files of any size, one after the other."""
    engine = mover(job)
    engine.put("warm", b"x")
    return one_by_one(job, lambda path: engine.upload(f"data{path}", Path(path)))


def ours_save(job: Job) -> Work:
    """A checkpoint; tells its manifest."""
    from airflow_gpu_burst.checkpoint import save

    engine = mover(job)
    engine.put("warm", b"x")

    def work() -> dict[str, object]:
        made = save(engine, Path(job.files[0]), f"data/{os.getpid()}")
        return {"manifest": (made.key, made.sha256)}

    return work


def ours_restore(job: Job) -> Work:
    """A checkpoint back into an empty folder."""
    from airflow_gpu_burst.checkpoint import restore

    engine = mover(job)
    engine.put("warm", b"x")
    return lambda: restore(engine, [job.manifest], Path(job.target)) and None


def ours_each(job: Job) -> Work:
    """One PUT for each file, by our own client over connections that stay."""
    engine = mover(job)
    engine.put("warm", b"x")
    return many(job, lambda path, key: engine.put(key, Path(path).read_bytes()))


def one_by_one(job: Job, send: Callable[[str], object]) -> Work:
    """All files of a job."""

    def work() -> None:
        for path in job.files:
            send(path)

    return work


def many(job: Job, send: Sender) -> Work:
    """All files of a folder, as many at once as there are connections."""
    paths = [entry.path for folder in job.files for entry in os.scandir(folder)]
    pool = ThreadPoolExecutor(job.connections)
    return lambda: [*pool.map(lambda path: send(path, "each" + path), paths)] and None


# --- what a socket can do ---------------------------------------------------------------------------------------------


def raw(job: Job) -> Work:
    """Bare `sendfile` of bodies of the same size, each shared by `connections` sockets."""
    import socket

    host, _, port = job.host.partition(":")
    share = os.stat(job.files[0]).st_size // job.connections

    def push(number: int) -> None:
        with socket.create_connection((host, int(port))) as sock:
            for path in job.files:
                sock.sendall(f"PUT /{BUCKET}/raw/{number} HTTP/1.1\r\ncontent-length: {share}\r\n\r\n".encode())
                at, end = number * share, (number + 1) * share
                with open(path, "rb") as file:
                    while at < end:
                        at += os.sendfile(sock.fileno(), file.fileno(), at, end - at)
                sock.recv(4096)

    return lambda: together(push, job.connections)


def raw_receive(job: Job) -> Work:
    """Bare `recv_into` and `pwrite` of the objects that a restore fetches, shared by `connections` sockets."""
    import socket

    host, _, port = job.host.partition(":")
    name, size = job.extra["object"], int(job.extra["size"])
    share = size // job.connections

    def pull(number: int) -> None:
        first, last = number * share, (number + 1) * share - 1
        block = memoryview(bytearray(MIB))
        fd = os.open(Path(job.target) / "raw", os.O_CREAT | os.O_WRONLY, 0o600)
        with socket.create_connection((host, int(port))) as sock:
            sock.sendall(f"GET /{name} HTTP/1.1\r\nrange: bytes={first}-{last}\r\n\r\n".encode())
            head = b""
            while b"\r\n\r\n" not in head:
                head += sock.recv(4096)
            rest = head.partition(b"\r\n\r\n")[2]
            at = first + os.pwrite(fd, rest, first)
            while at <= last:
                at += os.pwrite(fd, block[: sock.recv_into(block)], at)
        os.close(fd)

    return lambda: together(pull, job.connections)


def together(act: Callable[[int], None], count: int) -> None:
    """In `count` threads."""
    threads = [threading.Thread(target=act, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# --- peers ------------------------------------------------------------------------------------------------------------


def boto3_client(job: Job, **config: Any) -> Any:
    """At the sink."""
    import boto3
    from botocore.config import Config

    return boto3.client(
        "s3",
        endpoint_url=job.endpoint,
        region_name=REGION,
        aws_access_key_id=ACCESS,
        aws_secret_access_key=SECRET,
        verify=job.ca or None,
        config=Config(max_pool_connections=job.connections, **config),
    )


def boto3_send(job: Job, extra: dict[str, Any], **config: Any) -> Work:
    """`upload_file`."""
    from boto3.s3.transfer import TransferConfig

    client = boto3_client(job, **config)
    how = TransferConfig(multipart_threshold=PART, multipart_chunksize=PART, max_concurrency=job.connections)
    client.put_object(Bucket=BUCKET, Key="warm", Body=b"x")
    return one_by_one(job, lambda path: client.upload_file(path, BUCKET, f"boto3{path}", Config=how, ExtraArgs=extra))


def boto3_default(job: Job) -> Work:
    """As it comes."""
    return boto3_send(job, {}, s3={"addressing_style": "path"})


def boto3_tuned(job: Job) -> Work:
    """No SHA-256 of the body over plain HTTP; CRC64NVME."""
    style = {"addressing_style": "path", "payload_signing_enabled": False}
    return boto3_send(job, {"ChecksumAlgorithm": "CRC64NVME"}, s3=style)


def boto3_each(job: Job) -> Work:
    """One PUT for each file."""
    client = boto3_client(job, s3={"addressing_style": "path"})
    client.put_object(Bucket=BUCKET, Key="warm", Body=b"x")
    return many(job, lambda path, key: client.put_object(Bucket=BUCKET, Key=key, Body=Path(path).read_bytes()))


def awscrt(job: Job) -> Work:
    """The CRT's S3 client: native threads, CRC64NVME, unsigned payload."""
    from awscrt.auth import AwsCredentialsProvider
    from awscrt.http import HttpHeaders, HttpRequest
    from awscrt.io import ClientBootstrap, ClientTlsContext, DefaultHostResolver, EventLoopGroup, TlsContextOptions
    from awscrt.s3 import (
        S3ChecksumAlgorithm,
        S3ChecksumConfig,
        S3ChecksumLocation,
        S3Client,
        S3RequestTlsMode,
        S3RequestType,
        create_default_s3_signing_config,
    )

    group = EventLoopGroup()
    bootstrap = ClientBootstrap(group, DefaultHostResolver(group))
    provider = AwsCredentialsProvider.new_static(ACCESS, SECRET)
    options = None
    if job.ca:
        tls = TlsContextOptions()
        tls.override_default_trust_store_from_path(None, job.ca)
        options = ClientTlsContext(tls).new_connection_options()
    client = S3Client(
        bootstrap=bootstrap,
        region=REGION,
        signing_config=create_default_s3_signing_config(region=REGION, credential_provider=provider),
        tls_mode=S3RequestTlsMode.ENABLED if job.ca else S3RequestTlsMode.DISABLED,
        tls_connection_options=options,
        part_size=PART,
        multipart_upload_threshold=PART,
        throughput_target_gbps=25.0,
    )
    crc = S3ChecksumConfig(algorithm=S3ChecksumAlgorithm.CRC64NVME, location=S3ChecksumLocation.HEADER)

    def send(path: str) -> None:
        headers = HttpHeaders([("host", job.host), ("content-length", str(os.stat(path).st_size))])
        request = HttpRequest("PUT", f"/{BUCKET}/awscrt{path}", headers)
        client.make_request(
            type=S3RequestType.PUT_OBJECT,
            request=request,
            send_filepath=path,
            checksum_config=crc,
            max_active_connections_override=job.connections,
        ).finished_future.result()

    send(__file__)
    return one_by_one(job, send)


def obstore_send(job: Job, **how: Any) -> Work:
    """`obstore.put` of a path."""
    sys.path.append(f"{job.peers}/python")
    obstore = import_module("obstore")
    store = import_module("obstore.store").S3Store(
        BUCKET,
        endpoint=job.endpoint,
        region=REGION,
        access_key_id=ACCESS,
        secret_access_key=SECRET,
        virtual_hosted_style_request=False,
        client_options={"allow_http": True, "timeout": "600s", "allow_invalid_certificates": bool(job.ca)},
        **how,
    )

    def send(path: str) -> None:
        obstore.put(store, "obstore" + path, Path(path), chunk_size=PART, max_concurrency=job.connections)

    obstore.put(store, "warm", b"x")
    return one_by_one(job, send)


def obstore_default(job: Job) -> Work:
    """As it comes: SHA-256 of the body."""
    return obstore_send(job)


def obstore_tuned(job: Job) -> Work:
    """Unsigned payload, CRC64NVME."""
    return obstore_send(job, unsigned_payload=True, checksum_algorithm="CRC64NVME")


def s3torch(job: Job) -> Work:
    """The client under s3torchconnector; takes bytes, so the file is read here."""
    sys.path.append(f"{job.peers}/python")
    client_of = import_module("s3torchconnectorclient._mountpoint_s3_client").MountpointS3Client
    os.environ.update({"AWS_ACCESS_KEY_ID": ACCESS, "AWS_SECRET_ACCESS_KEY": SECRET})
    client = client_of(
        region=REGION, endpoint=job.endpoint, force_path_style=True, part_size=PART, throughput_target_gbps=25.0
    )

    def send(path: str) -> None:
        stream = client.put_object(BUCKET, f"s3torch{path}")
        with open(path, "rb", buffering=0) as file:
            while block := file.read(8 * MIB):
                stream.write(block)
        stream.close()

    send(__file__)
    return one_by_one(job, send)


def program(job: Job, *command: str, **env: str) -> Work:
    """A tool that is a process for each run; FILE in the command is the file, its start counts."""
    environ = {**os.environ, "AWS_ACCESS_KEY_ID": ACCESS, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": REGION, **env}
    if job.ca:
        environ |= {"SSL_CERT_FILE": job.ca, "AWS_CA_BUNDLE": job.ca}

    def work() -> None:
        for path in job.files:
            line = [part.replace("FILE", path) for part in command]
            done = subprocess.run(
                [f"{job.peers}/bin/{line[0]}", *line[1:]], env=environ, capture_output=True, text=True
            )
            if done.returncode:
                raise SystemExit(f"exit code {done.returncode}: {done.stderr.strip() or done.stdout.strip()}")

    return work


def s5cmd(job: Job) -> Work:
    """`s5cmd cp`."""
    how = ("-c", str(job.connections), "-p", str(PART // MIB))
    return program(job, "s5cmd", "--endpoint-url", job.endpoint, "cp", *how, "FILE", f"s3://{BUCKET}/s5cmdFILE")


def rclone(job: Job) -> Work:
    """`rclone copyto`; without the MD5 of the whole file, which it would compute beside that of the parts."""
    how = ("--s3-chunk-size", "32Mi", "--s3-upload-cutoff", "32Mi", "--s3-upload-concurrency", str(job.connections))
    quiet = (
        "--s3-no-check-bucket",
        "--s3-disable-checksum",
        "--s3-use-unsigned-payload=true",
        "--config=",
        "--s3-no-head",
    )
    remote = f":s3,provider=Other,env_auth=true,endpoint='{job.endpoint}',region={REGION}:{BUCKET}/rcloneFILE"
    trust = ("--ca-cert", job.ca) if job.ca else ()
    return program(job, "rclone", "copyto", *how, *quiet, *trust, "FILE", remote)


CLIENTS: dict[str, Callable[[Job], Work]] = {
    "ours": ours,
    "ours_save": ours_save,
    "ours_restore": ours_restore,
    "ours_each": ours_each,
    "raw": raw,
    "raw_receive": raw_receive,
    "boto3": boto3_default,
    "boto3, tuned": boto3_tuned,
    "boto3_each": boto3_each,
    "awscrt": awscrt,
    "obstore": obstore_default,
    "obstore, tuned": obstore_tuned,
    "s3torchconnector": s3torch,
    "s5cmd": s5cmd,
    "rclone": rclone,
}


def spent() -> float:
    """CPU seconds of this process and of what it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def main() -> int:
    """Do one job."""
    given = json.load(sys.stdin)
    job = Job(**{**given, "manifest": tuple(given.get("manifest", ("", "")))})
    work = CLIENTS[sys.argv[1]](job)
    reset_peak()
    began, before = time.perf_counter(), spent()
    told = work()
    result = {"wall_s": time.perf_counter() - began, "cpu_s": spent() - before, "peak_mib": peak_mib()}
    print("RESULT", json.dumps(result | (told if isinstance(told, dict) else {})))
    return 0


if __name__ == "__main__":
    sys.exit(main())
