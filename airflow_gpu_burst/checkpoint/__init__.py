"""
Trees of files in the store: checkpoints, results and models.

A tree is its data as objects plus one manifest that names them with size and CRC64NVME. Data first, then the manifest,
and whoever names the manifest by its SHA-256 (the run log) makes the tree exist. What epochs are, and which commit
counts, belongs to `runlog`; how bytes move, to `transfer`.

    manifest = save(mover, Path("/scratch/ready/1200"), prefix, state=Path("/scratch/uploads/1200"))
    restored = restore(mover, [(manifest.key, manifest.sha256)], Path("/scratch/restored"), local=kept.folders(run))

Here is what every process may import; further modules are imported by those who need them: `retention` (which commits
stay), `space` (room on the node, kept copies), `collecting` (deleting), `publishing` (a model under its own names),
`verifying` (whether a tree would come back), `agent` (the process that moves checkpoints).
"""

from airflow_gpu_burst.checkpoint.manifest import Entries, Manifest
from airflow_gpu_burst.checkpoint.reading import read_bytes, read_manifest
from airflow_gpu_burst.checkpoint.restoring import Restored, restore
from airflow_gpu_burst.checkpoint.saving import save, save_bytes

__all__ = ["Entries", "Manifest", "Restored", "read_bytes", "read_manifest", "restore", "save", "save_bytes"]
