"""The KVShare connector for vLLM. Importing this package imports nothing else."""
