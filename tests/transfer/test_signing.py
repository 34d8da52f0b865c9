from __future__ import annotations

import datetime
import time
from email.utils import formatdate
from pathlib import Path
from urllib.parse import parse_qsl

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials as BotoCredentials
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_gpu_burst.errors import StoreForbidden
from airflow_gpu_burst.store import StoreConfig
from airflow_gpu_burst.transfer import signing
from airflow_gpu_burst.transfer.signing import Credentials, Keys, Signer, query_string, quoted

TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20)


def fixed(token: str = "") -> Credentials:
    return Credentials(
        StoreConfig(uri="s3://b", access_key_id="access", secret_access_key="secret/+", session_token=token)
    )


@settings(max_examples=60)
@given(
    path=TEXT,
    query=st.dictionaries(TEXT, st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=10), max_size=3),
    token=st.sampled_from(["", "token=="]),
    method=st.sampled_from(["GET", "PUT", "POST"]),
)
def test_signs_as_botocore_does(path: str, query: dict[str, str], token: str, method: str) -> None:
    path = "/bucket/" + path.replace("/", "-")
    headers = {"x-amz-checksum-crc64nvme": "rosUhgp5mIg=", "range": "bytes=0-1"}
    target = quoted(path) + ("?" + query_string(query) if query else "")
    assert dict(parse_qsl(query_string(query), keep_blank_values=True)) == query
    own = Signer(fixed(token), "eu-1").signed(method, quoted(path), query, {"host": "h:9000", **headers})

    request = AWSRequest(method=method, url=f"http://h:9000{target}", headers={"host": "h:9000", **headers})
    request.context["payload_signing_enabled"] = False
    auth = S3SigV4Auth(BotoCredentials("access", "secret/+", token or None), "s3", "eu-1")
    moment = own["x-amz-date"]
    frozen = datetime.datetime.strptime(moment, "%Y%m%dT%H%M%SZ").replace(tzinfo=datetime.UTC)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("botocore.auth.get_current_datetime", lambda *_, **__: frozen.replace(tzinfo=None))
        # Over http botocore signs the body's SHA-256 in any case.
        patch.setattr(auth, "payload", lambda _request: signing.UNSIGNED)
        auth.add_auth(request)
    assert own["authorization"] == request.headers["Authorization"]


def test_the_servers_clock() -> None:
    signer = Signer(fixed())
    hour = 3600
    assert signer.adopt(formatdate(time.time() + hour, usegmt=True))
    moment = signer.signed("GET", "/b", {}, {"host": "h"})["x-amz-date"]
    ahead = datetime.datetime.strptime(moment, "%Y%m%dT%H%M%SZ").replace(tzinfo=datetime.UTC).timestamp() - time.time()
    assert hour - 5 < ahead < hour + 5
    assert not signer.adopt("")
    assert not signer.adopt("yesterday")


def test_the_key_of_the_day_is_not_kept_for_other_keys() -> None:
    signer = Signer(changing := _Changing())
    first = signer.signed("GET", "/b", {}, {"host": "h"})["authorization"]
    changing.keys = Keys("access", "other")
    assert signer.signed("GET", "/b", {}, {"host": "h"})["authorization"] != first


class _Changing(Credentials):
    def __init__(self) -> None:
        self.keys = Keys("access", "secret")

    def now(self) -> Keys:
        return self.keys


def test_keys_of_the_environment_and_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    chain = Credentials(StoreConfig(uri="s3://b"))
    with pytest.raises(StoreForbidden, match="give the pod a role"):
        chain.now()
    file.write_text("[default]\naws_access_key_id = a\naws_secret_access_key = b\n")
    assert chain.now() == Keys("a", "b")
    file.write_text("[default]\naws_access_key_id = c\naws_secret_access_key = d\naws_session_token = e\n")
    assert chain.now() == Keys("a", "b")
    assert chain.renew()
    assert chain.now() == Keys("c", "d", "e")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "f")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "g")
    chain.renew()
    assert chain.now() == Keys("f", "g")


def test_given_keys_cannot_be_renewed() -> None:
    assert fixed("t").now() == Keys("access", "secret/+", "t")
    assert not fixed().renew()
