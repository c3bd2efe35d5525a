"""Scheduler side of the connector: pure ledgers, one probe thread, and the glue to the engine's objects."""
