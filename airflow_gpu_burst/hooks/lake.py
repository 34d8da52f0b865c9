"""An `iceberg_lake` connection becomes a CatalogConfig."""

from __future__ import annotations

from airflow.sdk import BaseHook

from airflow_gpu_burst.errors import GpuBurstError
from airflow_gpu_burst.hooks.connections import extras, find
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

        :raises SpecError: there is no such connection, or it does not describe a catalog.
        """
        connection = find(self.lake_conn_id, self.conn_type)
        return config_of(
            self.lake_conn_id,
            host=connection.host,
            port=connection.port,
            login=connection.login,
            password=connection.password,
            extras=extras(connection),
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
