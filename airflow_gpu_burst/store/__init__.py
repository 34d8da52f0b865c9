"""
The object store: the only thing that the Airflow worker, every cluster and a cut-off pod all see.

Here belongs what moves bytes to and from it: one small interface (`Store`), a directory and S3 behind
it, their errors mapped to ours in one function each, and the probe that tells whether a store keeps its
promise about `create`. What the bytes mean belongs to the layers above. No other module of the package
may use an S3 client.

    store = open_store(StoreConfig.from_env(os.environ))
    store.create("runs/a/log/000000000001.json", data)
"""

from airflow_gpu_burst.store.config import StoreConfig, open_store
from airflow_gpu_burst.store.interface import Entry, Store, check_key
from airflow_gpu_burst.store.probe import assure_conditions, probe_conditions

__all__ = ["Entry", "Store", "StoreConfig", "assure_conditions", "check_key", "open_store", "probe_conditions"]
