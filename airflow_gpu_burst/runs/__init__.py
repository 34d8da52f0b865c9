"""
The four verbs over every route: submit, poll, collect, cancel.

Here the run log (what is true), the route (where it runs) and the spool (what it said) meet. Nothing of Airflow is
imported; operators and triggers hand in what connections say.
"""

from airflow_gpu_burst.runs.concluding import cancel, closed, collect, finished
from airflow_gpu_burst.runs.following import Follower, Step, unprinted
from airflow_gpu_burst.runs.output import OutputReader
from airflow_gpu_burst.runs.progress import read_status
from airflow_gpu_burst.runs.requests import recall
from airflow_gpu_burst.runs.site import RunResult, Site
from airflow_gpu_burst.runs.status import RunStatus
from airflow_gpu_burst.runs.submitting import submit

__all__ = [
    "Follower",
    "OutputReader",
    "RunResult",
    "RunStatus",
    "Site",
    "Step",
    "cancel",
    "closed",
    "collect",
    "finished",
    "read_status",
    "recall",
    "submit",
    "unprinted",
]
