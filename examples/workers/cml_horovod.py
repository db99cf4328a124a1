"""A script written for a Cloudera session. It runs there, and here:

    python -m hora.compat examples/workers/cml_horovod.py

It launches two idle workers, reads their addresses, and runs horovodrun across them.
"""

import subprocess
import sys
from pathlib import Path

import cml.workers_v1 as workers

try:
    import cdsw  # older engines have only this one
except ImportError:
    cdsw = workers

NUM_WORKERS = 2
TRAINING = ["examples/image_classifier.py", "--width", "4", "--epochs", "1", "--log-dir", "out/cml"]

launched = cdsw.launch_workers(
    n=NUM_WORKERS, cpu=0.5, memory=1, code="import time\nwhile True:\n    time.sleep(60)", env={"ROLE": "trainer"}
)
result = cdsw.await_workers([worker["id"] for worker in launched], wait_for_completion=False, timeout_seconds=120)
if result["failures"]:
    sys.exit(f"workers that do not run: {result['failures']}")

hosts = ",".join(worker["ip_address"] + ":1" for worker in workers.list_workers())
horovodrun = str(Path(sys.executable).with_name("horovodrun"))
command = sys.argv[1:] or [sys.executable, *TRAINING]
status = subprocess.call([horovodrun, "-np", str(NUM_WORKERS), "-H", hosts, *command])

print("stopped:", [response.status_code for response in workers.stop_workers()])
sys.exit(status)
