"""What a container really runs: launcher prefixes, shell scripts, vLLM's flags in every spelling."""
