#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs the tests where they may not be at home: in a folder whose path has spaces, as another user than root, in a German
# locale and Nepal's time zone (or in LOCALE and ZONE), with few permissions for new files, without a terminal, with
# SIGINT and SIGHUP ignored (as nohup and shells in the background leave them), and beside two busy processes.
#
# usage: tests/hostile.sh [ARGUMENTS OF PYTEST]     PYTHON=... for another interpreter than .venv/bin/python
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
there=$(mktemp -d "${TMPDIR:-/tmp}/not at home XXXXXX")
ray=$(mktemp -d /tmp/rayXXXXXX)  # Ray makes sockets, whose paths must be short
busy=""
trap 'kill $busy 2>/dev/null || :; rm -rf "$there" "$ray"' EXIT
trap 'exit 130' INT TERM

mkdir "$there/etude" "$there/tmp" "$there/home" "$there/locale"
(cd "$root" && git ls-files -z --cached --others --exclude-standard | tar --null -T - -cf -) | tar -xf - -C "$there/etude"
locale=${LOCALE:-de_DE.UTF-8}
localedef -i "${locale%.*}" -f "${locale#*.}" "$there/locale/$locale" 2>/dev/null || locale=${LOCALE:-C}
as=""
if [ "$(id -u)" = 0 ]; then
    chown -R 65534:65534 "$there" "$ray"
    as="setpriv --reuid 65534 --regid 65534 --clear-groups"
    $as "$python" -c "" || { echo "another user can't run $python: give one that all may read, as PYTHON=..."; exit 2; }
fi
for _ in 1 2; do
    while :; do :; done &
    busy="$busy $!"
done

cd "$there/etude"
echo "in $PWD, $locale, $($as id -un), two busy processes"
{ (
    trap '' INT HUP
    umask 077
    exec env -u VIRTUAL_ENV HOME="$there/home" TMPDIR="$there/tmp" RAY_TMPDIR="$ray" PYTHONPATH="$there/etude" LOCPATH="$there/locale" \
        LC_ALL="$locale" TZ="${ZONE:-Asia/Kathmandu}" PYTHONDONTWRITEBYTECODE=1 \
        $as "$python" -m pytest -p no:cacheprovider "$@"
) </dev/null 2>&1 || echo $? >"$there/status"; } | cat
exit "$(cat "$there/status" 2>/dev/null || echo 0)"
