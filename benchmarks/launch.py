# SPDX-License-Identifier: Apache-2.0
"""Runs a command, and says on the last line of standard error how long it took and the most memory it held.

A process of its own, and a small one: a child's peak memory counts that of its parent at the time of the fork.
"""

import resource
import subprocess
import sys
import time

if __name__ == "__main__":
    begin = time.perf_counter()
    code = subprocess.call(sys.argv[1:])
    seconds = time.perf_counter() - begin
    sys.stderr.write(f"\n{seconds} {resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss}")
    sys.exit(code)
