"""
Trees of files in the store: checkpoints, results and models.

A tree is its files as objects plus one manifest that names them with size and SHA-256. Data first, then
the manifest, and whoever names the manifest (the run log) makes the tree exist. This is the simple
uploader: file by file, hashed while read. It knows nothing of epochs; keys are given by the caller.
"""

from airflow_gpu_burst.checkpoint.tree import Manifest, restore_tree, restore_trees, save_bytes, save_tree

__all__ = ["Manifest", "restore_tree", "restore_trees", "save_bytes", "save_tree"]
