"""Entry points: `swarmq`, which is also `python -m swarmq`, and the daemons' own commands.

While modules are imported, Ctrl-C ends the process at once and in silence, as SIGTERM does. A KeyboardInterrupt would print a traceback,
or be lost in a callback of the import system.
"""

import signal
import threading

# only the main thread may set handlers; and in the background of a script SIGINT is ignored, and stays so
_interrupts = (
    threading.current_thread() is threading.main_thread()
    and signal.getsignal(signal.SIGINT) is signal.default_int_handler
)
if _interrupts:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from swarmq.cli import collector, learner, main, proxy  # noqa: E402 - the slow imports that Ctrl-C may end

if _interrupts:
    signal.signal(signal.SIGINT, signal.default_int_handler)

__all__ = ["collector", "learner", "main", "proxy"]

if __name__ == "__main__":
    main()
