"""Models: what a checkpoint holds, its trunk and experts, and how text comes of them.

Whatever module of this room is imported first, transformers is imported as lean as can be before it.
"""

from kvasir_node.model.lean_transformers import import_lean

import_lean()
