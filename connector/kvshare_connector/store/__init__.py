"""The store edge: a narrow interface, an in-memory implementation of it, and the one on top of Mooncake."""
