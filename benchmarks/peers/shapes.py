"""The shapes of the models that `benchmarks/throughput.py` and `benchmarks/shares.py` train."""

SHAPES: dict[str, dict[str, int]] = {
    "10M": {"layers": 7, "hidden": 256, "heads": 4, "ffn": 768},
    "60M": {"layers": 10, "hidden": 640, "heads": 10, "ffn": 1728},
}
VOCABULARY = 8192
