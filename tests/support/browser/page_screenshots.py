"""Takes the documents' pictures of the live page: an oracle stack under a small steady load, in Chromium.

python tests/support/browser/page_screenshots.py [DIRECTORY]          # docs/screenshots by default
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.browser.browser import Browser, running_browser
from support.clients.stack import ORACLE, ROOT, Stack, running_stack

from pagekv.client import PageKVClient
from pagekv.client.errors import PageKVError

PROMPT = (
    "In the beginning God created the heaven and the earth. And the earth was without form, and void; and darkness was "
    "upon the face of the deep. And the Spirit of God moved upon the face of the waters. And God said, Let there be "
    "light: and there was light."
)
OTHER_END = PROMPT.replace("Let there be light: and there was light.", "Let there be a cache: and there was a cache.")
NAMES = ["atlas", "birch", "coral", "delta", "ember", "fjord", "grove", "heron", "iris", "juno"]
CLIENTS = 9
_CHOOSE = """
const left = ([, row]) => row.state === "running" ? row.max_total_tokens - row.prompt_tokens - row.generated_tokens : 0;
pagekv.requests.choose([...pagekv.requests.rows].sort((a, b) => left(b) - left(a))[0][0]);
"""


class Load:
    """Requests whose prompts have beginnings in common, until `stop`."""

    def __init__(self, stack: Stack) -> None:
        self._target = stack.target
        self._stop = threading.Event()
        rng = random.Random(1)
        self._families = [[rng.randrange(3, 400) for _ in range(rng.randrange(80, 400))] for _ in range(6)]
        self._threads = [threading.Thread(target=self._work, args=(number,)) for number in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def _work(self, number: int) -> None:
        rng = random.Random(number)
        with PageKVClient(self._target) as client:
            for round_number in range(1_000_000):
                family = rng.choice(self._families)
                own = [rng.randrange(3, 400) for _ in range(rng.randrange(1, 60))]
                request_id = f"{rng.choice(NAMES)}-{number + CLIENTS * round_number:03}"
                prompt, length = family[: rng.randrange(40, len(family))] + own, rng.randrange(40, 200)
                try:
                    for _ in client.stream(prompt, max_tokens=length, ignore_eos=True, request_id=request_id):
                        if self._stop.is_set():
                            return
                except PageKVError:
                    return
                if self._stop.wait(rng.random() * 0.4):
                    return

    def stop(self) -> None:
        """Ends it, whatever is under way."""
        self._stop.set()
        for thread in self._threads:
            thread.join()


@contextmanager
def loaded_page(num_blocks: int, step_ms: int, *manager: str) -> Iterator[tuple[Stack, Browser]]:
    """A page of a stack under load, open in a browser."""
    executor = [*ORACLE, "--kv-memory", "2GiB", "--step-time-ms", str(step_ms)]
    http = ["--http-listen", "127.0.0.1:0"]
    with (
        running_stack(executor, ["--num-device-blocks", str(num_blocks), *http, *manager]) as stack,
        running_browser() as browser,
    ):
        with PageKVClient(stack.target) as client:
            client.generate(PROMPT, max_tokens=8, ignore_eos=True)
            client.pin_prefix(PROMPT, 3600)
        load = Load(stack)
        try:
            browser.look(1280, 800)
            browser.open(f"http://{stack.manager.http}/")
            yield stack, browser
        finally:
            load.stop()


def take(directory: Path) -> None:
    """Every picture."""
    directory.mkdir(parents=True, exist_ok=True)
    with loaded_page(520, 25, "--preemption", "swap", "--write-back", "--num-host-blocks", "512") as (_, browser):
        # The charts show two minutes.
        time.sleep(75)
        browser.picture(directory / "light.png")
        browser.look(1280, 800, dark=True)
        # The one that has longest to go.
        browser.run(_CHOOSE)
        time.sleep(2)
        browser.picture(directory / "dark.png")
        browser.run("pagekv.requests.choose(null)")
        browser.look(1280, 800)
        browser.keys("#explain-prompt", OTHER_END)
        browser.click("#explain button[type=submit]")
        time.sleep(2)
        browser.run("document.getElementById('explain').scrollIntoView()")
        time.sleep(1)
        browser.picture(directory / "explain.png")
        browser.look(390, 844, scale=1.5)
        browser.run("scrollTo(0, 0)")
        time.sleep(2)
        browser.picture(directory / "phone.png")
        assert browser.complaints() == []


if __name__ == "__main__":
    take(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "screenshots")
