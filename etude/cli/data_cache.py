# SPDX-License-Identifier: Apache-2.0
"""``etude data cache``: what was converted of other tools' files and is kept on this machine. Imports no torch."""

from etude.cli import files
from etude.cli.streams import show
from etude.recordings import cache
from etude.settings import settings


@settings
class CacheOptions:
    """What `show_cache` takes."""

    clear: bool = False
    """Remove all of it; what is asked for again is made again."""

    json: bool = False
    """Print one JSON object on standard output."""


def show_cache(options: CacheOptions) -> int:
    """Print where the cache is and what it holds, or clear it."""
    found = cache.entries()
    size, folder, most = sum(size for _, size, _ in found), cache.folder(), cache.max_bytes()
    removed = cache.clear() if options.clear else 0
    if options.json:
        facts = {"path": str(folder), "entries": len(found), "bytes": size, "max_bytes": most}
        files.print_json({**facts, "removed_bytes": removed} if options.clear else facts)
    elif options.clear:
        show(f"{folder}: {removed / 1e6:,.2f} MB removed.")
    else:
        show(f"{folder}: {len(found):,} converted files, {size / 1e6:,.2f} MB of at most {most / 1e6:,.0f} MB.")
    return 0
