"""Preparing takes the same memory for little text and for much, all of it counted: Python's, Rust's and Arrow's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models

# The peak of a process of its own, which does nothing else.
PREPARE = """
import sys
from pathlib import Path
from tenfold.config.run import PrepareConfig
from tenfold.data.prepare import prepare
source, out, tokenizer = sys.argv[1:]
prepare(source, Path(out), PrepareConfig(tokenizer=tokenizer, workers=2, dedup=True), show_progress=False)
print(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_peak_memory_does_not_grow_with_the_text(tmp_path: Path, kind: str) -> None:
    # One unknown word a document: encoding is nearly free, and what is measured is all the rest.
    tokenizer = Tokenizer(models.WordLevel({"<|endoftext|>": 0, "<unk>": 1}, unk_token="<unk>"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    filler = "a ship sails north " * 100

    def peak(megabytes: int) -> int:
        file = tmp_path / f"{megabytes}.{kind}"
        texts = (f"{number} {filler}" for number in range(megabytes * 1_000_000 // len(filler)))
        if kind == "jsonl":
            with file.open("w") as opened:
                opened.writelines(f'{{"text": "{text}"}}\n' for text in texts)
        else:
            pq.write_table(pa.table({"text": list(texts)}), file, use_dictionary=False, compression="none")
        command = [sys.executable, "-c", PREPARE, str(file), str(tmp_path / f"{file.name}-out"), f"{tokenizer_file}"]
        return int(subprocess.run(command, capture_output=True, check=True, timeout=120).stdout) * 1024

    tokenizer_file = tmp_path / "tokenizer.json"
    assert peak(120) - peak(12) < 25_000_000
