"""The Mooncake store that the operator runs for a pool: pure builders and judgements, no cluster."""
