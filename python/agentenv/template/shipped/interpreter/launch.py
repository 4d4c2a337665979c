"""``python3 .../launch.py -f FILE [--IPKernelApp.…]``: a kernel of ipykernel that drops no output.

Run by its path, so that no file of the user's folder is taken for it.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    # This folder; the user's is put in its place by IPython, once all is loaded.
    if sys.path[0] == str(Path(__file__).parent):
        del sys.path[0]
    kernelapp: Any = importlib.import_module("ipykernel.kernelapp")
    zmq: Any = importlib.import_module("zmq")

    class Application(kernelapp.IPKernelApp):
        def init_iopub(self, context: Any) -> None:
            """What is published waits in this process until it is read: a publisher drops what
            exceeds its mark. It has to be set before the socket is bound."""
            context.setsockopt(zmq.SNDHWM, 0)
            kernelapp.IPKernelApp.init_iopub(self, context)

    Application.launch_instance()


if __name__ == "__main__":
    main()
