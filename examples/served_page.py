# SPDX-License-Identifier: Apache-2.0
"""A policy that is served to a page: CartPole runs in the browser, and asks this program for each action.

    python examples/served_page.py              # serves until Ctrl-C: open the address, and push the cart
    python examples/served_page.py picture      # headless Chromium plays for a while; needs it on the path

Needs ``pip install ".[serve]"`` in the clone. The page is ``served_page.html``. It comes from the server that it asks,
as browsers want it: ``etude serve`` alone answers requests of programs, and of pages of its own address.
"""

import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import uvicorn
from starlette.requests import Request
from starlette.responses import FileResponse
from starlette.routing import Route

import etude
from etude.serving import app

PAGE = Path(__file__).with_suffix(".html")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


async def page(request: Request) -> FileResponse:
    """Answer GET / with the page."""
    return FileResponse(PAGE)


def look(url: str, server: uvicorn.Server) -> None:
    """Let a headless browser show the page for 6 seconds of its time, keep a picture, and print what the page says."""
    browser = next(filter(None, map(shutil.which, BROWSERS)))
    args = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tempfile.mkdtemp()}"]
    args += ["--window-size=640,480", "--virtual-time-budget=6000", "--screenshot=served_page.png", "--dump-dom", url]
    try:
        done = subprocess.run([browser, *args], capture_output=True, text=True, timeout=200)
        said = re.search(r'id="said">(.*?)<', done.stdout)
        print(f"the page says: {said[1] if said else done.stderr}")
    finally:
        server.should_exit = True


ppo = etude.PPO(etude.PPOConfig(env="CartPole-v1", seed=1))
result = ppo.fit(etude.Stop(return_mean=475, env_steps=200_000))
print(f"return {result.return_mean:.1f} after {result.env_steps:,} steps")

web = app(ppo.policy)  # a Starlette app: POST /act, and the rest of the protocol
web.routes.append(Route("/", page))
for_picture = sys.argv[1:] == ["picture"]
listening = socket.create_server(("127.0.0.1", 0 if for_picture else 8080))
server = uvicorn.Server(uvicorn.Config(web, log_level="warning"))
url = f"http://127.0.0.1:{listening.getsockname()[1]}"
print(f"open {url}")
if for_picture:
    threading.Thread(target=look, args=(url, server)).start()
server.run(sockets=[listening])
