"""Its import never ends."""

import threading

threading.Event().wait()
