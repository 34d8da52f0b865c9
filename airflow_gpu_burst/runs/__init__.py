"""
The four verbs over every route: submit, poll, collect, cancel.

Here the run log (what is true), the route (where it runs) and the spool (what it said) meet. Nothing of Airflow is
imported; operators and triggers hand in what connections say.
"""

from airflow_gpu_burst.runs.following import Follower, Step, unprinted
from airflow_gpu_burst.runs.output import OutputReader
from airflow_gpu_burst.runs.verbs import RunResult, Site, cancel, closed, collect, finished, submit

__all__ = [
    "Follower",
    "OutputReader",
    "RunResult",
    "Site",
    "Step",
    "cancel",
    "closed",
    "collect",
    "finished",
    "submit",
    "unprinted",
]
