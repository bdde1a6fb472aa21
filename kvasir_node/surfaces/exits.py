"""How a command ends that failed: one line on stderr and an exit code.

It does not know the verbs. Our own errors carry their exit codes; what the machine or the terminal did is 1.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from contextlib import suppress

import typer

from kvasir_node.base.errors import BugError, KvasirError, UsageError

FAILED = 1
UNHEALTHY = 4
RESTART = 75  # BSD's EX_TEMPFAIL: not wrong, start it again
INTERRUPTED = 130

_ClickError = typer.BadParameter.mro()[2]  # ClickException: typer ships its own click since 0.2x; names moved
_ENVIRONMENT = frozenset(
    {  # the machine's or the user's doing; any other OSError that comes this far is a bug
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EFBIG,
        errno.EIO,
        errno.ENXIO,
        errno.EPIPE,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.ENAMETOOLONG,
        errno.ELOOP,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
    }
)


def say(words: str) -> None:
    with suppress(OSError):  # who closed stderr wants no words, and the exit code still holds
        print(words, file=sys.stderr, flush=True)


def exit_code_of(error: BaseException) -> int:
    """What the process ends with, after one line on stderr; a traceback is for our bugs alone."""
    while isinstance(error, BaseExceptionGroup):  # nurseries wrap; the first cause is what the person needs
        error = error.exceptions[0]
    if isinstance(error, _ClickError):
        say(f"error: {error.format_message()}")  # type: ignore[attr-defined]
        return UsageError.exit_code
    if isinstance(error, KvasirError) and not isinstance(error, BugError):
        say(f"error: {error}")
        return error.exit_code
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return INTERRUPTED
    if isinstance(error, OSError) and error.errno in _ENVIRONMENT:
        _abandon_stdout()
        if not isinstance(error, BrokenPipeError):  # then the reader left; nothing to tell anyone
            say(f"error: {error.strerror}{f': {error.filename}' if error.filename else ''}")
        return FAILED
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else FAILED
    traceback.print_exception(error)
    say("error: this is a bug of kvasir-node; please report it with the lines above")
    return FAILED


def _abandon_stdout() -> None:
    """Gives up what cannot be written, or the interpreter would try again at its end and complain."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
