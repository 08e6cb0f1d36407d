# SPDX-License-Identifier: Apache-2.0
"""Run the command line: ``python -m etude ...`` is the same as ``etude ...``."""

from etude.cli.main import main

raise SystemExit(main())
