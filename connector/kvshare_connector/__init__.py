"""The connector that vLLM loads. Importing the package costs nothing; ``connector`` is the module vLLM names."""
