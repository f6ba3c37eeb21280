"""Programs that several tests run."""

FOREVER = "while True: pass"

#: Half a second of the processor. WASI has no clock of the processor (its ``process_time()`` is the time that has
#: passed), so there a fixed piece of work takes some 2 s of it. In a guest whose processor is emulated that clock runs
#: on while the host serves others, so a smaller piece comes first, which takes more than 1 s there.
BURN = """
import sys, time
for _ in range(20_000_000 if sys.platform == "wasi" else 3_000_000):
    pass
while sys.platform != "wasi" and time.process_time() < 0.6:
    pass
"""

SLEEP = "import time\ntime.sleep(600)"

#: Forks a grandchild that left the session, holds stdout and sleeps; then ends.
DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        print("daemon", flush=True)
        time.sleep(600)
    os._exit(0)
os.wait()
print("main", flush=True)
"""

#: Ignores every signal that can be ignored, in a thread and a child as well.
STUBBORN = """
import os, signal, threading
for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
os.fork()
threading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True).start()
print("ready", flush=True)
while True:
    pass
"""
