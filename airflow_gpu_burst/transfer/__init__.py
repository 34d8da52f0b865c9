"""
Bulk bytes between files of this node and a store: parallel, capped, verified, going on after a kill.

Here belongs what moves much: files of any size, ranges of objects, server-side copies. What is small and decides
something (log records, listings) goes through `store`. What the bytes mean is told by the layers above.

    mover = open_mover(StoreConfig.from_env(os.environ), Settings(cap=2e9))
    stored = mover.upload("runs/a/data/model.bin", Path("/scratch/model.bin"), state=Path("/scratch/model.state"))
"""

from airflow_gpu_burst.store import StoreConfig
from airflow_gpu_burst.transfer.interface import MIB, Buffer, Mover, Settings, Span, Stored, Tally

__all__ = ["MIB", "Buffer", "Mover", "Settings", "Span", "Stored", "Tally", "open_mover"]


def open_mover(config: StoreConfig, settings: Settings | None = None) -> Mover:
    """
    What moves bytes to and from the store of a configuration. Opens no connection yet.

    :raises StoreError: the configuration cannot be used.
    """
    chosen = settings or Settings()
    if config.directory:
        from airflow_gpu_burst.transfer.directory import DirectoryMover

        return DirectoryMover(config.directory, chosen)
    from airflow_gpu_burst.transfer.s3 import S3Mover

    return S3Mover(config, chosen)
