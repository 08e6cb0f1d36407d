"""Plays a game whose actions a run chooses; with nothing but Python.  plain_client.py URL GAMES

The game has eight rounds. Each shows -1 or 1; to say the same (0 or 1) earns 1.
"""

import json
import random
import sys
import threading
import urllib.error
import urllib.request

URL, GAMES = sys.argv[1], int(sys.argv[2])
returns, errors = [], []


def post(path, fields):
    request = urllib.request.Request(URL + path, json.dumps(fields).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def play(seed):
    draws = random.Random(seed)
    session = post("/sessions", {})["session"]
    while True:
        shown, earned, total = draws.choice((-1, 1)), {}, 0
        for t in range(9):
            ends = {"terminated": True} if t == 8 else {}
            action = post("/act", {"session": session, "obs": [shown], **earned, **ends})["action"]
            if action is None:
                break
            reward = float(action == (shown + 1) // 2)
            shown, earned, total = draws.choice((-1, 1)), {"reward": reward}, total + reward
        if t == 8:
            returns.append(total)


def until_the_end(seed):
    try:
        play(seed)
    except urllib.error.HTTPError as error:
        if error.code != 410:  # else the run has ended
            errors.append(error.read().decode())
    except OSError:
        pass  # likewise


threads = [threading.Thread(target=until_the_end, args=(seed,)) for seed in range(GAMES)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not {"etude", "numpy"} & sys.modules.keys()
print(json.dumps({"returns": returns, "errors": errors}))
