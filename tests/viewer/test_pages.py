# SPDX-License-Identifier: Apache-2.0
import html
import http.client
import json
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from urllib.parse import urlencode, urlsplit

import pytest
from shown_data import episode, write

from etude.errors import DataError, SettingsError
from etude.recordings import Recording
from etude.viewer import PageServer, RecordingView, save_page

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on the path")


@pytest.fixture(scope="module")
def views(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shown")
    first = write(folder / "first", [episode(i, 4 + i) for i in range(6)])
    second = write(folder / "<script>second", [episode(i, 3, reward=-1.0) for i in range(2)])
    return [RecordingView(Recording.open(path)) for path in (first, second)]


@pytest.fixture(scope="module")
def url(views):
    with PageServer(views).running() as server:
        yield server.url


def get(url, name="", **asked):
    with urllib.request.urlopen(f"{url}{name}?{urlencode(asked)}") as answer:
        return answer.read()


def test_the_server_answers_what_the_views_say(views, url):
    assert json.loads(get(url, "api/recordings")) == [view.summary() for view in views]
    found = json.loads(get(url, "api/episodes", recording=0, where="length > 6", sort="length", descending=1))
    assert found["length"] == [9, 8, 7]
    assert json.loads(get(url, "api/episode", recording=1, id="e1")) == views[1].episode("e1")
    image = get(url, "api/frame", recording=0, id="e2", agent=0, column="obs/camera", t=3)
    assert image == views[0].frame("e2", 0, "obs/camera", 3)
    assert b"<title>" in get(url)


def test_that_a_file_has_gone_is_said(tmp_path):
    view = RecordingView(Recording.open(write(tmp_path / "data", [episode(0, 4)])))
    view.summary()  # which reads what it counts
    with PageServer([view]).running() as server:
        view.recording.files[0].unlink()
        with pytest.raises(urllib.error.HTTPError) as refused:
            get(server.url, "api/recordings")
        with refused.value as answer:
            assert "No such file" in json.load(answer)["error"]


@pytest.mark.parametrize(
    ("name", "asked", "word"),
    [
        ("api/episodes", {"recording": 0, "where": "nothing > 1"}, "nothing"),
        ("api/episodes", {"recording": 7}, "there is no recording 7: they are numbered from 0 to 1"),
        ("api/episodes", {"recording": -1}, "there is no recording -1"),
        ("api/episode", {"recording": 0}, "can't answer"),
        ("api/frame", {"recording": 0, "id": "e0", "agent": "x", "column": "obs/camera", "t": 0}, "can't answer"),
        ("api/open", {"path": "/etc/passwd"}, "nothing at /api/open"),
    ],
)
def test_what_can_not_be_answered_is_said(url, name, asked, word):
    with pytest.raises(urllib.error.HTTPError) as raised:
        get(url, name, **asked)
    assert raised.value.code == 400
    assert word in json.loads(raised.value.read())["error"]


def test_a_page_of_another_site_gets_nothing(url):
    # A name of the attacker's own that leads to this machine: the browser sends the name.
    connection = http.client.HTTPConnection(urlsplit(url).netloc)
    connection.request("GET", "/api/recordings", headers={"Host": "evil.example:80"})
    answer = connection.getresponse()
    assert answer.status == 403
    assert b"first" not in answer.read()
    connection.request("GET", "/api/recordings", headers={"Host": "LOCALHOST:80"})
    assert connection.getresponse().status == 200
    connection.close()


def test_a_port_that_is_taken_is_said(views, url):
    with pytest.raises(SettingsError, match="is taken"):
        PageServer(views, urlsplit(url).port)
    with pytest.raises(SettingsError, match="can't be used"):
        PageServer(views, 99_999)


def test_a_saved_page_holds_what_was_asked_for_and_says_what_it_lacks(views, tmp_path):
    notes = save_page(views, tmp_path / "page.html", where="length > 2", max_episodes=2)
    text = (tmp_path / "page.html").read_text()
    data = json.JSONDecoder().raw_decode(text[text.index("const ANSWERS = ") + len("const ANSWERS = ") :])[0]
    assert data['["episode","0","e1"]'] == views[0].episode("e1")
    assert '["episode","0","e2"]' not in data
    assert data['["frame","0","e1","0","obs/camera","5"]'].startswith("data:image/png;base64,")
    assert data['["episodes","0","","",""]']["episode_id"] == [f"e{i}" for i in range(6)]
    assert len(notes) == 1
    assert "2 of 6 episodes" in notes[0]
    assert "<script>second" not in text  # a name from a file must not become part of the page
    assert not re.search(r"(src|href)=\"(https?:)?//", text)


def test_a_page_that_cant_be_written_is_an_error(views, tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "page.html"):
        with pytest.raises(DataError, match=f"{path}: can't be written"):
            save_page(views, path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_folder_of_a_saved_page_is_made(views, tmp_path):
    save_page(views, tmp_path / "new" / "page.html", max_episodes=1)
    assert (tmp_path / "new" / "page.html").stat().st_size > 1000


def test_a_saved_page_stays_below_its_size(views, tmp_path, monkeypatch):
    monkeypatch.setattr("etude.viewer.pages.MAX_PAGE_BYTES", 10_000)
    notes = save_page(views, str(tmp_path / "page.html"))
    assert (tmp_path / "page.html").stat().st_size < 60_000
    assert any("make it too large" in note for note in notes)


def drawn(address, tmp_path):
    """What a browser has made of a page: its elements, after its script has run."""
    args = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
    args += ["--window-size=1200,2400", "--virtual-time-budget=20000", "--dump-dom", address]
    done = subprocess.run(args, capture_output=True, text=True, timeout=120)
    assert 'data-ready="yes"' in done.stdout, done.stderr[-2000:]
    return html.unescape(done.stdout[done.stdout.index("<main>") : done.stdout.index("<script>\n")])


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("saved", [False, True])
def test_a_browser_shows_it(views, url, tmp_path, saved):
    address = url
    if saved:
        save_page(views, tmp_path / "page.html")
        address = (tmp_path / "page.html").as_uri()
    text = drawn(f"{address}#0/e2/3", tmp_path / "browser")
    assert '<p id="error" class="bad" role="alert"></p>' in text
    assert str(views[1].recording.path) in text
    assert text.count('<tr class="chosen">') == 2  # an episode of each recording is open
    assert "Episode e2" in text
    assert "t 3 of 6" in text
    assert 'aria-label="Histogram of return"' in text
    assert 'aria-label="Histogram of reward"' in text
    assert len(re.findall(r'<img alt="obs/camera"[^>]* src="', text)) == 2
    assert '<span class="now">0.3</span>' in text  # the speed at step 3
