"""Speed of the parts, measured on this machine. `make bench`, or `python -m benchmarks [--json] [NAME ...]`."""
