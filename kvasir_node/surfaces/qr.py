"""Text as a code for a camera, drawn with half blocks for a terminal. It does not know what the text is."""

from __future__ import annotations

import io

from kvasir_node.base.errors import UsageError


def qr_text(text: str, what: str) -> str:
    """Raises UsageError that names `what` it is when the text is too long. Capitals and digits alone take two thirds
    of the room."""
    import segno
    from segno.encoder import DataOverflowError

    try:
        code = segno.make_qr(text, error="l")
    except DataOverflowError as error:
        raise UsageError(f"the {what} has too many addresses for a QR code; pass it as text") from error
    drawn = io.StringIO()
    code.terminal(out=drawn, border=2, compact=True)
    return drawn.getvalue().rstrip("\n")
