"""The pages in a real browser: nothing to complain of, nothing wider than the screen, the views can be chosen."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tenfold.reporting.report import write_report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--enable-logging=stderr",
    "--log-level=0",
]

# Around the page, in a frame of a phone's or a desk's width: asks it what it is like, and writes the answer down.
PROBE = """<body><script>
const faults = []; addEventListener("error", event => faults.push(event.message));
function ask(frame) {
  const page = frame.contentDocument, wide = [], width = frame.clientWidth;
  for (const element of page.querySelectorAll("body *")) {
    if (element.closest("svg svg, svg *, .scroll *, pre *, legend")) continue;
    const box = element.getBoundingClientRect();
    if (box.width && (box.right > width + 1 || box.left < -1)) wide.push(element.tagName + "." + element.className);
  }
  const empty = [...page.querySelectorAll("figure")].filter(figure =>
    ![...figure.querySelectorAll("svg")].some(svg => svg.getBoundingClientRect().height > 50));
  const views = [...page.querySelectorAll(".views")].map(views => [...views.querySelectorAll("label")].map(label => {
    label.click();
    return [...views.querySelectorAll(".view")].map(view => view.getBoundingClientRect().height > 0);
  }));
  const text = page.querySelector("figure svg text"), scale = page.querySelector("figure svg").getScreenCTM().a;
  const answer = {faults, wide, empty: empty.length, views, figures: page.querySelectorAll("figure").length,
    scroll: page.documentElement.scrollWidth, width, text: parseFloat(getComputedStyle(text).fontSize) * scale};
  const out = document.createElement("output"); out.textContent = JSON.stringify(answer); document.body.append(out);
}</script>
<iframe onload="ask(this)" style="border:0" width="WIDTH" height="4000" srcdoc="PAGE"></iframe>"""


def look(page: Path, width: int, folder: Path) -> dict[str, Any]:
    """What a browser of `width` pixels has to say of `page`."""
    probe = folder / f"probe-{width}.html"
    text = PROBE.replace("WIDTH", str(width)).replace("PAGE", html.escape(page.read_text(encoding="utf-8")))
    probe.write_text(text, encoding="utf-8")
    home = folder / "home"
    command = [
        str(CHROMIUM),
        *FLAGS,
        f"--user-data-dir={home}",
        "--window-size=1600,4200",
        "--dump-dom",
        probe.as_uri(),
    ]
    environment = os.environ | {"HOME": str(home), "XDG_CONFIG_HOME": str(home), "XDG_CACHE_HOME": str(home)}
    done = subprocess.run(
        command, capture_output=True, text=True, encoding="utf-8", timeout=100, check=True, env=environment
    )
    answer = re.search(r"<output>(.*?)</output>", done.stdout, re.DOTALL)
    assert answer is not None, done.stderr[-2000:]
    told: dict[str, Any] = json.loads(html.unescape(answer[1]))
    told["console"] = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return told


@pytest.mark.slow
@pytest.mark.report
@pytest.mark.parametrize("kind", ["one run", "a comparison"])
def test_a_browser_shows_the_page_whole_at_a_phones_and_a_desks_width(
    kind: str, tmp_path: Path, example: SimpleNamespace
) -> None:
    runs = [example.write(tmp_path / name) for name in ("demo", "a-second-run-with-a-long-name-of-no-use", "third")]
    page = write_report(*(runs if kind == "a comparison" else runs[:1]), out=tmp_path / "page.html")
    for width in (360, 1440):
        told = look(page, width, tmp_path)
        assert told["console"] == told["faults"] == told["wide"] == []
        assert told["width"] == width
        assert told["scroll"] <= width
        assert told["figures"] > 8
        assert told["empty"] == 0
        assert told["text"] > 7.5  # pixels: small, and still to be read
        for views in told["views"]:  # each label shows its own view, and no other
            assert views == [[one == other for other in range(len(views))] for one in range(len(views))]
        assert len(told["views"]) == (3 if kind == "one run" else 1)
