"""The program's first lines: `kvasir-node` and `python -m kvasir_node`. It knows no verb.

An interrupt while the command line itself is being imported ends the process without a traceback: nothing has been
opened by then.
"""

from __future__ import annotations

import os
import signal
from typing import NoReturn

INTERRUPTED = 130


def main() -> NoReturn:
    signal.signal(signal.SIGINT, _end_at_once)
    from kvasir_node.surfaces.cli import main as run_cli

    run_cli()


def _end_at_once(number: int, frame: object) -> NoReturn:
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
