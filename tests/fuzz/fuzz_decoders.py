"""A coverage-guided run over all decoders, by hand: `pip install atheris`, then

    python tests/fuzz/fuzz_decoders.py CORPUS_FOLDER -max_total_time=1800 -rss_limit_mb=2048

The first byte chooses the decoder. A crash file is a finding: make a test of it, then mend. Not collected by pytest.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["kvasir_node"]):
    from fuzz_targets import TARGETS, hold, seeds

NAMES = tuple(TARGETS)


def one_input(data: bytes) -> None:
    if data:
        hold(NAMES[data[0] % len(NAMES)], data[1:])


def write_seeds(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, examples in seeds().items():
        for number, example in enumerate(examples):
            file = folder / f"seed-{name.replace(' ', '-')}-{number}"
            file.write_bytes(bytes((NAMES.index(name),)) + example)


def main() -> None:
    folders = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    if not folders:
        sys.exit(__doc__)
    logging.disable()  # each hostile peer would have its line
    write_seeds(Path(folders[0]))
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
