"""Worker side of the connector: facts, plans, staging arena, transfers, and the glue to the engine's calls."""
