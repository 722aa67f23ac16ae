"""Makes the benchmarks importable. They are scripts beside the package, not part of it."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))
