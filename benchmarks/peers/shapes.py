"""The shapes of the models of `benchmarks/throughput.py`, `benchmarks/shares.py` and `benchmarks/offload.py`."""

SHAPES: dict[str, dict[str, int]] = {
    "10M": {"layers": 7, "hidden": 256, "heads": 4, "ffn": 768},
    "60M": {"layers": 10, "hidden": 640, "heads": 10, "ffn": 1728},
    "90M": {"layers": 12, "hidden": 768, "heads": 12, "ffn": 2048},
}
VOCABULARY = 8192
