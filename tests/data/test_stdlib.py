"""The Python library as a corpus."""

from __future__ import annotations

import sysconfig
from itertools import islice
from pathlib import Path

from tenfold.data.stdlib import stdlib_documents, stdlib_files, stdlib_fingerprint


def test_the_listing_is_sorted_and_the_same_each_time() -> None:
    root = Path(sysconfig.get_path("stdlib"))
    files = stdlib_files()
    assert files == stdlib_files(root)
    assert [path.relative_to(root).parts for path in files] == sorted(path.relative_to(root).parts for path in files)
    assert root / "argparse.py" in files
    assert stdlib_fingerprint() == stdlib_fingerprint()


def test_tests_and_installed_packages_are_left_out(tmp_path: Path) -> None:
    kept = ["ast.py", "json/decoder.py", "unittest/case.py"]
    left_out = [
        "test/test_ast.py",
        "lib2to3/tests/data/bom.py",
        "idlelib/idle_test/test_run.py",
        "site-packages/numpy/core.py",
        "json/__pycache__/decoder.py",
        "_sysconfigdata__linux_.py",
        "pydoc_data/topics.py",
        "LICENSE.txt",
    ]
    for name in kept + left_out:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("pass")
    assert [path.relative_to(tmp_path).as_posix() for path in stdlib_files(tmp_path)] == kept


def test_no_file_of_this_python_is_a_test() -> None:
    root = Path(sysconfig.get_path("stdlib"))
    folders = {part for path in stdlib_files() for part in path.relative_to(root).parts[:-1]}
    assert not folders & {"test", "tests", "idle_test", "site-packages"}


def test_documentation_comes_first_and_then_code() -> None:
    first = list(islice(stdlib_documents(), 5))
    assert all(text.strip() for text in first)
    assert first == list(islice(stdlib_documents(), 5))
