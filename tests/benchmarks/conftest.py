"""The benchmarks are scripts beside the package, not part of it: make them importable however pytest is started."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))
