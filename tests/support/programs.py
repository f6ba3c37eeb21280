"""Programs that several tests run."""

FOREVER = "while True: pass"

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
