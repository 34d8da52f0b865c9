"""Kubernetes objects of a run as data: what to submit, and what the API's answers mean. Pure, no I/O."""

from airflow_gpu_burst.workloads.adopting import adopt_manifest, kind_of_manifest, parse_manifest, ranks_of_manifest
from airflow_gpu_burst.workloads.following import PodFacts, events_in_words, pods_of
from airflow_gpu_burst.workloads.identity import GENERATION, MANAGED, NAME, RUN_KEY, STORE
from airflow_gpu_burst.workloads.kinds import Kind
from airflow_gpu_burst.workloads.reading import when as seconds
from airflow_gpu_burst.workloads.rendering import render
from airflow_gpu_burst.workloads.reporting import report
from airflow_gpu_burst.workloads.request import Request
from airflow_gpu_burst.workloads.snapshot import Object, Snapshot
from airflow_gpu_burst.workloads.verdict import interpret

__all__ = [
    "GENERATION",
    "Kind",
    "MANAGED",
    "NAME",
    "Object",
    "PodFacts",
    "RUN_KEY",
    "Request",
    "STORE",
    "Snapshot",
    "adopt_manifest",
    "events_in_words",
    "interpret",
    "kind_of_manifest",
    "parse_manifest",
    "pods_of",
    "ranks_of_manifest",
    "render",
    "report",
    "seconds",
]
