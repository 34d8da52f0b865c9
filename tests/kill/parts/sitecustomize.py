"""
On the path of the pods of these tests: their agents send parts of KILL_TEST_PART_SIZE bytes instead of 32 MiB.

A checkpoint that is small has several parts then, and the runtime has no setting for it.
"""

import json
import os

_NAME = "GPU_BURST_TRANSFER"
if _NAME in os.environ:
    os.environ[_NAME] = json.dumps(
        {**json.loads(os.environ[_NAME]), "part_size": int(os.environ["KILL_TEST_PART_SIZE"])}
    )
