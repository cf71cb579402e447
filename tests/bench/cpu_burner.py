"""Uses a share of a processor until its stdin closes: `python cpu_burner.py SHARE`. As grammars do, in bursts."""

import sys
import threading
import time

BURST_S = 0.1


def burn(share: float) -> None:
    while True:
        end = time.process_time() + BURST_S
        began = time.monotonic()
        while time.process_time() < end:
            sum(range(2000))
        time.sleep(max(0.0, BURST_S / share - (time.monotonic() - began)))


threading.Thread(target=burn, args=(min(1.0, float(sys.argv[1])),), daemon=True).start()
sys.stdin.read()
