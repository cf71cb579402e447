"""The garbage collector of a stepping process: in a process of its own, since it is set for good."""

import json
import subprocess
import sys

PROGRAM = """
import gc, json
from protos.service.collector import keep_collector_away
kept = [[number] for number in range(1000)]
keep_collector_away()
full = []
gc.callbacks.append(lambda phase, info: full.append(info["generation"]) if phase == "stop" else None)
for _ in range(200_000):
    cycle = []
    cycle.append(cycle)
counts = {"frozen": gc.get_freeze_count(), "left": len(gc.get_objects())}
print(json.dumps({**counts, "full": full.count(2), "young": full.count(0)}))
"""


def test_full_collections_are_rare_and_cycles_still_die():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=30, check=True)
    said = json.loads(done.stdout)
    assert said["frozen"] > 1000
    assert said["young"] > 100
    assert said["full"] == 0
    assert said["left"] < 20_000
