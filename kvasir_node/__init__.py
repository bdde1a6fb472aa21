"""kvasir-node: a peer-to-peer node that serves Mixture-of-Experts models larger than any of its machines."""

__version__ = "0.1.0"
