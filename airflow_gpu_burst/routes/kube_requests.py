"""
Requests to one cluster's API: credentials renewed when they are refused, waits that the server asks for, errors
told apart. One request at a time per call; usable from many threads.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode

import urllib3

from airflow_gpu_burst.errors import ClusterUnauthorized, ClusterUnreachable, GpuBurstError, SpecError
from airflow_gpu_burst.routes import KubeConfig
from airflow_gpu_burst.routes.kube_answers import ServerClock
from airflow_gpu_burst.routes.kube_errors import Asked, Throttled, error_of
from airflow_gpu_burst.routes.kube_login import Login, login_of
from airflow_gpu_burst.workloads.snapshot import Object

CONNECT_S, READ_S = 5.0, 30.0
PATIENT_TRIES, PATIENT_S = 3, 5.0
"""How often, and for how many seconds at most each time, a throttled read or delete waits as the server asked."""
RENEW_EVERY_S = 5.0
"""Credentials are read again at most this often: an exec plugin is a process, and may ask another server."""


class Requests:
    """
    See the module.

    :param connect: from a login to the `kubernetes` package's ApiClient; called again when credentials are renewed.
    """

    def __init__(
        self,
        config: KubeConfig,
        connect: Callable[[Login], Any],
        *,
        clock: Callable[[], float],
        monotonic: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._config, self._connect = config, connect
        self._now, self._monotonic, self._sleep = clock, monotonic, sleep
        self._lock = threading.Lock()
        self._renewed_at = float("-inf")
        self.clock = ServerClock()
        self.login = login_of(config)
        self._client = connect(self.login)

    def json(
        self, asked: Asked, method: str, path: str, *, query: dict[str, str] | None = None, body: Object | None = None
    ) -> Object:
        """
        The object that the server answers with. A read whose answer breaks off is sent once more.

        :raises ClusterUnreachable: and whatever `error_of` makes of a refusal.
        """
        try:
            data = self.send(asked, method, path, query=query, body=body).data
        except (urllib3.exceptions.HTTPError, OSError) as broken:
            if method != "GET":
                raise self._unreachable(asked, broken) from broken
            data = self._once_more(asked, path, query)
        try:
            found = json.loads(data)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise ClusterUnreachable(
                f"{self.login.where} answered {asked} with what is not the Kubernetes API's. Check its address"
            )
        return found

    def _once_more(self, asked: Asked, path: str, query: dict[str, str] | None) -> bytes:
        try:
            return self.send(asked, "GET", path, query=query).data
        except (urllib3.exceptions.HTTPError, OSError) as broken:
            raise self._unreachable(asked, broken) from broken

    def send(
        self,
        asked: Asked,
        method: str,
        path: str,
        *,
        query: dict[str, str] | None = None,
        body: Object | None = None,
        read_s: float = READ_S,
        patient: bool = True,
    ) -> urllib3.BaseHTTPResponse:
        """
        One request; again with renewed credentials, after a wait that the server asked for, and (reads only) when an
        idle connection turned out to be dead. Any other answer than 2xx is raised.
        """
        parameters = {key: value for key, value in (query or {}).items() if value}
        url = f"{path}?{urlencode(parameters)}" if parameters else path
        tries = {"renew": 1, "wait": PATIENT_TRIES if patient and method != "POST" else 0, "dead": int(method == "GET")}
        while True:
            client = self._client
            try:
                response = self._once(client, method, url, body, read_s)
                if response.status < 300:
                    return response
                error = error_of(
                    response.status, response.data, asked, self.login.where, response.headers.get("Retry-After", "")
                )
            except (urllib3.exceptions.ProtocolError, ConnectionError) as broken:
                if not tries["dead"]:
                    raise self._unreachable(asked, broken) from broken
                tries["dead"] -= 1
                continue
            except (urllib3.exceptions.HTTPError, OSError) as broken:
                raise self._unreachable(asked, broken) from broken
            if not self._again(error, client, tries):
                raise error

    def _again(self, error: GpuBurstError, client: Any, tries: dict[str, int]) -> bool:
        """Whether a refusal may pass when asked again; the waiting is done here."""
        if isinstance(error, ClusterUnauthorized) and tries["renew"]:
            tries["renew"] -= 1
            return self._renewed(client)
        if isinstance(error, Throttled) and tries["wait"]:
            tries["wait"] -= 1
            self._sleep(min(error.retry_after, PATIENT_S))
            return True
        return False

    def _once(self, client: Any, method: str, url: str, body: Object | None, read_s: float) -> urllib3.BaseHTTPResponse:
        headers = {"Accept": "application/json", "User-Agent": "airflow-gpu-burst"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        with self._lock:  # an expired token is fetched anew here: once, not by each thread
            client.update_params_for_auth(headers, [], ["BearerToken"])
        sent = self._now()
        response: urllib3.BaseHTTPResponse = client.rest_client.pool_manager.request(
            method,
            client.configuration.host + url,
            body=None if body is None else json.dumps(body).encode(),
            headers=headers,
            preload_content=False,
            timeout=urllib3.Timeout(connect=CONNECT_S, read=read_s),
        )
        self.clock.heard(response.headers.get("Date", ""), sent, self._now())
        return response

    def _renewed(self, used: Any) -> bool:
        """Read the credentials again: files, exec plugin, pod's token. False if that was done a moment ago."""
        with self._lock:
            if self._client is not used:
                return True  # another thread did
            if self._monotonic() - self._renewed_at < RENEW_EVERY_S:
                return False
            self._renewed_at = self._monotonic()
            try:
                self.login = login_of(self._config)
                self._client = self._connect(self.login)
            except SpecError as error:
                raise ClusterUnauthorized(f"{self.login.where}: 401, and no new credentials: {error}") from error
            return True

    def _unreachable(self, asked: Asked, error: Exception) -> ClusterUnreachable:
        return ClusterUnreachable(
            f"no answer from {self.login.where} to {asked}: {error}. "
            "Check that its API server is up and can be reached from this machine"
        )
