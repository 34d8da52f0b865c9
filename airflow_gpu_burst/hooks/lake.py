"""An `iceberg_lake` connection becomes a CatalogConfig."""

from __future__ import annotations

from typing import Any

from airflow.sdk import BaseHook

from airflow_gpu_burst.errors import CatalogError, GpuBurstError
from airflow_gpu_burst.lake.catalog import CatalogConfig, catalog_errors, opened
from airflow_gpu_burst.lake.connection import config_of


class LakeHook(BaseHook):
    """
    A catalog of Iceberg tables, by the id of its connection.

    The URI is the connection's host, without `/v1`; login and password are the OAuth2 client's id and
    secret, or the user of a SQL catalog's database. The rest is in the extras, all of them listed in the
    connection's form.
    """

    conn_name_attr = "lake_conn_id"
    default_conn_name = "iceberg_lake_default"
    conn_type = "iceberg_lake"
    hook_name = "Iceberg lake"

    def __init__(self, lake_conn_id: str = default_conn_name) -> None:
        super().__init__()
        self.lake_conn_id = lake_conn_id

    def config(self) -> CatalogConfig:
        """
        The catalog that the connection describes.

        :raises CatalogError: when there is no such connection.
        :raises SpecError: when the connection does not describe a catalog.
        """
        connection = self._connection()
        return config_of(
            self.lake_conn_id,
            host=connection.host,
            port=connection.port,
            login=connection.login,
            password=connection.password,
            extras=connection.extra_dejson,
        )

    def test_connection(self) -> tuple[bool, str]:
        """Open the catalog and list its namespaces, as the Test button does."""
        try:
            config = self.config()
            with opened(config) as catalog, catalog_errors(config):
                count = len(catalog.list_namespaces())
        except GpuBurstError as error:
            return False, str(error)
        return True, f"The catalog answers; it shows {count} namespace{'' if count == 1 else 's'}"

    def _connection(self) -> Any:
        from airflow.sdk.exceptions import AirflowNotFoundException

        try:
            return self.get_connection(self.lake_conn_id)
        except AirflowNotFoundException as error:
            variable = f"AIRFLOW_CONN_{self.lake_conn_id.upper()}"
            raise CatalogError(
                f"there is no connection {self.lake_conn_id!r}. Create it: airflow connections add "
                f"{self.lake_conn_id} --conn-type iceberg_lake --conn-host https://CATALOG/api/catalog "
                '--conn-login CLIENT_ID --conn-password SECRET --conn-extra \'{"warehouse": "..."}\'; '
                f"or set {variable} to the same as JSON"
            ) from error
