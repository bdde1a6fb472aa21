"""What covers the panes when asked for: help, the ticket, a code for a phone, all warnings. It does not know keys."""

from __future__ import annotations

from textwrap import wrap

from kvasir_node.surfaces.invitation import Invitation
from kvasir_node.surfaces.panes.content import Content, nothing, rows
from kvasir_node.surfaces.panes.lines import STRONG, WARN, Line, plain
from kvasir_node.surfaces.picture import Picture
from kvasir_node.surfaces.view import Sheet
from kvasir_node.surfaces.words import clean

HELP = (
    ("1 ... 6", "go to a pane; again, or enter: all of the screen, and back"),
    ("tab arrows", "next and previous pane; up and down (j, k, page keys) scroll it"),
    ("/", "filter demand, workers and log; esc drops the filter"),
    ("s", "another order of the pane's rows"),
    ("l", "log: everything, or warnings only"),
    ("p", "stop lending this machine, and lend again"),
    ("t", "the ticket: how another machine joins; again: how a phone does"),
    ("w", "all warnings"),
    ("esc", "back"),
    ("q", "leave: a node of this screen finishes its answers and stops"),
    ("slots", "answers computed at once; the queue holds those that wait"),
    ("load", "calm, or SATURATED: all are busy and others wait; requests per slot"),
    ("fan-out", "whether experts are computed by workers now, and why"),
    ("demand", "copies of slices of experts: wanted, proven, lent out; ! = some lack"),
    ("workers", "+ proven  ? on trial  . new  ! suspect  x banned"),
    ("experts", "shade = use; m in the file, w by a worker, ! missing; else here"),
    ("elsewhere", "kvasir-node status, peers, demand, doctor"),
)
KEY_CELLS = 12


def content(sheet: Sheet, picture: Picture, width: int) -> Content[Line]:
    if sheet is Sheet.HELP:
        return rows([((f"{key:<{KEY_CELLS}}", STRONG), (words, "")) for key, words in HELP])
    if sheet is Sheet.TICKET:
        return rows(_ticket(picture.ticket, width))
    if sheet is Sheet.PHONE:
        return rows(_phone(picture.invitation, width))
    if not picture.snapshot.warnings:
        return nothing("no warnings")
    return rows(
        [line for warning in picture.snapshot.warnings for line in _wrapped(f"! {clean(warning)}", width, WARN)]
    )


def _ticket(ticket: str, width: int) -> list[Line]:
    if not ticket:
        return [plain("its ticket is not known here: run `kvasir-node ticket` on the node's own machine")]
    head = [plain("Another machine joins this swarm with the command"), plain("")]
    command = _wrapped(f"kvasir-node up --join {ticket}", width, STRONG)
    tail = (
        "The ticket is a secret: whoever has it may join. `kvasir-node ticket --role worker` makes a lesser one. "
        "A phone needs none: press t again."
    )
    return [*head, *command, plain(""), *_wrapped(tail, width, "")]


def _phone(invitation: Invitation | None, width: int) -> list[Line]:
    if invitation is None:
        return [plain("asking the node ...")]
    words = [line for text in invitation.words for line in _wrapped(clean(text, 1000), width, "")]
    if max(map(len, invitation.code), default=0) > width:
        return [*words, plain(""), plain("make the window wider to see the code for a camera", WARN)]
    return [*words, plain(""), *(plain(row) for row in invitation.code)]


def _wrapped(text: str, width: int, style: str) -> list[Line]:
    return [plain(line, style) for line in wrap(text, max(width, 1), break_on_hyphens=False)]
