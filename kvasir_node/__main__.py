"""`python -m kvasir_node` is the same as `kvasir-node`."""

from kvasir_node.surfaces.cli import main

if __name__ == "__main__":
    main()
