"""Skip the tests of grapeshot.rpc if its extra is not installed."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("msgspec") else ["test_*.py"]
