"""A simulated worker as a process that says at its end which modules it had loaded."""

import json
import sys

from worker_svc.__main__ import main

if __name__ == "__main__":
    code = main(sys.argv[1:])
    print(json.dumps({"code": code, "torch": "torch" in sys.modules, "kernels": "kernels.native" in sys.modules}))
