"""What a pool resolves to, and what its status says."""
