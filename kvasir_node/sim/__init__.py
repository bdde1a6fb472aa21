"""Swarms in virtual time: the machines of decide/ driven from a heap of events, seeded and exactly replayable."""
