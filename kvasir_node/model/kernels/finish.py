"""Makes machine code for this processor of the kernels' LLVM code; a program: `python -I finish.py CODE > OBJECT`.

It imports nothing of the project, so that it is small and quick to start.
"""

from __future__ import annotations

import lzma
import sys
from pathlib import Path

import llvmlite.binding as llvm


def machine() -> llvm.TargetMachine:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=2,
        reloc="pic",
        codemodel="jitdefault",
        jit=True,
    )


def finish(code: bytes) -> bytes:
    """An object file, of what `build` wrote."""
    processor = machine()
    module = llvm.parse_assembly(lzma.decompress(code).decode())
    module.triple, module.data_layout = llvm.get_process_triple(), str(processor.target_data)
    return processor.emit_object(module)


if __name__ == "__main__":
    sys.stdout.buffer.write(finish(Path(sys.argv[1]).read_bytes()))
