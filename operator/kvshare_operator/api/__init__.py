"""The Kubernetes surface: names, reasons, the pool resource and its generated schema."""
