"""Nothing outside of a test run is read or written by it, and no test waits for a measurement."""

import os
import tempfile

_CACHE = tempfile.TemporaryDirectory(prefix="specdec-tests-")
os.environ["XDG_CACHE_HOME"] = _CACHE.name
# Rounds tell what they take; tests of measuring ask for it.
os.environ["SPECDEC_MEASURING_SECONDS"] = "0"
